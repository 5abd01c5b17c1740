#include "worker/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

#include "proto/vocab/units.h"
#include "worker/model/json_file.h"

namespace weft::worker {

static_assert(std::endian::native == std::endian::little,
              "safetensors data is little-endian and used as it lies");

namespace {

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kHeaderBytesMax = 100'000'000;  // the format's own limit
constexpr int kHeaderNestingMax = 4;
constexpr size_t kRankMax = 8;

struct TypeInfo {
  const char* name;
  TensorType type;
  int64_t bytes;
};
constexpr TypeInfo kTypes[] = {
    {"F32", TensorType::kF32, 4},      {"BF16", TensorType::kBF16, 2},    {"F16", TensorType::kF16, 2},
    {"I32", TensorType::kI32, 4},      {"I64", TensorType::kI64, 8},      {"F64", TensorType::kOther, 8},
    {"U64", TensorType::kOther, 8},    {"U32", TensorType::kOther, 4},    {"I16", TensorType::kOther, 2},
    {"U16", TensorType::kOther, 2},    {"I8", TensorType::kOther, 1},     {"U8", TensorType::kU8, 1},
    {"BOOL", TensorType::kOther, 1},   {"F8_E4M3", TensorType::kE4M3, 1}, {"F8_E5M2", TensorType::kOther, 1},
    {"F8_E8M0", TensorType::kE8M0, 1},
};

const TypeInfo* type_of(const std::string& name) {
  const auto* found = std::ranges::find_if(kTypes, [&](const TypeInfo& info) { return name == info.name; });
  return found == std::end(kTypes) ? nullptr : found;
}

// A non-negative integer that fits int64; −1 for anything else.
int64_t natural(const nlohmann::json& value) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return -1;
  return value.get<int64_t>();
}

// What one entry of the header says; begin and end count from the start of the data section.
struct Entry {
  Tensor tensor;
  int64_t begin = 0;
  int64_t end = 0;
};

Result<Entry> read_entry(const nlohmann::json& value, int64_t data_bytes, const std::string& field) {
  const auto bad = [&](const std::string& why) { return error(ErrorCode::kBadCheckpoint, why, field); };
  if (!value.is_object()) return bad("its header entry is not an object");
  const auto type = value.find("dtype");
  const auto shape = value.find("shape");
  const auto offsets = value.find("data_offsets");
  if (type == value.end() || !type->is_string()) return bad("has no dtype");
  if (shape == value.end() || !shape->is_array() || shape->size() > kRankMax) {
    return bad("has no shape of at most " + std::to_string(kRankMax) + " sizes");
  }
  if (offsets == value.end() || !offsets->is_array() || offsets->size() != 2)
    return bad("has no pair of data_offsets");

  Entry out;
  out.tensor.type_name = type->get<std::string>();
  const TypeInfo* info = type_of(out.tensor.type_name);
  if (info == nullptr) return bad("has the unknown dtype '" + out.tensor.type_name.substr(0, 40) + "'");
  out.tensor.type = info->type;
  int64_t bytes = info->bytes;
  for (const nlohmann::json& item : *shape) {
    const int64_t size = natural(item);
    if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes)) return bad("has an impossible shape");
    out.tensor.shape.push_back(size);
  }
  out.begin = natural((*offsets)[0]);
  out.end = natural((*offsets)[1]);
  if (out.begin < 0 || out.end < out.begin || out.end > data_bytes) {
    return bad("its data_offsets lie outside the file: the data section has " + std::to_string(data_bytes) +
               " bytes");
  }
  out.tensor.bytes = out.end - out.begin;
  if (out.tensor.bytes != bytes) {
    return bad("has " + std::to_string(out.tensor.bytes) + " bytes, but shape " +
               shape_text(out.tensor.shape) + " of " + out.tensor.type_name + " needs " +
               std::to_string(bytes));
  }
  return out;
}

// Sorted by place, every tensor must begin where the one before ended.
Result<void> check_cover(const std::vector<std::pair<std::string, Entry>>& entries, int64_t data_bytes,
                         const std::string& file) {
  std::vector<const std::pair<std::string, Entry>*> sorted;
  for (const auto& entry : entries) sorted.push_back(&entry);
  std::ranges::sort(sorted, {}, [](const auto* e) { return std::pair(e->second.begin, e->second.end); });
  int64_t at = 0;
  for (const auto* entry : sorted) {
    if (entry->second.begin < at) {
      return error(ErrorCode::kBadCheckpoint, "its bytes overlap another tensor's",
                   file + ": " + entry->first);
    }
    if (entry->second.begin > at) {
      return error(ErrorCode::kBadCheckpoint,
                   std::to_string(entry->second.begin - at) + " bytes before it belong to no tensor",
                   file + ": " + entry->first);
    }
    at = entry->second.end;
  }
  if (at != data_bytes) {
    return error(ErrorCode::kBadCheckpoint, std::to_string(data_bytes - at) + " bytes after the last tensor",
                 file);
  }
  return {};
}

}  // namespace

