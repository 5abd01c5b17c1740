#include "tools/ctl/parse.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <optional>
#include <type_traits>

#include "proto/command_line.h"

namespace weft::ctl {
namespace {

template <typename Field>
struct NumberOf {
  using Type = Field;
};
template <typename Number>
struct NumberOf<std::vector<Number>> {
  using Type = Number;
};
template <typename Number>
struct NumberOf<std::optional<Number>> {
  using Type = Number;
};

void add_option(CLI::App& app, const Option& option, Arguments& arguments) {
  CLI::Option* added = std::visit(
      [&](auto member) -> CLI::Option* {
        auto& field = arguments.*member;
        using Field = std::remove_reference_t<decltype(field)>;
        if constexpr (std::is_same_v<Field, bool>) {
          return app.add_flag(option.names, field)->multi_option_policy(CLI::MultiOptionPolicy::Throw);
        } else {
          CLI::Option* made = app.add_option(option.names, field);
          constexpr bool kList =
              std::is_same_v<Field, std::vector<uint32_t>> || std::is_same_v<Field, std::vector<uint64_t>>;
          // A list option is one word (1,2,3), so that it cannot swallow the words after it.
          if constexpr (kList) {
            made->delimiter(',');
            if (!option.positional())
              made->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args(false);
          }
          using Number = typename NumberOf<Field>::Type;
          if constexpr (std::is_arithmetic_v<Number>) made->check(command_line::decimal<Number>());
          return made;
        }
      },
      option.target);
  if (option.check == Check::kChoice) added->check(command_line::one_of(option.choices));
  if (option.required) added->required();
}

Result<void> check_seconds(double value, const char* field, double least) {
  if (value >= least && value <= 1e9) return {};
  return error(ErrorCode::kInvalidArgument,
               "must be a number of seconds from " + CLI::detail::to_string(least) + " to 1000000000", field);
}

// "dcp(4)", "dcp4" and "dcp:4" → "dcp(4)".
std::optional<std::string> with_number(const std::string& text, const std::string& name) {
  if (!text.starts_with(name)) return std::nullopt;
  std::string digits = text.substr(name.size());
  if (digits.size() >= 2 && digits.front() == '(' && digits.back() == ')') {
    digits = digits.substr(1, digits.size() - 2);
  } else if (!digits.empty() && digits.front() == ':') {
    digits.erase(0, 1);
  }
  const bool number = !digits.empty() && digits.size() <= 3 && digits.front() != '0' &&
                      std::all_of(digits.begin(), digits.end(), [](char c) { return c >= '0' && c <= '9'; });
  if (!number) return std::nullopt;
  return name + "(" + digits + ")";
}

// What CLI11 does not check.
Result<void> check(Arguments& arguments) {
  if (!arguments.decode.empty()) {
    TRY(arguments.decode, normal_grouping(arguments.decode));
  }
  if (!arguments.index.empty()) {
    TRY(arguments.index, normal_index(arguments.index));
  }
  if (arguments.timeout_s) TRY_VOID(check_seconds(*arguments.timeout_s, "--timeout", 0));
  return check_seconds(arguments.interval_s, "--interval", 0.05);
}

}  // namespace

Result<std::string> normal_grouping(const std::string& text) {
  if (text == "tp" || text == "dp") return text;
  if (const auto dcp = with_number(text, "dcp")) return *dcp;
  const size_t times = text.find('x');
  if (const auto group = with_number(text.substr(0, times), "dp"); group && times != std::string::npos) {
    const std::string inside = text.substr(times + 1);
    if (inside == "tp") return *group + "xtp";
    if (const auto dcp = with_number(inside, "dcp")) return *group + "x" + *dcp;
  }
  return error(ErrorCode::kInvalidArgument,
               "\"" + text + "\" is none of tp, dp, dcp(N), dp(N)xtp, dp(N)xdcp(N)", "--decode");
}

Result<std::string> normal_index(const std::string& text) {
  for (const char* name : {"copied", "split"}) {
    if (text == name) return text;
    if (const auto parts = with_number(text, name)) return *parts;
  }
  return error(ErrorCode::kInvalidArgument, "\"" + text + "\" is none of copied, copied(N), split, split(N)",
               "--index");
}

Result<Parsed> parse(const std::vector<std::string>& words) {
  Parsed parsed;
  CLI::App app("", "weftctl");
  app.require_subcommand(0, 1);
  app.set_help_flag("-h,--help");
  app.add_flag("--version", parsed.version);
  for (const Option& option : global_options()) add_option(app, option, parsed.arguments);
  for (const Command& command : commands()) {
    CLI::App* sub = app.add_subcommand(command.name);
    sub->set_help_flag("-h,--help");
    sub->fallthrough();  // the global options may follow the command's name
    for (const Option& option : command.options) add_option(*sub, option, parsed.arguments);
  }
  TRY(const command_line::Asked asked, command_line::parse_words(app, words));
  if (!app.get_subcommands().empty()) parsed.command = find_command(app.get_subcommands()[0]->get_name());
  parsed.help = asked == command_line::Asked::kHelp;
  if (parsed.help) return parsed;
  TRY_VOID(check(parsed.arguments));
  return parsed;
}

}  // namespace weft::ctl
