// The demo itself: builds the prompt, asks the three questions as turns of one conversation, reports.
//
// Expected failures are Results, typed as the client's; one thread.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/result.h"
#include "tools/ctl/context.h"

namespace weft::demo {

struct DemoOptions {
  size_t context = 32768;  // tokens of the first request
  std::string source;      // file or folder; empty: the licences of the system, or made text
  uint64_t seed = 0;
  // Keeps this run's prefix blocks to itself: a document that an earlier run left in the cache would be read
  // in no time, and the report would say nothing.
  std::string cache_salt;
};

// Writes to context.out; prefill progress goes to context.err. The value says whether all was right; an error
// is a demo that could not be run. Groupings come from context.arguments.
Result<bool> run_demo(const DemoOptions& options, ctl::Context& context);

}  // namespace weft::demo
