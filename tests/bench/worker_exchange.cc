#include "tests/bench/worker_exchange.h"

#include <cstring>

#include "proto/worker.pb.h"

namespace weft::bench {
namespace {

worker::ModelConfig config_of(const ExchangeShape& shape) {
  worker::ModelConfig config;
  config.hidden = shape.hidden, config.heads = shape.heads, config.vocabulary = 64;
  config.layers.resize(1);
  config.latent = shape.latent, config.rope = shape.rope;
  config.nope = config.value = 1;
  return config;
}

wire::StepPlan plan_of(const ExchangeShape& shape, int ranks) {
  wire::StepPlan plan;
  plan.set_step(1);
  for (int64_t request = 0; request < shape.requests; ++request) {
    wire::Span* span = plan.add_spans();
    span->set_request(static_cast<uint64_t>(request + 1));
    span->set_rows(static_cast<uint32_t>(shape.rows));
    span->set_split(static_cast<uint32_t>(kv::Split::kShared));
    span->set_group_width(static_cast<uint32_t>(ranks));
    span->set_group_c(static_cast<uint32_t>(shape.split_cache ? ranks : 1));
    span->set_index_c(1);
    span->set_replicate_query(shape.split_cache && shape.replicate_query);
    for (int64_t row = 0; row < shape.rows; ++row) span->add_tokens(0);
  }
  return plan;
}

std::unique_ptr<worker::StepState> state_of(const worker::ModelConfig& config,
                                            const worker::ModelWeights& weights, RankArenas& arenas,
                                            worker::Exchange& exchange, const ExchangeShape& shape) {
  worker::RunnerSetup setup;
  setup.config = &config;
  setup.weights = &weights;
  setup.cache = CacheDType::kBF16;
  setup.max_step_rows = shape.requests * shape.rows;
  setup.rank = exchange.rank();
  setup.control = &arenas.control();
  setup.pools.resize(static_cast<size_t>(arenas.ranks()));
  setup.exchange = &exchange;
  setup.parallel = &kernels::serial();
  auto state = std::make_unique<worker::StepState>(setup);
  state->layout = worker::StepLayout::make(plan_of(shape, arenas.ranks()), 0, arenas.ranks()).value();
  state->crossed.assign(static_cast<size_t>(shape.requests), {});
  state->x.assign(static_cast<size_t>(setup.max_step_rows * shape.hidden), 0.0f);
  return state;
}

}  // namespace

WorkerExchange::WorkerExchange(RankArenas& arenas, worker::Exchange& exchange, const ExchangeShape& shape)
    : shape_(shape),
      config_(config_of(shape)),
      state_(state_of(config_, weights_, arenas, exchange, shape)),
      partials_(*state_),
      presence_(worker::attention_segments(config_)),
      values_(static_cast<size_t>(all_rows() * head_count() * shape.latent)) {
  kernels::set_flush_to_zero();
  CHECK(outbox_bytes(shape, arenas.ranks()) <= exchange.outbox().size());
  partials_.begin_step();
}

kv::Range WorkerExchange::heads_of(int rank) const {
  return kv::rank_heads({0, state_->rank_count, 1}, rank, shape_.heads);
}

void WorkerExchange::add_sums() {
  state_->exchange.pass(worker::ExchangePoint::kAttentionSums, 0).value();
  const worker::PublishedSums published{
      {0, state_->rank_count, 1}, all_rows(), [](int) { return int64_t{0}; }};
  worker::add_sums(
      *state_, published, presence_, nullptr, {0, all_rows()}, [](int64_t home) { return home; },
      [](int64_t) {});
}

void WorkerExchange::exchange() {
  const int64_t request_values = shape_.rows * head_count() * shape_.latent;
  partials_
      .exchange(
          0, [&](const worker::SpanRoute& span) { return values_.data() + span.index * request_values; },
          [] {})
      .value();
}

void WorkerExchange::gather_queries(const uint16_t* own, uint16_t* gathered) {
  const int64_t width = config_.key_width();
  const auto rank_elements = [&](int rank) { return all_rows() * heads_of(rank).size() * width; };
  std::memcpy(state_->exchange.outbox().data(), own, static_cast<size_t>(rank_elements(state_->rank)) * 2);
  state_->exchange.pass(worker::ExchangePoint::kEntries, 0).value();
  for (int rank = 0; rank < state_->rank_count; ++rank) {
    const auto bytes = static_cast<size_t>(rank_elements(rank)) * 2;
    const bool mine = rank == state_->rank;
    std::memcpy(gathered, mine ? static_cast<const void*>(own) : state_->exchange.inbox(rank).data(), bytes);
    gathered += rank_elements(rank);
  }
}

size_t WorkerExchange::outbox_bytes(const ExchangeShape& shape, int ranks) {
  const worker::ModelConfig config = config_of(shape);
  return worker::outbox_bytes(config, DType::kBF16, ranks, shape.requests * shape.rows);
}

}  // namespace weft::bench
