#include "worker/model/field_reader.h"

#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

namespace weft::worker {

namespace {

std::string shown(double value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

// The value as int64 if it is one; unsigned numbers beyond its range are not.
std::optional<int64_t> as_integer(const nlohmann::json& value) {
  if (!value.is_number_integer()) return {};
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) return {};
  return value.get<int64_t>();
}

std::string range_text(int64_t low, int64_t high) {
  return "must be an integer in " + std::to_string(low) + " … " + std::to_string(high);
}

}  // namespace

FieldReader::FieldReader(const nlohmann::json& object, std::string file, std::string prefix)
    : object_(object), file_(std::move(file)), prefix_(std::move(prefix)) {}

const nlohmann::json* FieldReader::find(const char* name) const {
  const auto found = object_.find(name);
  return found == object_.end() || found->is_null() ? nullptr : &*found;
}

bool FieldReader::has(const char* name) const { return find(name) != nullptr; }

void FieldReader::fail(const char* name, const std::string& why, ErrorCode code) {
  if (!error_) error_ = weft::error(code, why, file_ + ": " + prefix_ + name);
}

void FieldReader::adopt(const FieldReader& nested) {
  if (!error_) error_ = nested.error_;
}

int64_t FieldReader::integer(const char* name, int64_t low, int64_t high, std::optional<int64_t> missing) {
  const nlohmann::json* value = find(name);
  if (value == nullptr) {
    if (!missing) fail(name, "missing");
    return missing.value_or(low);
  }
  const std::optional<int64_t> read = as_integer(*value);
  if (!read || *read < low || *read > high) {
    fail(name, range_text(low, high) + ", not " + value->dump().substr(0, 40));
    return low;
  }
  return *read;
}

double FieldReader::number(const char* name, double low, double high, std::optional<double> missing) {
  const nlohmann::json* value = find(name);
  if (value == nullptr) {
    if (!missing) fail(name, "missing");
    return missing.value_or(low);
  }
  const double read = value->is_number() ? value->get<double>() : low - 1;
  if (!(read >= low && read <= high)) {
    fail(name,
         "must be a number in " + shown(low) + " … " + shown(high) + ", not " + value->dump().substr(0, 40));
    return low;
  }
  return read;
}

bool FieldReader::boolean(const char* name, bool missing) {
  const nlohmann::json* value = find(name);
  if (value == nullptr) return missing;
  if (!value->is_boolean()) {
    fail(name, "must be true or false, not " + value->dump().substr(0, 40));
    return missing;
  }
  return value->get<bool>();
}

std::string FieldReader::text(const char* name, std::optional<std::string> missing) {
  const nlohmann::json* value = find(name);
  if (value == nullptr) {
    if (!missing) fail(name, "missing");
    return missing.value_or("");
  }
  if (!value->is_string()) {
    fail(name, "must be a string");
    return {};
  }
  return value->get<std::string>();
}

std::vector<std::string> FieldReader::texts(const char* name) {
  std::vector<std::string> out;
  const nlohmann::json* value = find(name);
  if (value == nullptr) return out;
  if (!value->is_array()) {
    fail(name, "must be a list of strings");
    return out;
  }
  for (const nlohmann::json& item : *value) {
    if (!item.is_string()) {
      fail(name, "must be a list of strings");
      return {};
    }
    out.push_back(item.get<std::string>());
  }
  return out;
}

std::vector<int64_t> FieldReader::integers(const char* name, int64_t low, int64_t high) {
  std::vector<int64_t> out;
  const nlohmann::json* value = find(name);
  if (value == nullptr) return out;
  const nlohmann::json list = value->is_array() ? *value : nlohmann::json::array({*value});
  for (const nlohmann::json& item : list) {
    const std::optional<int64_t> read = as_integer(item);
    if (!read || *read < low || *read > high) {
      fail(name, range_text(low, high) + ", or a list of such");
      return {};
    }
    out.push_back(*read);
  }
  return out;
}

const nlohmann::json* FieldReader::object(const char* name) {
  const nlohmann::json* value = find(name);
  if (value != nullptr && !value->is_object()) {
    fail(name, "must be an object");
    return nullptr;
  }
  return value;
}

}  // namespace weft::worker
