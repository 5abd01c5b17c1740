#include "proto/command_line.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <sstream>
#include <type_traits>

namespace weft::command_line {
namespace {

constexpr size_t kWidth = 100;

template <typename Number>
std::string said(Number value) {
  std::ostringstream out;
  out.precision(12);
  out << value;
  return out.str();
}

// "1 to 8"; "at least 1" and "" where the type itself is the limit.
template <typename Number>
std::string limits_text(Number low, Number high) {
  using Limits = std::numeric_limits<Number>;
  const bool open_above = sizeof(Number) == 8 && high == Limits::max();
  if (open_above) return low == Limits::lowest() ? "" : "at least " + said(low);
  return said(low) + " to " + said(high);
}

template <typename Number>
CLI::Validator number_within(Number low, Number high, std::string description) {
  const auto fault = [low, high](const std::string& text) -> std::string {
    Number value{};
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), value);
    bool good = code == std::errc() && end == text.data() + text.size() && value >= low && value <= high;
    if constexpr (std::is_floating_point_v<Number>) good = good && std::isfinite(value);
    if (good) return {};
    const std::string limits = limits_text(low, high);
    return std::string("must be a ") + (std::is_floating_point_v<Number> ? "number" : "whole number") +
           (limits.empty() ? "" : ", " + limits) + ", not \"" + text + "\"";
  };
  return {fault, std::move(description)};
}

std::string joined(const std::vector<std::string>& parts, const char* between) {
  std::string out;
  for (const std::string& part : parts) out += (out.empty() ? "" : between) + part;
  return out;
}

// "-o, --output"
std::string spelling(const CLI::Option& option) {
  std::vector<std::string> names;
  for (const std::string& name : option.get_snames()) names.push_back("-" + name);
  for (const std::string& name : option.get_lnames()) names.push_back("--" + name);
  return joined(names, ", ");
}

// What the value is called, and its limits: CLI11 joins the type's name and the validators' descriptions.
std::pair<std::string, std::string> value_and_limits(const CLI::Option& option) {
  std::string text = option.get_type_size() == 0 ? "" : option.get_type_name();
  const size_t colon = text.find(':');
  std::string limits = colon == std::string::npos ? "" : text.substr(colon + 1);
  return {text.substr(0, colon), std::move(limits)};
}

std::string without_brackets(std::string text) {
  std::erase_if(text, [](char c) { return c == '[' || c == ']'; });
  return text;
}

std::pair<std::string, std::string> help_row(const CLI::Option& option, const std::string& description) {
  const auto [value, limits] = value_and_limits(option);
  std::vector<std::string> right = {description};
  if (!limits.empty()) right.push_back(limits);
  if (const std::string standard = option.get_default_str(); !standard.empty()) {
    right.push_back("default " + without_brackets(standard));
  }
  for (const CLI::Option* other : option.get_needs()) right.push_back("only with " + other->get_name());
  for (const CLI::Option* other : option.get_excludes()) right.push_back("not with " + other->get_name());
  return {spelling(option) + (value.empty() ? "" : " " + value), joined(right, "; ")};
}

// Edits from one word to the other: a letter more, less, another, or two exchanged.
size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::vector<size_t>> d(a.size() + 1, std::vector<size_t>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) {
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = i + j;
        continue;
      }
      d[i][j] =
          std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1)});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
      }
    }
  }
  return d[a.size()][b.size()];
}

// The innermost subcommand that was given, or the program itself.
const CLI::App& innermost(const CLI::App& app) {
  const auto given = app.get_subcommands();
  return given.empty() ? app : *given.front();
}

// "weftctl status"
std::string full_name(const CLI::App& app) {
  return app.get_parent() == nullptr ? app.get_name() : full_name(*app.get_parent()) + " " + app.get_name();
}

std::vector<std::string> long_options(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* at = &app; at != nullptr; at = at->get_parent()) {
    for (const CLI::Option* option : at->get_options()) {
      for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    }
  }
  return names;
}

std::vector<std::string> command_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

// About the first word that nobody took.
std::string surplus_text(const CLI::App& app) {
  const std::vector<std::string> surplus = app.remaining(true);
  if (surplus.empty()) return "a word too many";
  const std::string word = surplus.front().substr(0, surplus.front().find('='));
  const CLI::App& at = innermost(app);
  std::string text, hint;
  if (word.starts_with('-')) {
    text = "unknown option " + word;
    const std::string full = (word.starts_with("--") ? "" : "-") + word;  // also "-watch"
    if (full.size() > 3) hint = nearest_word(full, long_options(at));
  } else if (const auto names = command_names(at); !names.empty()) {
    text = "unknown command \"" + word + "\"";
    hint = nearest_word(word, names);
  } else {
    text = "\"" + word + "\" is one word too many";
  }
  return hint.empty() ? text : text + "; did you mean " + hint + "?";
}

// Without the option's name that begins most of them.
std::string fault_text(const CLI::Error& failure, const std::string& rest) {
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&failure) == nullptr) return rest;
  // "1 required FLOAT missing", "At Most 1 required but received 2"
  if (rest.ends_with(" missing")) return "needs a value";
  if (rest.starts_with("At Most 1")) return "is given more than once";
  return rest;
}

