// Checkpoints for tests: safetensors files written from plain values (also wrong ones), and the golden
// folders.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temp_folder.h"
#include "worker/model/config.h"

namespace weft::test {

struct RawTensor {
  std::string type;  // "F32"
  std::vector<int64_t> shape;
  std::string bytes;
};
using RawTensors = std::map<std::string, RawTensor>;

RawTensor f32_tensor(std::vector<int64_t> shape, const std::vector<float>& values);
// The values of an F32, F16 or BF16 tensor.
std::vector<float> values_of(const RawTensor& tensor);

// A well-formed file; `header_spaces` more bytes of padding move the data to any alignment.
void write_safetensors(const std::string& path, const RawTensors& tensors, int header_spaces = 0);
// Any header and data; the length field says `declared` if that is not negative.
void write_raw_safetensors(const std::string& path, const std::string& header, const std::string& data,
                           int64_t declared = -1);
void write_file(const std::string& path, const std::string& bytes);
std::string read_file(const std::string& path);

std::string golden_folder(const std::string& name);
// All weights of a checkpoint folder.
RawTensors read_weights(const std::string& folder);
// config.json of `from` and these tensors as model.safetensors.
void write_checkpoint(const TempFolder& folder, const std::string& from, const RawTensors& tensors,
                      int header_spaces = 0);

}  // namespace weft::test
