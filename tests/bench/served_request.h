// One request to a daemon of the benchmark's own, answered as asked.
#pragma once

#include <string>
#include <vector>

#include "proto/client.pb.h"
#include "tests/bench/daemon_process.h"

namespace weft::bench {

// Text of one token per byte that no other seed gives.
std::vector<uint32_t> made_prompt(uint64_t seed, int64_t tokens);

// Greedy, no end token, no prefix cache, no drafts; `decode` and the like are the caller's to set.
wire::GenerateRequest cold_request(const std::vector<uint32_t>& prompt, int64_t tokens);

struct Served {
  wire::Trace trace;
  std::vector<uint32_t> tokens;
};
// kInternal if it was not served as asked: prompt from the cache, another grouping, fewer tokens. Errors
// carry the end of the daemon's log.
Result<Served> serve(DaemonProcess& daemon, const wire::GenerateRequest& request);
// kInternal naming `what` if the tokens differ.
Result<void> must_agree(const Served& a, const Served& b, const std::string& what);

}  // namespace weft::bench
