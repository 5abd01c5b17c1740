// One line per event on stderr, which the daemon captures: "weft-worker rank=2 event=loaded tensors=120".
//
// Events have stable names; nothing is logged per step or token. Any thread.
#pragma once

#include <string>

namespace weft::worker {

// `fields`: "name=value …", may be empty. The rank is −1 until the daemon has said which it is.
void log_event(const std::string& event, const std::string& fields = {});
void set_log_rank(int rank);

}  // namespace weft::worker
