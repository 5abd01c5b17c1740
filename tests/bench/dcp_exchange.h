// What a step under dcp exchanges in a layer to end its attention: the worker's one exchange point beside
// three collectives.
//
// From partials that attention has just written, of every head over this rank's part of the cache, to the
// attended values of this rank's heads:
//   one-shot    every rank has projected the queries of all heads (query=replicated); packed partials to the
//               owners of the heads, at one exchange point, and merged there
//   gathered    the same after an exchange point that gathers the queries (query=gathered)
//   three       gather of queries, gather of the log-sum-exp of every head, outputs scaled by it,
//               reduce-scatter of the outputs
//   writing     the partials alone, with nothing exchanged: in all of the above, too
// The three are made of the same exchange points, as cheaply as these allow: scaled outputs go straight into
// the outbox, and the reduce-scatter adds where they lie. All are CHECKed to give the same values.
#pragma once

#include "tests/bench/rank_turns.h"

namespace weft::bench {

struct DcpShape {
  int ranks = 2;
  int64_t batch = 1;  // decode rows, each of a request of its own
  int64_t heads = 64, latent = 512, rope = 64;
};

struct DcpExchange {
  Turns one_shot, gathered, three, writing;
  // Bytes that one rank reads from the others.
  int64_t one_shot_bytes = 0, gathered_bytes = 0, three_bytes = 0;

  // By round: the time of `turns` over that of the one-shot exchange, and the same without the writing.
  std::vector<double> over_one_shot(const Turns& turns) const;
  std::vector<double> over_one_shot_net(const Turns& turns) const;
};

DcpExchange measure_dcp(const DcpShape& shape, int rounds, double seconds);

// Exchange points of a decode step of one request, of a model with 78 layers of which 21 have an indexer
// (GLM-5), by the arithmetic that the worker's counters are tested against.
struct StepPoints {
  int64_t tp = 0, replicated = 0, gathered = 0, replicated_split_index = 0;
};
StepPoints step_points(int ranks);

}  // namespace weft::bench
