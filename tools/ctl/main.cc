#include <unistd.h>

#include <iostream>

#include "tools/ctl/interrupt.h"
#include "tools/ctl/main_run.h"

int main(int count, char** words) {
  weft::ctl::Context context{{}, std::cin, std::cout, std::cerr, weft::ctl::terminal_of_process()};
  context.in_is_terminal = ::isatty(STDIN_FILENO) == 1;
  context.open_interrupts = weft::ctl::interrupt_descriptor;
  return weft::ctl::run_words(std::vector<std::string>(words + 1, words + count), context);
}
