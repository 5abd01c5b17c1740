#include "worker/model/weights.h"

#include <xxhash.h>

#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/elementwise.h"
#include "proto/vocab/check.h"
#include "worker/model/checkpoint.h"
#include "worker/model/weight_plan.h"

namespace weft::worker {

namespace {

constexpr size_t kNamesShownMax = 5;

// ---- directory --------------------------------------------------------------------------------------

// The atomic words at the start of the arena. Ranks of several processes use them at once.
class Directory {
 public:
  explicit Directory(const std::byte* arena)
      : words_(reinterpret_cast<uint64_t*>(const_cast<std::byte*>(arena))),
        seals_(words_ + kDirectoryHeaderBytes / static_cast<int64_t>(sizeof(uint64_t))) {}

  uint64_t fingerprint() const { return at(words_).load(std::memory_order_acquire); }
  // Claims a fresh arena for the plan; false if it belongs to another.
  bool claim(const WeightPlan& plan) {
    uint64_t found = 0;
    at(words_).compare_exchange_strong(found, plan.fingerprint);
    at(words_ + 1).store(plan.places.size(), std::memory_order_relaxed);
    return found == 0 || found == plan.fingerprint;
  }
  uint64_t seal(size_t place) const { return at(seals_ + place).load(std::memory_order_acquire); }
  void set_seal(size_t place, uint64_t seal) { at(seals_ + place).store(seal, std::memory_order_release); }

 private:
  static std::atomic_ref<uint64_t> at(uint64_t* word) { return std::atomic_ref<uint64_t>(*word); }
  uint64_t* words_;
  uint64_t* seals_;
};

uint64_t seal_of(const std::byte* arena, const WeightPlace& place) {
  const uint64_t hash = XXH3_64bits(arena + place.offset, static_cast<size_t>(place.bytes));
  return hash == 0 ? 1 : hash;
}

// ---- what the checkpoint must hold ------------------------------------------------------------------

// "model.layers.61.…" of a draft layer, or a rotary table that older exports left behind.
bool may_be_ignored(std::string_view name, const ModelConfig& config) {
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return false;
  int64_t layer = 0;
  size_t at = kPrefix.size();
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && layer <= INT32_MAX; ++at) {
    layer = layer * 10 + (name[at] - '0');
  }
  const auto layers = static_cast<int64_t>(config.layers.size());  // loaded ones, a draft layer among them
  return at < name.size() && name[at] == '.' && layer >= layers &&
         layer < config.main_layers() + config.extra_layers;
}

// What a tensor repeats, or empty: released draft layers bring embedding and head again, and an export may
// write out a tied head.
std::string repeated(std::string_view name, const ModelConfig& config) {
  const char* const embedding = "model.embed_tokens.weight";
  const char* const head = config.tied_embeddings ? embedding : "lm_head.weight";
  if (config.tied_embeddings && name == "lm_head.weight") return embedding;
  if (!config.draft_layer) return "";
  const std::string prefix = "model.layers." + std::to_string(config.main_layers()) + ".";
  if (name == prefix + "embed_tokens.weight") return embedding;
  if (name == prefix + "shared_head.head.weight") return head;
  return "";
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.type == b.type && a.shape == b.shape &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes)) == 0;
}

struct Found {
  const WeightSource* source = nullptr;
  const Checkpoint::Item* item = nullptr;
};

Result<Found> find_source(const Checkpoint& checkpoint, const WeightPlace& place) {
  const bool fused = !place.fused.name.empty() && checkpoint.find(place.fused.name) != nullptr;
  const WeightSource& source = fused ? place.fused : place.source;
  const Checkpoint::Item* item = checkpoint.find(source.name);
  if (item == nullptr)
    return error(ErrorCode::kBadCheckpoint, "the checkpoint has no such tensor", source.name);
  if (item->tensor->shape != source.shape) {
    return error(ErrorCode::kBadCheckpoint,
                 "has shape " + shape_text(item->tensor->shape) + ", but config.json implies " +
                     shape_text(source.shape),
                 item->file + ": " + source.name);
  }
  const TensorType type = item->tensor->type;
  if (type != TensorType::kF32 && type != TensorType::kBF16 && type != TensorType::kF16) {
    return error(ErrorCode::kUnsupported, "weights of type " + item->tensor->type_name + " are not served",
                 item->file + ": " + source.name);
  }
  return Found{&source, item};
}

