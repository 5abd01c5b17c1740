#include "tools/checkpoint/checkpoint_files.h"

#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>

namespace weft::checkpoint {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

uint16_t round_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

void append(std::string& out, const void* data, size_t bytes) {
  out.append(static_cast<const char*>(data), bytes);
}

}  // namespace

// Eight bytes of header length, the header as JSON padded with spaces to a multiple of 8, then the tensors.
std::string safetensors(const std::vector<Tensor>& tensors, DType dtype) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const Tensor& tensor : tensors) {
    const bool f32 = dtype == DType::kF32 || tensor.float32_always;
    const size_t begin = data.size();
    if (f32) {
      append(data, tensor.values.data(), tensor.values.size() * sizeof(float));
    } else {
      for (const float value : tensor.values) {
        const uint16_t bits = round_to_bf16(value);
        append(data, &bits, sizeof bits);
      }
    }
    header[tensor.name] = {
        {"dtype", f32 ? "F32" : "BF16"}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  std::string out;
  append(out, &length, sizeof length);
  return out + text + data;
}

Result<void> create_folder(const std::string& folder) {
  std::error_code failure;
  std::filesystem::create_directories(folder, failure);
  if (failure) return error(ErrorCode::kIo, folder + ": " + failure.message(), "out");
  return {};
}

Result<void> write_file(const std::filesystem::path& path, const std::string& bytes) {
  const std::filesystem::path temporary = path.string() + ".partial";
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) {
      const std::string reason = std::strerror(errno);
      std::error_code ignored;
      std::filesystem::remove(temporary, ignored);
      return error(ErrorCode::kIo, path.string() + ": " + reason);
    }
  }
  std::error_code failure;
  std::filesystem::rename(temporary, path, failure);
  return failure ? Result<void>(error(ErrorCode::kIo, path.string() + ": " + failure.message()))
                 : Result<void>();
}

}  // namespace weft::checkpoint
