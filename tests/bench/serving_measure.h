// Prefill and decode as a client sees them: real daemons with pinned workers, requests through the client
// library, times out of the reply's trace (those that `weftctl explain` shows).
//
// All daemons live through all rounds; one serves while the others sleep, which is checked by their CPU time.
// Within a round every configuration gets the same prompt, between rounds prompts differ, and the prefix
// cache is off; the first token (prefill) or all tokens (decode) must be equal over the configurations, else
// the run fails: they did not do the same work.
#pragma once

#include <string>

#include "proto/vocab/result.h"
#include "tests/bench/figures.h"
#include "tests/bench/settings.h"

namespace weft::bench {

struct ServingPlace {
  std::string folder;  // empty; daemons' folders and the model go there
  CorePair cores;
};

// Tokens/s of one worker of one thread, one of two, two of one, and the ratios.
// Then ms/token of tp, dcp(2) and dp on two workers, each context.
Result<void> measure_serving(const Settings& settings, const Ceilings& ceilings, const ServingPlace& place,
                             Report& report);

}  // namespace weft::bench