int64_t Tensor::count() const {
  int64_t out = 1;
  for (const int64_t size : shape) out *= size;
  return out;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return out + "]";
}

Result<SafetensorsFile> SafetensorsFile::open(const std::string& path) {
  SafetensorsFile file;
  TRY_VOID(file.map(path));
  TRY_VOID(file.read_header(file_name(path)));
  return file;
}

Result<void> SafetensorsFile::map(const std::string& path) {
  const std::string name = file_name(path);
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // a FIFO would wait
  if (descriptor < 0) {
    const bool absent = errno == ENOENT;
    return error(absent ? ErrorCode::kNotFound : ErrorCode::kIo,
                 "cannot open " + path + ": " + std::strerror(errno), name);
  }
  struct stat status {};
  const bool known = ::fstat(descriptor, &status) == 0 && S_ISREG(status.st_mode);
  if (known && status.st_size >= kLengthBytes) {
    void* mapping =
        ::mmap(nullptr, static_cast<size_t>(status.st_size), PROT_READ, MAP_PRIVATE, descriptor, 0);
    if (mapping != MAP_FAILED) {
      mapping_ = static_cast<const std::byte*>(mapping);
      mapping_bytes_ = status.st_size;
    }
  }
  const int failure = errno;
  ::close(descriptor);
  if (!known) return error(ErrorCode::kIo, path + " is not a regular file", name);
  if (status.st_size < kLengthBytes) {
    return error(ErrorCode::kBadCheckpoint, "too short for a safetensors header", name);
  }
  if (mapping_ == nullptr)
    return error(ErrorCode::kIo, "cannot map " + path + ": " + std::strerror(failure), name);
  return {};
}

Result<void> SafetensorsFile::read_header(const std::string& name) {
  uint64_t length = 0;
  std::memcpy(&length, mapping_, sizeof length);
  if (length > static_cast<uint64_t>(kHeaderBytesMax)) {
    return error(ErrorCode::kBadCheckpoint,
                 "header length " + std::to_string(length) + " is beyond the limit of " +
                     std::to_string(kHeaderBytesMax),
                 name);
  }
  const auto header_bytes = static_cast<int64_t>(length);
  const int64_t data_bytes = mapping_bytes_ - kLengthBytes - header_bytes;
  if (data_bytes < 0) {
    return error(ErrorCode::kBadCheckpoint,
                 "header length " + std::to_string(length) + " is beyond the end of the file", name);
  }
  const std::string_view text(reinterpret_cast<const char*>(mapping_ + kLengthBytes), length);
  nlohmann::json header;
  TRY_VOID(parse_json(text, kHeaderNestingMax, name, header));
  if (!header.is_object()) return error(ErrorCode::kBadCheckpoint, "the header is not a JSON object", name);

  std::vector<std::pair<std::string, Entry>> entries;
  for (const auto& [tensor, value] : header.items()) {
    if (tensor == "__metadata__") continue;
    TRY(Entry entry, read_entry(value, data_bytes, name + ": " + tensor));
    entries.emplace_back(tensor, std::move(entry));
  }
  TRY_VOID(check_cover(entries, data_bytes, name));
  for (auto& [tensor, entry] : entries) {
    entry.tensor.data = mapping_ + kLengthBytes + header_bytes + entry.begin;
    tensors_.emplace(tensor, std::move(entry.tensor));
  }
  return {};
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : mapping_(std::exchange(other.mapping_, nullptr)),
      mapping_bytes_(std::exchange(other.mapping_bytes_, 0)),
      tensors_(std::move(other.tensors_)) {}

SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept {
  std::swap(mapping_, other.mapping_);
  std::swap(mapping_bytes_, other.mapping_bytes_);
  std::swap(tensors_, other.tensors_);
  return *this;
}

SafetensorsFile::~SafetensorsFile() {
  if (mapping_ != nullptr) ::munmap(const_cast<std::byte*>(mapping_), static_cast<size_t>(mapping_bytes_));
}

const Tensor* SafetensorsFile::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

}  // namespace weft::worker
