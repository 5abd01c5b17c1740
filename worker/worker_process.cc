#include "worker/worker_process.h"

#include <sys/prctl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "kernels/parallel.h"
#include "proto/vocab/units.h"
#include "worker/event_log.h"

namespace weft::worker {
namespace {

using namespace std::chrono_literals;
constexpr Duration kTick = 100ms;
constexpr Duration kProgressInterval = 200ms;
constexpr Duration kResultTimeout = 60s;  // a daemon that reads no result for so long is stuck

// What lines and process lists call it.
void set_rank(int rank) {
  set_log_rank(rank);
  ::prctl(PR_SET_NAME, ("weft-worker-" + std::to_string(rank)).c_str());
}

}  // namespace

Error WorkerProcess::run() {
  for (;;) {
    if (auto served = serve(); !served) return std::move(served).error();
  }
}

Result<void> WorkerProcess::serve() {
  Command command = channel_.next();
  const wire::ToWorker& message = command.message;
  const bool expected = message.has_describe()     ? !settings_
                        : message.has_map_arenas() ? settings_ && !arenas_
                                                   : loaded_ && message.has_take_rank() == settings_->spare;
  if (!expected)
    return error(ErrorCode::kBadMessage, "a command out of order: " + message.ShortDebugString());
  if (message.has_describe()) return describe(message.describe());
  if (message.has_map_arenas()) return map_and_load(message.map_arenas(), std::move(command.descriptors));
  if (message.has_take_rank()) return take_rank(message.take_rank());
  return run_epoch(message.begin());
}

Result<void> WorkerProcess::describe(const wire::Describe& request) {
  TRY(settings_, read_settings(request));
  if (!settings_->spare) set_rank(settings_->rank);
  // Before pinning: afterwards this process sees its own cores only, and all ranks' threads would seem too
  // many.
  spin_ = spin_time(settings_->rank_count * settings_->threads);
  threads_ = std::make_unique<ThreadPool>(settings_->threads, spin_);
  TRY_VOID(threads_->pin(settings_->cores));
  kernels::set_flush_to_zero();
  wire::FromWorker answer;
  *answer.mutable_description() = describe_model(*settings_, request.max_context());
  log_event("described", "model=" + answer.description().name() + " type=" + settings_->config.model_type +
                             " threads=" + std::to_string(settings_->threads) +
                             " isa=" + answer.description().instruction_set());
  return channel_.send(answer);
}

Result<void> WorkerProcess::map_and_load(const wire::MapArenas& message,
                                         std::vector<kv::Descriptor> descriptors) {
  const WorkerSettings& settings = *settings_;
  TRY(arenas_, map_arenas(message, std::move(descriptors), settings));
  if (!settings.spare) start_ticker();
  if (std::getenv("WEFT_INJECT_MEMORY_LOSS") != nullptr) wait_for_memory_loss();
  log_event("mapped", "pool_bytes=" + std::to_string(message.pool_bytes(settings.rank)));

  Time last{};
  Result<void> sent;
  auto progress = [&](const LoadCounts& counts) {
    const Time now = monotonic_now();
    if (!sent || now - last < kProgressInterval) return;
    last = now;
    wire::FromWorker report;
    wire::LoadProgress* load = report.mutable_progress();
    load->set_tensors_done(static_cast<uint64_t>(counts.tensors_done));
    load->set_tensors_total(static_cast<uint64_t>(counts.tensors_total));
    sent = channel_.send(report);
  };
  TRY(const LoadCounts counts,
      load_weights(settings.model_path, settings.config, settings.weight_dtype, arenas_->weights.data(),
                   static_cast<int64_t>(arenas_->weights.bytes()), settings.rank,
                   settings.spare ? 1 : settings.packers, progress));
  TRY_VOID(std::move(sent));
  loaded_ = true;
  log_event("loaded",
            "tensors=" + std::to_string(counts.tensors_done) + " bytes=" + std::to_string(counts.bytes_done));
  wire::FromWorker answer;
  answer.mutable_loaded()->set_tensors(static_cast<uint64_t>(counts.tensors_done));
  answer.mutable_loaded()->set_bytes(static_cast<uint64_t>(counts.bytes_done));
  return channel_.send(answer);
}

// All that a rank has of its own: a name, cores, a heartbeat.
Result<void> WorkerProcess::take_rank(const wire::TakeRank& message) {
  if (message.rank() >= static_cast<uint32_t>(settings_->rank_count)) {
    return error(ErrorCode::kBadMessage, std::to_string(message.rank()) + " is no rank", "rank");
  }
  settings_->spare = false;
  settings_->rank = static_cast<int>(message.rank());
  set_rank(settings_->rank);
  const std::vector<int> cores(message.cores().begin(), message.cores().end());
  TRY_VOID(threads_->pin(cores));
  start_ticker();
  log_event("takes_rank");
  wire::FromWorker answer;
  answer.mutable_loaded();
  return channel_.send(answer);
}

void WorkerProcess::start_ticker() {
  std::thread([&heartbeat = arenas_->control.rank_state(settings_->rank).heartbeat] {
    ::prctl(PR_SET_NAME, "weft-ticker");
    for (;;) {
      heartbeat.fetch_add(1, std::memory_order_relaxed);
      std::this_thread::sleep_for(kTick);
    }
  }).detach();
}

// Tests: at SIGUSR2 the process ends as if its device had failed, and the pool's memory with it.
void WorkerProcess::wait_for_memory_loss() {
  std::thread([this] {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR2);
    int raised = 0;
    while (::sigwait(&signals, &raised) != 0) {
    }
    channel_.fail(error(ErrorCode::kUnavailable, "what it held is lost", "pool"));
  }).detach();
}