// Every place's source, after checking that the checkpoint holds these tensors and no others.
Result<std::vector<Found>> account(const Checkpoint& checkpoint, const WeightPlan& plan,
                                   const ModelConfig& config) {
  std::vector<Found> sources;
  std::set<std::string_view> used;
  for (const WeightPlace& place : plan.places) {
    TRY(const Found found, find_source(checkpoint, place));
    sources.push_back(found);
    used.insert(found.source->name);
  }
  std::string names;
  size_t count = 0;
  for (const auto& [name, item] : checkpoint.items()) {
    if (used.contains(name) || may_be_ignored(name, config)) continue;
    const std::string original = repeated(name, config);
    if (!original.empty() && same_bytes(*item.tensor, *checkpoint.find(original)->tensor)) continue;
    if (++count <= kNamesShownMax) names += (count == 1 ? "" : ", ") + item.file + ": " + name;
  }
  if (count > kNamesShownMax) names += " and " + std::to_string(count - kNamesShownMax) + " more";
  if (count > 0) {
    return error(ErrorCode::kBadCheckpoint, "config.json does not account for: " + names,
                 "unexpected tensors");
  }
  return sources;
}

// ---- packing ----------------------------------------------------------------------------------------

float widen_half(uint16_t half) {
  const auto sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: fraction · 2⁻²⁴, exact in float32
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// The elements [first, first + count) of a tensor as kernels can read them: aligned, float32 or bf16. Points
// into the mapping where that will do.
struct Elements {
  DType dtype = DType::kF32;
  const void* data = nullptr;
  std::vector<float> widened;
  std::vector<std::byte> aligned;
};

Elements elements_of(const Tensor& tensor, int64_t first, int64_t count) {
  Elements out;
  const auto size = static_cast<size_t>(count);
  if (tensor.type == TensorType::kF16) {
    out.widened.resize(size);
    const std::byte* at = tensor.data + first * 2;
    for (size_t i = 0; i < size; ++i) {
      uint16_t half = 0;
      std::memcpy(&half, at + 2 * i, sizeof half);
      out.widened[i] = widen_half(half);
    }
    out.data = out.widened.data();
    return out;
  }
  out.dtype = tensor.type == TensorType::kBF16 ? DType::kBF16 : DType::kF32;
  const size_t width = dtype_bytes(out.dtype);
  const std::byte* at = tensor.data + static_cast<size_t>(first) * width;
  out.data = at;
  if (reinterpret_cast<uintptr_t>(at) % width != 0) {
    out.aligned.assign(at, at + size * width);
    out.data = out.aligned.data();
  }
  return out;
}

void pack_place(const WeightPlace& place, const Found& found, std::byte* out) {
  const WeightSource& source = *found.source;
  // The span of elements that the place reads.
  const int64_t rows = place.form == WeightForm::kVector ? 1 : place.outputs;
  const int64_t last = (place.groups - 1) * source.group_stride + (rows - 1) * source.output_stride +
                       (place.k - 1) * source.k_stride;
  const Elements elements = elements_of(*found.item->tensor, source.offset, last + 1);
  if (place.form == WeightForm::kPacked) {
    const kernels::PackSource from{.dtype = elements.dtype,
                                   .data = elements.data,
                                   .group_stride = source.group_stride,
                                   .output_stride = source.output_stride,
                                   .k_stride = source.k_stride};
    kernels::pack_matrix(place.dtype, place.groups, place.outputs, place.k, from, out, 0, place.groups);
    return;
  }
  const int64_t count = rows * place.k;
  if (elements.dtype == place.dtype) {
    std::memcpy(out, elements.data, static_cast<size_t>(place.bytes));
  } else if (place.dtype == DType::kF32) {
    kernels::convert_to_f32(elements.data, elements.dtype, count, reinterpret_cast<float*>(out));
  } else {
    kernels::convert(static_cast<const float*>(elements.data), count, place.dtype, out);
  }
}

// One bad value poisons whatever it touches, and often without a trace: a comparison with NaN is false, so a
// router or an indexer would go on choosing. Looks at what was packed, where also a value that its dtype
// cannot hold shows. Padding is zero.
Result<void> check_finite(const WeightPlace& place, const Found& found, const std::byte* packed) {
  const auto values = place.bytes / static_cast<int64_t>(dtype_bytes(place.dtype));
  if (kernels::all_finite(place.dtype, packed, values)) return {};
  return error(ErrorCode::kBadCheckpoint,
               std::string("holds a value that is NaN, infinite or beyond ") + dtype_name(place.dtype),
               found.item->file + ": " + found.source->name);
}

void check_arena(const std::byte* arena, int64_t arena_bytes, const WeightPlan& plan) {
  CHECK(arena != nullptr && reinterpret_cast<uintptr_t>(arena) % kWeightAlignment == 0, "arena alignment");
  CHECK_GE(arena_bytes, plan.arena_bytes);
}

Error other_model() {
  return error(ErrorCode::kFailedPrecondition, "the weight arena was laid out for another model or dtype",
               "arena");
}

}  // namespace

