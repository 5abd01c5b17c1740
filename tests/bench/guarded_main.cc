#include "tests/bench/guarded_main.h"

#include <cstdio>

#include "tests/bench/guard.h"

namespace weft::bench {

void add_number(CLI::App& app, const char* name, int64_t& value, int64_t low, int64_t high,
                const char* what) {
  app.add_option(name, value, what)
      ->type_name("N")
      ->check(command_line::between(low, high))
      ->capture_default_str();
}

int guarded_main(CLI::App& app, int argc, char** argv, const std::function<void()>& ready,
                 const std::function<Result<bool>(const std::string& folder)>& run) {
  const std::string name = app.get_name();
  const auto asked = command_line::parse_words(app, {argv + 1, argv + argc});
  if (!asked) {
    std::fprintf(stderr, "%s: %s\n", name.c_str(), asked.error().text().c_str());
    return 2;
  }
  if (*asked == command_line::Asked::kHelp) {
    std::fputs(command_line::help_text(app).c_str(), stdout);
    return 0;
  }
  ready();
  return run_guarded(name, [&](const std::string& folder) {
    const Result<bool> ran = run(folder);
    if (!ran) std::fprintf(stderr, "%s: %s\n", name.c_str(), ran.error().text().c_str());
    return ran && *ran ? 0 : 1;
  });
}

}  // namespace weft::bench