// "--timeout: must be …" and "RANK is required" are about the option or argument that they begin with.
Error fault(const CLI::App& app, const CLI::Error& failure) {
  const std::string see = " (see " + full_name(innermost(app)) + " --help)";
  if (dynamic_cast<const CLI::ExtrasError*>(&failure) != nullptr) {
    return error(ErrorCode::kInvalidArgument, surplus_text(app) + see);
  }
  const std::string text = failure.what();
  const std::string name = text.substr(0, text.find_first_of(": "));
  for (const CLI::App* at = &innermost(app); at != nullptr; at = at->get_parent()) {
    if (at->get_option_no_throw(name) == nullptr) continue;
    const std::string rest = text.substr(std::min(text.find_first_not_of(": ", name.size()), text.size()));
    return error(ErrorCode::kInvalidArgument, fault_text(failure, rest) + see, name);
  }
  return error(ErrorCode::kInvalidArgument, text + see);
}

}  // namespace

CLI::Validator between(int64_t low, int64_t high) { return number_within(low, high, limits_text(low, high)); }
CLI::Validator between(double low, double high) { return number_within(low, high, limits_text(low, high)); }
CLI::Validator at_least(int64_t low) { return between(low, std::numeric_limits<int64_t>::max()); }

CLI::Validator one_of(std::vector<std::string> choices) {
  CHECK_GE(choices.size(), 2u);
  const std::string list = joined(choices, ", ");
  std::string description = list;
  description.replace(list.rfind(", "), 2, " or ");
  return {[choices = std::move(choices), list](const std::string& text) -> std::string {
            if (std::find(choices.begin(), choices.end(), text) != choices.end()) return {};
            return "\"" + text + "\" is none of " + list;
          },
          std::move(description)};
}

CLI::Validator byte_size() {
  return {[](std::string& text) -> std::string {
            int64_t value = 0;
            const char* last = text.data() + text.size();
            const auto [end, code] = std::from_chars(text.data(), last, value);
            static constexpr const char* kUnits[] = {"", "KiB", "MiB", "GiB", "TiB"};
            const auto unit = std::find(std::begin(kUnits), std::end(kUnits), std::string(end, last));
            const auto shift = 10 * (unit - std::begin(kUnits));
            const bool good = code == std::errc() && unit != std::end(kUnits) && value >= 0 &&
                              value <= std::numeric_limits<int64_t>::max() >> shift;
            if (!good) return "must be a size such as 65536, 512MiB or 4GiB, not \"" + text + "\"";
            text = std::to_string(value << shift);
            return {};
          },
          ""};
}

template <typename Number>
CLI::Validator decimal() {
  return number_within(std::numeric_limits<Number>::lowest(), std::numeric_limits<Number>::max(), "");
}
template CLI::Validator decimal<int32_t>();
template CLI::Validator decimal<uint32_t>();
template CLI::Validator decimal<uint64_t>();
template CLI::Validator decimal<double>();

Result<Asked> parse_words(CLI::App& app, const std::vector<std::string>& words) {
  try {
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));  // reversed, as CLI11 wants them
  } catch (const CLI::CallForHelp&) {
    return Asked::kHelp;
  } catch (const CLI::CallForVersion&) {
    return Asked::kVersion;
  } catch (const CLI::Error& failure) {
    return fault(app, failure);
  } catch (const std::exception& failure) {
    return error(ErrorCode::kInvalidArgument, failure.what());
  }
  return Asked::kRun;
}

std::string help_text(const CLI::App& app) {
  std::string usage = app.get_name();
  std::vector<std::pair<std::string, std::vector<std::pair<std::string, std::string>>>> groups;
  size_t width = 0;
  for (const CLI::Option* option : app.get_options()) {
    auto row = help_row(*option, option == app.get_help_ptr()      ? "this help"
                                 : option == app.get_version_ptr() ? "the version"
                                                                   : option->get_description());
    width = std::max(width, character_count(row.first));
    if (option->get_required()) usage += " " + row.first;
    const auto same = [&](const auto& group) { return group.first == option->get_group(); };
    auto group = std::find_if(groups.begin(), groups.end(), same);
    if (group == groups.end()) group = groups.insert(groups.end(), {option->get_group(), {}});
    group->second.push_back(std::move(row));
  }
  std::string out = wrapped(app.get_description(), 0) + "\nUsage: " + usage + " [options]\n";
  for (const auto& [name, rows] : groups) out += "\n" + name + "\n" + two_columns(rows, width);
  return out;
}

std::string nearest_word(std::string_view word, const std::vector<std::string>& words) {
  std::string best;
  size_t fewest = 2 + word.size() / 5;  // a word of 4 letters may have 1 wrong, of 5 to 9 letters 2, …
  for (const std::string& other : words) {
    const bool begun = word.size() >= 2 && other.starts_with(word);
    const size_t distance = begun ? 1 : edits(word, other);
    if (distance >= fewest) continue;
    fewest = distance;
    best = other;
  }
  return best;
}

size_t character_count(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0u) != 0x80u;
  }));
}

std::string wrapped(const std::string& text, size_t indent) {
  std::istringstream words(text);
  std::string out, word;
  size_t column = indent;
  while (words >> word) {
    const size_t length = character_count(word);
    if (column > indent && column + 1 + length > kWidth) {
      out += "\n" + std::string(indent, ' ');
      column = indent;
    }
    if (column > indent) {
      out += ' ';
      ++column;
    }
    out += word;
    column += length;
  }
  return out + "\n";
}

std::string two_columns(const std::vector<std::pair<std::string, std::string>>& rows, size_t left_width) {
  for (const auto& row : rows) left_width = std::max(left_width, character_count(row.first));
  std::string out;
  for (const auto& [left, right] : rows) {
    out += "  " + left + std::string(left_width - character_count(left) + 2, ' ') +
           wrapped(right, left_width + 4);
  }
  return out;
}

}  // namespace weft::command_line