int64_t weight_arena_bytes(const ModelConfig& config, DType dtype) {
  ModelWeights unused;
  return plan_weights(config, dtype, unused).arena_bytes;
}

Result<LoadCounts> load_weights(const std::string& folder, const ModelConfig& config, DType dtype,
                                std::byte* arena, int64_t arena_bytes, int rank, int rank_count,
                                const std::function<void(const LoadCounts&)>& progress) {
  CHECK(rank >= 0 && rank < rank_count, rank, " of ", rank_count);
  ModelWeights unused;
  const WeightPlan plan = plan_weights(config, dtype, unused);
  check_arena(arena, arena_bytes, plan);
  TRY(const Checkpoint checkpoint, Checkpoint::open(folder));
  TRY(const std::vector<Found> sources, account(checkpoint, plan, config));
  Directory directory(arena);
  if (!directory.claim(plan)) return other_model();

  LoadCounts counts;
  const auto first = static_cast<size_t>(rank);
  const auto stride = static_cast<size_t>(rank_count);
  for (size_t i = first; i < plan.places.size(); i += stride) {
    ++counts.tensors_total;
    counts.bytes_total += plan.places[i].bytes;
  }
  for (size_t i = first; i < plan.places.size(); i += stride) {
    const WeightPlace& place = plan.places[i];
    const uint64_t sealed = directory.seal(i);
    if (sealed == 0 || sealed != seal_of(arena, place)) {
      directory.set_seal(i, 0);
      pack_place(place, sources[i], arena + place.offset);
      TRY_VOID(check_finite(place, sources[i], arena + place.offset));
      directory.set_seal(i, seal_of(arena, place));
      ++counts.tensors_packed;
    }
    ++counts.tensors_done;
    counts.bytes_done += place.bytes;
    if (progress) progress(counts);
  }
  return counts;
}

Result<ModelWeights> view_weights(const ModelConfig& config, DType dtype, const std::byte* arena,
                                  int64_t arena_bytes) {
  ModelWeights weights;
  const WeightPlan plan = plan_weights(config, dtype, weights);
  check_arena(arena, arena_bytes, plan);
  const Directory directory(arena);
  if (directory.fingerprint() != 0 && directory.fingerprint() != plan.fingerprint) return other_model();
  for (size_t i = 0; i < plan.places.size(); ++i) {
    const WeightPlace& place = plan.places[i];
    if (directory.seal(i) == 0) {
      return error(ErrorCode::kFailedPrecondition, "is not packed yet", place.source.name);
    }
    const std::byte* data = arena + place.offset;
    if (auto* const* matrix = std::get_if<kernels::PackedMatrix*>(&place.view)) {
      **matrix = {.dtype = place.dtype,
                  .groups = place.groups,
                  .group_outputs = place.outputs,
                  .k = place.k,
                  .data = data};
    } else if (auto* const* vector = std::get_if<const float**>(&place.view)) {
      **vector = reinterpret_cast<const float*>(data);
    } else {
      **std::get_if<const std::byte**>(&place.view) = data;
    }
  }
  return weights;
}

}  // namespace weft::worker
