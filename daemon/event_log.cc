#include "daemon/event_log.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>

namespace weft::daemon {
namespace {

const char* level_name(LogLevel level) {
  static constexpr const char* kNames[] = {"debug", "info", "warning", "error"};
  return kNames[static_cast<int>(level)];
}

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
  }
  return spdlog::level::info;
}

std::string time_text() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(now).count();
  const std::time_t whole = us / 1'000'000;
  std::tm parts{};
  gmtime_r(&whole, &parts);
  char text[40];
  const size_t used = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + used, sizeof text - used, ".%06dZ", static_cast<int>(us % 1'000'000));
  return text;
}

std::string json_dump(const nlohmann::ordered_json& value) {
  // A worker's output may hold any bytes; a log line must stay valid JSON.
  return value.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

std::string value_text(const Field& field) {
  return std::visit(
      [](const auto& value) -> std::string {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>) {
          const bool plain = !value.empty() && value.find_first_of(" \"\\\n\t=") == std::string::npos;
          return plain ? value : json_dump(nlohmann::ordered_json(value));
        } else {
          return json_dump(nlohmann::ordered_json(value));
        }
      },
      field.value);
}

}  // namespace

Result<LogLevel> parse_log_level(const std::string& text) {
  for (int level = 0; level < 4; ++level) {
    if (text == level_name(static_cast<LogLevel>(level))) return static_cast<LogLevel>(level);
  }
  return error(ErrorCode::kInvalidArgument, "must be debug, info, warning or error, not '" + text + "'",
               "log-level");
}

std::string log_line(LogFormat format, LogLevel level, std::string_view time, std::string_view event,
                     std::initializer_list<Field> fields) {
  if (format == LogFormat::kJson) {
    nlohmann::ordered_json line = {{"time", time}, {"level", level_name(level)}, {"event", event}};
    for (const Field& field : fields) {
      std::visit([&](const auto& value) { line[field.name] = value; }, field.value);
    }
    return json_dump(line);
  }
  std::string line(time);
  line += ' ';
  line += level_name(level);
  line += ' ';
  line += event;
  for (const Field& field : fields) {
    line += ' ';
    line += field.name;
    line += '=';
    line += value_text(field);
  }
  return line;
}

EventLog::EventLog(LogLevel level)
    : EventLog(level, isatty(STDERR_FILENO) ? LogFormat::kText : LogFormat::kJson) {}

EventLog::EventLog(LogLevel level, LogFormat format)
    : format_(format),
      logger_(std::make_unique<spdlog::logger>("weftd", std::make_shared<spdlog::sinks::stderr_sink_mt>())) {
  logger_->set_pattern("%v");
  logger_->set_level(to_spdlog(level));
  logger_->flush_on(spdlog::level::trace);
  logger_->set_error_handler([](const std::string&) {});  // standard error is gone: nothing left to say it to
}

EventLog::~EventLog() = default;

void EventLog::write(LogLevel level, std::string_view event, std::initializer_list<Field> fields) const {
  if (!logger_->should_log(to_spdlog(level))) return;
  logger_->log(to_spdlog(level), spdlog::string_view_t(log_line(format_, level, time_text(), event, fields)));
}

void EventLog::debug(std::string_view event, std::initializer_list<Field> fields) const {
  write(LogLevel::kDebug, event, fields);
}
void EventLog::info(std::string_view event, std::initializer_list<Field> fields) const {
  write(LogLevel::kInfo, event, fields);
}
void EventLog::warning(std::string_view event, std::initializer_list<Field> fields) const {
  write(LogLevel::kWarning, event, fields);
}
void EventLog::error(std::string_view event, std::initializer_list<Field> fields) const {
  write(LogLevel::kError, event, fields);
}

}  // namespace weft::daemon
