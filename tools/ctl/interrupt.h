// Ctrl-C and SIGTERM as a readable descriptor. Blocks both signals for the process; call before any thread.
#pragma once

namespace weft::ctl {

// -1: the system refused, and the signals keep their default action.
int interrupt_descriptor();

}  // namespace weft::ctl
