// The worker's own exchanges between ranks, without the model around them: the sums that end each half of a
// layer under tp, and the partials of a cache that dcp splits. What runs is StepState, add_sums and Partials
// (worker/model); only what products and attention would have written comes from here.
//
// One object per rank, all with the same shape. One thread per rank.
#pragma once

#include <memory>
#include <vector>

#include "kernels/parallel.h"
#include "tests/bench/rank_turns.h"
#include "worker/model/partials.h"
#include "worker/model/residual.h"
#include "worker/model/step_state.h"

namespace weft::bench {

struct ExchangeShape {
  int64_t requests = 1;  // decode rows, each of a request of its own
  int64_t rows = 1;      // of each
  int64_t hidden = 64;
  int64_t heads = 8, latent = 14, rope = 2;
  bool split_cache = false;  // dcp over all ranks, else tp
  bool replicate_query = false;
};

class WorkerExchange {
 public:
  WorkerExchange(RankArenas& arenas, worker::Exchange& exchange, const ExchangeShape& shape);

  const ExchangeShape& shape() const { return shape_; }
  worker::StepState& state() { return *state_; }
  int64_t all_rows() const { return shape_.requests * shape_.rows; }
  int64_t head_count() const { return heads_of(state_->rank).size(); }  // of this rank
  kv::Range heads_of(int rank) const;
  int64_t words() const { return shape_.latent + 2; }  // of a partial

  // ---- sums: where this rank's products leave theirs, [all rows][hidden]; and the exchange point, after
  // which the sums of all ranks have been added to residual().
  float* sums() { return state_->outbox(); }
  void add_sums();
  float* residual() { return state_->x.data(); }

  // ---- partials: begin(), fill at() for every request and rank, [rows][heads of that rank][words()]; then
  // exchange() puts the values of this rank's heads into values(), [request][rows][heads][latent].
  void begin() { partials_.begin_layer(); }
  float* at(int64_t request, int rank) { return partials_.at(span(request), rank); }
  void exchange();
  float* values() { return values_.data(); }

  // ---- queries of this rank's heads for the others, [request][rows][heads][latent + rope] in bf16: through
  // exchange point kEntries, and those of all ranks into `gathered`, rank after rank.
  void gather_queries(const uint16_t* own, uint16_t* gathered);

  // Of an outbox that holds what any of these writes.
  static size_t outbox_bytes(const ExchangeShape& shape, int ranks);

 private:
  const worker::SpanRoute& span(int64_t request) const {
    return state_->layout.spans()[static_cast<size_t>(request)];
  }

  ExchangeShape shape_;
  worker::ModelConfig config_;
  worker::ModelWeights weights_;
  std::unique_ptr<worker::StepState> state_;
  worker::Partials partials_;
  worker::SegmentPresence presence_;
  std::vector<float> values_;
};

}  // namespace weft::bench
