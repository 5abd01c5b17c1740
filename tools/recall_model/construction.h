// The weights of the recall model, computed. README.md explains each part; shape.h has the widths.
//
// Pure and deterministic: no input, no randomness beyond a fixed hash. Values are computed in double and
// rounded once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::recall {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;   // [n] or [outputs, inputs]
  std::vector<float> values;    // row by row
  bool float32_always = false;  // as released checkpoints keep e_score_correction_bias
};

// All tensors, ascending by name.
std::vector<Tensor> construct();

}  // namespace weft::recall
