// What a running command sees of the world: its arguments, two streams, the terminal, a way to be
// interrupted.
#pragma once

#include <iosfwd>
#include <optional>
#include <vector>

#include "proto/vocab/result.h"
#include "tools/ctl/arguments.h"
#include "tools/ctl/json.h"

namespace weft::ctl {

struct Terminal {
  bool out_is_terminal = false;
  bool error_is_terminal = false;
  bool colors = false;
  int width = 0;  // columns; 0: unlimited
};

// Looks at the process: isatty, the window size, COLUMNS, NO_COLOR, TERM.
Terminal terminal_of_process();

struct Context {
  Arguments arguments;
  std::istream& in;
  std::ostream& out;
  std::ostream& err;
  Terminal terminal;
  bool in_is_terminal = false;
  int interrupt_fd = -1;  // readable when the user wants out; -1: signals keep their default action
  int (*open_interrupts)() = nullptr;
  std::vector<Error> further_failures = {};  // told after the one that the command returned
  // With -o json, of a command that can still fail: written when it has ended, alone or inside of the error.
  std::optional<Json> result = {};

  // From here on the command looks at interrupt_fd. Called late: a command that blocks on something else (its
  // input, a daemon that does not answer) must still end at Ctrl-C.
  void catch_interrupts() {
    if (interrupt_fd < 0 && open_interrupts != nullptr) interrupt_fd = open_interrupts();
  }
};

}  // namespace weft::ctl
