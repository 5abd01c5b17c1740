// Typed access to the fields of a JSON object that someone else wrote. The first bad field sticks: later
// calls return harmless values and the caller asks once, after a group of reads, whether all was well.
//
// A missing field and a null are the same. Errors are kBadCheckpoint with the field "<file>: <path>".
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::worker {

class FieldReader {
 public:
  // `prefix` is put before every field name, "rope_scaling." for instance. `object` must outlive the reader.
  FieldReader(const nlohmann::json& object, std::string file, std::string prefix = {});

  bool has(const char* name) const;
  int64_t integer(const char* name, int64_t low, int64_t high, std::optional<int64_t> missing = {});
  double number(const char* name, double low, double high, std::optional<double> missing = {});
  bool boolean(const char* name, bool missing);
  std::string text(const char* name, std::optional<std::string> missing = {});
  std::vector<std::string> texts(const char* name);
  // An integer or a list of integers; empty if missing.
  std::vector<int64_t> integers(const char* name, int64_t low, int64_t high);
  const nlohmann::json* object(const char* name);  // null if missing

  void fail(const char* name, const std::string& why, ErrorCode code = ErrorCode::kBadCheckpoint);
  bool failed() const { return error_.has_value(); }
  const Error& error() const { return *error_; }
  // Takes over the failure of a nested reader.
  void adopt(const FieldReader& nested);

 private:
  const nlohmann::json* find(const char* name) const;

  const nlohmann::json& object_;
  std::string file_;
  std::string prefix_;
  std::optional<Error> error_;
};

}  // namespace weft::worker