Result<void> WorkerProcess::prepare(const kv::Topology& topology) {
  const WorkerSettings& settings = *settings_;
  TRY(weights_, view_weights(settings.config, settings.weight_dtype, arenas_->weights.data(),
                             static_cast<int64_t>(arenas_->weights.bytes())));
  runner_.reset();
  exchange_ = std::make_unique<Exchange>(arenas_->control, arenas_->mailbox_bases(),
                                         arenas_->mailboxes[0].bytes(), settings.rank);
  exchange_->set_spin(spin_);
  RunnerSetup setup;
  setup.config = &settings.config;
  setup.weights = &weights_;
  setup.cache = settings.cache;
  setup.block_tokens = settings.block_tokens;
  setup.max_step_rows = settings.max_step_rows;
  setup.rank = settings.rank;
  setup.topology = topology;
  setup.control = &arenas_->control;
  setup.pools = arenas_->pools;
  setup.host = arenas_->host;
  setup.cores = settings.cores;
  setup.exchange = exchange_.get();
  setup.parallel = threads_.get();
  runner_ = std::make_unique<StepRunner>(std::move(setup));
  return {};
}

Result<void> WorkerProcess::run_epoch(const wire::Begin& begin) {
  const Epoch epoch{begin.epoch()};
  uint32_t sequence = begin.plan_sequence();
  const RankMask all = all_ranks(settings_->rank_count);
  const RankMask ranks = begin.ranks() == 0 ? all : begin.ranks();
  if (number(epoch) == 0) return error(ErrorCode::kBadMessage, "epochs count from 1", "epoch");
  if ((ranks & ~all) != 0 || !holds(ranks, settings_->rank)) {
    return error(ErrorCode::kBadMessage,
                 "mask " + std::to_string(ranks) + " has no rank " + std::to_string(settings_->rank) +
                     ", or one beyond " + std::to_string(settings_->rank_count),
                 "ranks");
  }
  const kv::Topology topology(ranks);
  if (runner_ == nullptr || !(exchange_->topology() == topology)) TRY_VOID(prepare(topology));
  kv::ControlArena& control = arenas_->control;
  log_event("begins", "epoch=" + std::to_string(number(epoch)) + " plan=" + std::to_string(sequence) +
                          " place=" + std::to_string(topology.place(settings_->rank)) + "/" +
                          std::to_string(topology.count()));
  control.plan_read(settings_->rank, sequence);
  exchange_->begin_epoch(epoch, topology);
  while (!control.aborted(epoch)) {
    const auto plan = control.wait_plan(sequence, epoch, 1h);
    if (!plan) continue;
    if (plan->epoch != epoch) {
      return error(ErrorCode::kInternal, "plan " + std::to_string(sequence) + " is of epoch " +
                                             std::to_string(number(plan->epoch)) + ", not " +
                                             std::to_string(number(epoch)));
    }
    auto ran = run_plan(plan->bytes, epoch, sequence++);
    control.rank_state(settings_->rank).step_low.store(0, std::memory_order_relaxed);
    if (!ran && ran.error().code != ErrorCode::kCancelled) return ran;
  }
  log_event("aborted", "epoch=" + std::to_string(number(epoch)));
  wire::FromWorker answer;
  answer.mutable_aborted()->set_epoch(number(epoch));
  return channel_.send(answer);
}

Result<void> WorkerProcess::run_plan(std::span<const std::byte> bytes, Epoch epoch, uint32_t sequence) {
  kv::ControlArena& control = arenas_->control;
  wire::StepPlan plan;
  const bool parsed = plan.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()));
  control.plan_read(settings_->rank, sequence + 1);
  if (!parsed) return error(ErrorCode::kBadMessage, "plan " + std::to_string(sequence) + " does not parse");
  TRY(const wire::StepResult result, runner_->run(plan, epoch));
  const std::string encoded = result.SerializeAsString();
  if (static_cast<int64_t>(encoded.size()) > control.limits().result_bytes_max) {
    return error(ErrorCode::kTooLarge, "a result of " + std::to_string(encoded.size()) +
                                           " bytes; the ring takes " +
                                           std::to_string(control.limits().result_bytes_max));
  }
  if (!control.publish_result(settings_->rank, std::as_bytes(std::span(encoded)), kResultTimeout)) {
    return error(ErrorCode::kUnavailable, "the daemon does not take results");
  }
  const uint64_t one = 1;
  if (::write(arenas_->result_event.get(), &one, sizeof one) != sizeof one && errno != EAGAIN) {
    return error(ErrorCode::kIo, std::string("result event: ") + std::strerror(errno));
  }
  return {};
}

}  // namespace weft::worker
