#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "tools/ctl/context.h"

namespace weft::ctl {
namespace {

bool is_set(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0';
}

int width_of_process() {
  winsize size{};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  if (is_set("COLUMNS")) return std::atoi(std::getenv("COLUMNS"));
  return 0;
}

}  // namespace

Terminal terminal_of_process() {
  Terminal terminal;
  terminal.out_is_terminal = ::isatty(STDOUT_FILENO) == 1;
  terminal.error_is_terminal = ::isatty(STDERR_FILENO) == 1;
  const char* kind = std::getenv("TERM");
  const bool dumb = kind == nullptr || std::string(kind) == "dumb";
  terminal.colors = terminal.out_is_terminal && !is_set("NO_COLOR") && !dumb;
  terminal.width = width_of_process();
  return terminal;
}

}  // namespace weft::ctl
