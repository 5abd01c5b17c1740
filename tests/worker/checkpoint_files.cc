#include "tests/worker/checkpoint_files.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

#include "proto/vocab/check.h"
#include "worker/model/checkpoint.h"

namespace weft::test {

namespace fs = std::filesystem;

RawTensor f32_tensor(std::vector<int64_t> shape, const std::vector<float>& values) {
  RawTensor out{"F32", std::move(shape), std::string(values.size() * 4, '\0')};
  if (!values.empty()) std::memcpy(out.bytes.data(), values.data(), out.bytes.size());
  return out;
}

namespace {

float widen(uint16_t bits, const std::string& type) {
  if (type == "BF16") return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  const int exponent = (bits >> 10) & 31;
  const int fraction = bits & 1023;
  const double size = exponent == 31  ? (fraction == 0 ? INFINITY : NAN)
                      : exponent == 0 ? std::ldexp(fraction, -24)
                                      : std::ldexp(1024 + fraction, exponent - 25);
  return static_cast<float>((bits & 0x8000) != 0 ? -size : size);
}

}  // namespace

std::vector<float> values_of(const RawTensor& tensor) {
  const bool wide = tensor.type == "F32";
  CHECK(wide || tensor.type == "F16" || tensor.type == "BF16", tensor.type);
  std::vector<float> out(tensor.bytes.size() / (wide ? 4 : 2));
  for (size_t i = 0; i < out.size(); ++i) {
    uint16_t bits = 0;
    if (wide) {
      std::memcpy(&out[i], tensor.bytes.data() + 4 * i, 4);
    } else {
      std::memcpy(&bits, tensor.bytes.data() + 2 * i, 2);
      out[i] = widen(bits, tensor.type);
    }
  }
  return out;
}

void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  CHECK(file.good(), path);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good(), path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_raw_safetensors(const std::string& path, const std::string& header, const std::string& data,
                           int64_t declared) {
  const uint64_t length = declared < 0 ? header.size() : static_cast<uint64_t>(declared);
  std::string bytes(8, '\0');
  std::memcpy(bytes.data(), &length, 8);
  write_file(path, bytes + header + data);
}

void write_safetensors(const std::string& path, const RawTensors& tensors, int header_spaces) {
  std::ostringstream header;
  std::string data;
  header << R"({"__metadata__":{"format":"pt"})";
  for (const auto& [name, tensor] : tensors) {
    header << ",\"" << name << R"(":{"dtype":")" << tensor.type << R"(","shape":[)";
    for (size_t i = 0; i < tensor.shape.size(); ++i) header << (i == 0 ? "" : ",") << tensor.shape[i];
    header << "],\"data_offsets\":[" << data.size() << ',' << data.size() + tensor.bytes.size() << "]}";
    data += tensor.bytes;
  }
  header << '}' << std::string(static_cast<size_t>(header_spaces), ' ');
  write_raw_safetensors(path, header.str(), data);
}

std::string golden_folder(const std::string& name) { return std::string(WEFT_GOLDEN_FOLDER) + "/" + name; }

RawTensors read_weights(const std::string& folder) {
  const auto checkpoint = worker::Checkpoint::open(folder);
  RawTensors out;
  for (const auto& [name, item] : checkpoint.value().items()) {
    const worker::Tensor& tensor = *item.tensor;
    out[name] = {tensor.type_name, tensor.shape,
                 std::string(reinterpret_cast<const char*>(tensor.data), static_cast<size_t>(tensor.bytes))};
  }
  return out;
}

void write_checkpoint(const TempFolder& folder, const std::string& from, const RawTensors& tensors,
                      int header_spaces) {
  write_file(folder.file("config.json"), read_file(from + "/config.json"));
  write_safetensors(folder.file("model.safetensors"), tensors, header_spaces);
}

}  // namespace weft::test
