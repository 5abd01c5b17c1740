// The weights of the recall model, computed. README.md explains each part; shape.h has the widths.
//
// Pure and deterministic: no input, no randomness beyond a fixed hash. Values are computed in double and
// rounded once.
#pragma once

#include <vector>

#include "tools/checkpoint/checkpoint_files.h"

namespace weft::recall {

using checkpoint::Tensor;

// All tensors, ascending by name.
std::vector<Tensor> construct();

}  // namespace weft::recall
