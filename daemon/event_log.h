// The daemon's log: one event per line, with a stable name and typed fields.
//
// On a terminal a line is text for people; elsewhere it is one JSON object ({"time", "level", "event",
// fields…}). Tests and tools look for names and fields, never for prose. `error` means that a person must
// act. Nothing is logged per token. Any thread may log.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <variant>

#include "proto/vocab/result.h"

namespace spdlog {
class logger;
}

namespace weft::daemon {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError };
Result<LogLevel> parse_log_level(const std::string& text);  // "debug", "info", "warning", "error"
enum class LogFormat : uint8_t { kText, kJson };

struct Field {
  const char* name;
  std::variant<int64_t, uint64_t, double, bool, std::string> value;

  Field(const char* field, int v) : name(field), value(int64_t{v}) {}
  Field(const char* field, int64_t v) : name(field), value(v) {}
  Field(const char* field, uint32_t v) : name(field), value(uint64_t{v}) {}
  Field(const char* field, uint64_t v) : name(field), value(v) {}
  Field(const char* field, double v) : name(field), value(v) {}
  Field(const char* field, bool v) : name(field), value(v) {}
  Field(const char* field, const char* v) : name(field), value(std::string(v)) {}
  Field(const char* field, std::string v) : name(field), value(std::move(v)) {}
};

class EventLog {
 public:
  // Writes to standard error: as text if it is a terminal, else as JSON.
  explicit EventLog(LogLevel level);
  EventLog(LogLevel level, LogFormat format);
  ~EventLog();

  void debug(std::string_view event, std::initializer_list<Field> fields = {}) const;
  void info(std::string_view event, std::initializer_list<Field> fields = {}) const;
  void warning(std::string_view event, std::initializer_list<Field> fields = {}) const;
  void error(std::string_view event, std::initializer_list<Field> fields = {}) const;

 private:
  void write(LogLevel level, std::string_view event, std::initializer_list<Field> fields) const;
  LogFormat format_;
  std::unique_ptr<spdlog::logger> logger_;
};

// The line without time and level, as the log writes it. Split out for tests.
std::string log_line(LogFormat format, LogLevel level, std::string_view time, std::string_view event,
                     std::initializer_list<Field> fields);

}  // namespace weft::daemon
