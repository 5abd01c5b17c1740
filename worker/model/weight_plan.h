// The one list of a model's packed tensors: what each is called, where it comes from in a checkpoint, how it
// is laid out in the weight arena, and which field of ModelWeights shows it. Loader, viewer and size
// arithmetic all walk it, so they cannot disagree. A pure function of configuration and dtype.
//
// Arena: [fingerprint u64][tensor count u64][48 bytes zero][seal u64 × count] … then tensors, each at a
// multiple of 64, in list order. A seal is 0 (not packed) or the XXH3 of the tensor's bytes (1 if that is 0).
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "worker/model/weights.h"

namespace weft::worker {

// Part of a checkpoint tensor. Strides and offset in weights, as kernels::PackSource counts them; `shape` is
// the tensor's own, where two weights of four bits are one element.
struct WeightSource {
  std::string name = {};
  std::vector<int64_t> shape = {};
  int64_t offset = 0;
  int64_t group_stride = 0, output_stride = 0, k_stride = 1;
};

enum class WeightForm : uint8_t {
  kPacked,  // kernels::pack_matrix
  kRows,    // rows as stored, converted to dtype
  kVector,  // float32
};

struct WeightPlace {
  WeightForm form = WeightForm::kPacked;
  DType dtype = DType::kF32;
  kernels::PanelFormat format = kernels::PanelFormat::kDense;  // kPacked: may stay quantised
  int64_t groups = 1, outputs = 0, k = 0;                      // kRows: outputs × k; kVector: k
  WeightCoding coding = WeightCoding::kNone;                   // of the source
  WeightSource source = {};
  std::vector<WeightSource> scales = {};  // kFp8: of the blocks; NVFP4: of 16 k, and of the matrix
  WeightSource fused = {};  // the other spelling of an expert matrix, never quantised; empty name: none
  WeightSource plain = {};  // of a quantised matrix that a checkpoint may also leave as it was
  std::variant<kernels::PackedMatrix*, const float**, const std::byte**> view = {};
  int64_t offset = 0, bytes = 0;  // in the arena
};

struct WeightPlan {
  std::vector<WeightPlace> places;
  int64_t arena_bytes = 0;
  uint64_t fingerprint = 0;  // never 0
};

// `weights` is resized and its addresses go into the places: it must outlive the plan and stay where it is.
WeightPlan plan_weights(const ModelConfig& config, DType dtype, ModelWeights& weights);
// Points the views at their places in the arena.
void set_views(const WeightPlan& plan, const std::byte* arena);

inline constexpr int64_t kWeightAlignment = 64;
inline constexpr int64_t kDirectoryHeaderBytes = 64;

}  // namespace weft::worker
