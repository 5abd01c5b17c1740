#include "tests/support/local_workers.h"

#include <gtest/gtest.h>

#include <cstring>
#include <thread>
#include <tuple>

namespace weft::test {
namespace {

kv::Mapping anonymous(size_t bytes) {
  kv::Descriptor fd = kv::create_memory("test", bytes).value();
  return kv::Mapping::map(fd.get(), bytes).value();
}

}  // namespace

const LocalModel& local_model(const std::string& folder, DType weight_dtype, bool draft_layers,
                              bool split_experts) {
  static std::mutex mutex;
  static std::map<std::tuple<std::string, DType, bool, bool>, std::unique_ptr<LocalModel>> models;
  const std::lock_guard lock(mutex);
  auto& model = models[{folder, weight_dtype, draft_layers, split_experts}];
  if (model == nullptr) {
    model = std::make_unique<LocalModel>();
    model->config = worker::read_model_config(folder, draft_layers).value();
    model->config.split_experts = split_experts;
    model->weight_dtype = weight_dtype;
    const int64_t bytes = worker::weight_arena_bytes(model->config, weight_dtype);
    model->arena = anonymous(static_cast<size_t>(bytes));
    (void)worker::load_weights(folder, model->config, weight_dtype, model->arena.data(), bytes, 0, 1,
                               [](const worker::LoadCounts&) {})
        .value();
    model->weights = worker::view_weights(model->config, weight_dtype, model->arena.data(), bytes).value();
  }
  return *model;
}

struct LocalWorkers::Rank {
  std::unique_ptr<worker::ThreadPool> pool;
  std::unique_ptr<worker::Exchange> exchange;
  std::unique_ptr<worker::StepRunner> runner;
};

LocalWorkers::LocalWorkers(const LocalModel& model, const LocalOptions& options)
    : model_(model),
      options_(options),
      geometry_(model.config.cache_geometry(options.cache, options.block_tokens)) {
  kv::ControlLimits limits;
  limits.rank_count = options.rank_count;
  limits.block_tokens = options.block_tokens;
  limits.parts = geometry_.parts();
  limits.table_count = options.table_count;
  limits.table_blocks = options.table_blocks;
  limits.host_parts = options.host.entries > 0 ? geometry_.first_part(kv::Stream::kIndexKeys) : 0;
  limits.hot_pages = options.hot_pages;
  limits.max_samples = options.max_step_rows;
  limits.plan_bytes_max = 1 << 20;
  limits.result_bytes_max = 1 << 20;
  control_ = std::make_unique<kv::ControlArena>(
      kv::ControlArena::format(anonymous(kv::control_arena_bytes(limits)), limits).value());

  const size_t mailbox = worker::mailbox_bytes(worker::outbox_bytes(
      model.config, options.cache.query_dtype(), options.rank_count, options.max_step_rows));
  std::vector<std::byte*> mailboxes;
  for (int rank = 0; rank < options.rank_count; ++rank) {
    memory_.push_back(anonymous(mailbox));
    mailboxes.push_back(memory_.back().data());
    const size_t bytes = kv::pool_bytes(geometry_, options.pool);
    memory_.push_back(anonymous(bytes));
    // A page nobody wrote holds NaN: whoever reads it is found out.
    std::memset(memory_.back().data(), 0xff, bytes);
    pools_.emplace_back(memory_.back().data(), geometry_, options.pool);
  }
  const size_t host_bytes = kv::pool_bytes(geometry_, options.host);
  memory_.push_back(anonymous(host_bytes));
  if (host_bytes > 0) std::memset(memory_.back().data(), 0xff, host_bytes);
  host_ = kv::PagePool(memory_.back().data(), geometry_, options.host);
  for (int rank = 0; rank < options.rank_count; ++rank) {
    auto state = std::make_unique<Rank>();
    state->pool = std::make_unique<worker::ThreadPool>(options.threads);
    state->exchange = std::make_unique<worker::Exchange>(*control_, mailboxes, mailbox, rank);
    ranks_.push_back(std::move(state));
  }
  begin_epoch(kv::Topology::of_all(options.rank_count));
}

worker::RunnerSetup LocalWorkers::setup_of(int rank) {
  worker::RunnerSetup setup;
  setup.config = &model_.config;
  setup.weights = &model_.weights;
  setup.cache = options_.cache;
  setup.block_tokens = options_.block_tokens;
  setup.max_step_rows = options_.max_step_rows;
  setup.rank = rank;
  setup.topology = topology_;
  setup.control = control_.get();
  setup.pools = pools_;
  setup.host = host_;
  setup.exchange = ranks_[static_cast<size_t>(rank)]->exchange.get();
  setup.parallel = ranks_[static_cast<size_t>(rank)]->pool.get();
  setup.on_logits = [this](uint64_t request, int64_t position, std::span<const float> logits) {
    if (!keep_logits_) return;
    const std::lock_guard lock(logits_mutex_);
    std::vector<float>& row = logits_[{request, position}];
    if (!row.empty()) {
      EXPECT_EQ(std::memcmp(row.data(), logits.data(), logits.size_bytes()), 0)
          << "request " << request << ", position " << position << " computed twice with other bits";
    }
    row.assign(logits.begin(), logits.end());
  };
  setup.on_guess = [this](uint64_t request, int64_t position, int64_t round, std::span<const float> logits) {
    const std::lock_guard lock(logits_mutex_);
    guesses_[{request, position, round}].assign(logits.begin(), logits.end());
  };
  return setup;
}

void LocalWorkers::begin_epoch(const kv::Topology& topology) {
  control_->abort_epoch(epoch_);
  epoch_ = Epoch{number(epoch_) + 1};
  topology_ = topology;
  for (int place = 0; place < topology.count(); ++place) {
    Rank& rank = *ranks_[static_cast<size_t>(topology.rank(place))];
    rank.exchange->begin_epoch(epoch_, topology);
    rank.runner = std::make_unique<worker::StepRunner>(setup_of(topology.rank(place)));
  }
}

LocalWorkers::~LocalWorkers() = default;

Result<std::vector<wire::StepResult>> LocalWorkers::run(const wire::StepPlan& plan) {
  const auto count = static_cast<size_t>(topology_.count());
  std::vector<std::optional<Result<wire::StepResult>>> results(count);
  auto run_rank = [&](size_t place) {
    kernels::set_flush_to_zero();
    Rank& rank = *ranks_[static_cast<size_t>(topology_.rank(static_cast<int>(place)))];
    results[place].emplace(rank.runner->run(plan, epoch_));
    if (!results[place]->has_value()) control_->abort_epoch(epoch_);
  };
  std::vector<std::thread> threads;
  for (size_t place = 1; place < count; ++place) threads.emplace_back(run_rank, place);
  run_rank(0);
  for (std::thread& thread : threads) thread.join();
  std::vector<wire::StepResult> out;
  // The rank that failed first, not those that were aborted because of it.
  for (auto& result : results) {
    if (!result->has_value() && result->error().code != ErrorCode::kCancelled) return result->error();
  }
  for (auto& result : results) {
    if (!result->has_value()) return result->error();
    out.push_back(std::move(**result));
  }
  return out;
}

}  // namespace weft::test
