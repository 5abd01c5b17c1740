// What tools that make models write: tensors as a safetensors file, and files that appear whole or not at
// all.
//
// Same input, same bytes. Stateless. Errors: kIo with path and reason.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::checkpoint {

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;   // [n] or [outputs, inputs]
  std::vector<float> values;    // row by row
  bool float32_always = false;  // as released checkpoints keep e_score_correction_bias
};

// A file with these tensors, in this order, as float32 or rounded to bf16.
std::string safetensors(const std::vector<Tensor>& tensors, DType dtype);

// With its parents, if it is not there.
Result<void> create_folder(const std::string& folder);
// Through a temporary file, then renamed.
Result<void> write_file(const std::filesystem::path& path, const std::string& bytes);

}  // namespace weft::checkpoint
