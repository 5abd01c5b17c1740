// What config.json says about quantised weights: how they are coded, and which modules have them.
//
// Three codings are served. Only linear layers are quantised; embeddings, norms, routers, lm_head and the
// indexer's weights_proj never are, and config.json may name more that are not. Activations are not
// quantised, whatever config.json says of them: their scales in a checkpoint are passed over.
#pragma once

#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "proto/vocab/result.h"
#include "worker/model/field_reader.h"

namespace weft::worker {

enum class WeightCoding : uint8_t {
  kNone,
  kFp8,            // X.weight e4m3, X.weight_scale_inv (a number or an exponent) for each 128 × 128
  kNvfp4Modelopt,  // X.weight e2m1, X.weight_scale e4m3 for each 16, X.weight_scale_2 f32, which multiplies
  kNvfp4CompressedTensors,  // X.weight_packed, X.weight_scale as above, X.weight_global_scale f32, which
                            // divides
};

// Module names: the exact ones, names of a module above or of the last parts ("mlp.gate"), the same with '*',
// or "re:" and a regular expression that matches from the start of the whole name.
class ModuleNames {
 public:
  // kBadCheckpoint: an expression that is none.
  Result<void> add(const std::string& entry);
  bool match(std::string_view module) const;

 private:
  struct Expression;
  std::set<std::string, std::less<>> names_;
  // Shared, because configurations are copied and a compiled expression never changes.
  std::vector<std::shared_ptr<const Expression>> expressions_;
};

struct Quantisation {
  WeightCoding coding = WeightCoding::kNone;
  bool only_targets = false;  // not every linear layer, but those in `targets`
  ModuleNames targets, excluded;

  bool quantises(std::string_view module) const {
    return coding != WeightCoding::kNone && (!only_targets || targets.match(module)) &&
           !excluded.match(module);
  }
};

const char* coding_name(WeightCoding coding);  // "fp8", "nvfp4"; "" for none

// Reads `quantization_config` of config.json, or `quantization` of hf_quant_config.json.
Quantisation read_quantisation(FieldReader& config, const char* field);

}  // namespace weft::worker
