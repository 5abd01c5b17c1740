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
  for (int rank = 0; rank < options.rank_count; ++rank) {
    auto state = std::make_unique<Rank>();
    state->pool = std::make_unique<worker::ThreadPool>(options.threads);
    state->exchange = std::make_unique<worker::Exchange>(*control_, mailboxes, mailbox, rank);
    state->exchange->begin_epoch(Epoch{1});
    worker::RunnerSetup setup;
    setup.config = &model.config;
    setup.weights = &model.weights;
    setup.cache = options.cache;
    setup.block_tokens = options.block_tokens;
    setup.max_step_rows = options.max_step_rows;
    setup.rank = rank;
    setup.control = control_.get();
    setup.pools = pools_;
    setup.exchange = state->exchange.get();
    setup.parallel = state->pool.get();
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
    setup.on_guess = [this](uint64_t request, int64_t position, int64_t round,
                            std::span<const float> logits) {
      const std::lock_guard lock(logits_mutex_);
      guesses_[{request, position, round}].assign(logits.begin(), logits.end());
    };
    state->runner = std::make_unique<worker::StepRunner>(std::move(setup));
    ranks_.push_back(std::move(state));
  }
}

LocalWorkers::~LocalWorkers() = default;

Result<std::vector<wire::StepResult>> LocalWorkers::run(const wire::StepPlan& plan) {
  std::vector<std::optional<Result<wire::StepResult>>> results(ranks_.size());
  auto run_rank = [&](size_t rank) {
    kernels::set_flush_to_zero();
    results[rank].emplace(ranks_[rank]->runner->run(plan, Epoch{1}));
    if (!results[rank]->has_value()) control_->abort_epoch(Epoch{1});
  };
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < ranks_.size(); ++rank) threads.emplace_back(run_rank, rank);
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
