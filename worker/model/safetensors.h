// One safetensors file, mapped read-only: names, types, shapes, and where each tensor's bytes lie.
//
// open() accepts a file only if it is whole: the header length lies within the file and a limit, the header
// is one JSON object without repeated keys, every tensor's bytes are exactly shape × type, and the tensors
// cover the data section end to end without overlap, gap or trailing bytes. Views live as long as the file
// object. Bytes are little-endian and only as aligned as the file makes them. A file that shrinks while
// mapped ends the process (SIGBUS): checkpoints are replaced by renaming, never rewritten in place. Errors:
// kNotFound, kIo, kBadCheckpoint with the field "<file>" or "<file>: <tensor>".
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::worker {

enum class TensorType : uint8_t { kF32, kF16, kBF16, kE4M3, kE8M0, kU8, kI32, kI64, kOther };

struct Tensor {
  TensorType type = TensorType::kOther;
  std::string type_name;       // as written: "BF16"
  std::vector<int64_t> shape;  // empty: a scalar
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  int64_t count() const;  // elements
};

std::string shape_text(const std::vector<int64_t>& shape);  // "[2, 3]"

class SafetensorsFile {
 public:
  static Result<SafetensorsFile> open(const std::string& path);
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&& other) noexcept;
  ~SafetensorsFile();

  const std::map<std::string, Tensor, std::less<>>& tensors() const { return tensors_; }
  const Tensor* find(std::string_view name) const;

 private:
  SafetensorsFile() = default;
  Result<void> map(const std::string& path);
  Result<void> read_header(const std::string& name);

  const std::byte* mapping_ = nullptr;
  int64_t mapping_bytes_ = 0;
  std::map<std::string, Tensor, std::less<>> tensors_;
};

}  // namespace weft::worker
