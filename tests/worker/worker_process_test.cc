// Goal: the weft-worker binary keeps its side of proto/worker.proto: it describes, loads, runs plans, leaves
// an aborted epoch and repeats with the same bits, outlives its neighbours but not its daemon, and answers
// what it cannot do with a Failure. Method: real processes on a small random checkpoint, driven message by
// message.
#include "worker/worker_process.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <set>

#include "proto/version.h"
#include "tests/worker/scripted_daemon.h"

namespace weft::worker {
namespace {

const std::string kModel = WEFT_GOLDEN_FOLDER "/glm_moe_dsa";

// What the logits were, and which tokens: by position.
struct Outcome {
  std::map<uint64_t, std::string> digests;
  std::vector<uint32_t> tokens;
  void add(const std::map<int, wire::StepResult>& results) {
    for (const auto& [rank, result] : results) {
      for (const wire::Digest& digest : result.digests()) digests[digest.position()] = digest.sha256();
      for (const wire::SampledToken& sample : result.samples()) tokens.push_back(sample.token());
    }
  }
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

// Two prompt chunks, then three decode steps whose inputs are what the step before sampled.
std::vector<wire::StepPlan> script(const ScriptedDaemon& daemon) {
  std::vector<wire::StepPlan> plans{daemon.plan(1, 0, 45), daemon.plan(2, 45, 30)};
  for (uint64_t step = 3; step <= 5; ++step) {
    wire::StepPlan plan = daemon.plan(step, 72 + step, 1);
    wire::Span* span = plan.mutable_spans(0);
    span->clear_tokens();
    span->set_prefill(false);
    span->mutable_input()->set_step(step - 1);
    plans.push_back(plan);
  }
  return plans;
}

Outcome undisturbed(int ranks) {
  ScriptedDaemon daemon(kModel, ranks);
  for (int rank = 0; rank < ranks; ++rank) daemon.start_worker(rank);
  daemon.begin(1);
  Outcome outcome;
  for (const wire::StepPlan& plan : script(daemon)) {
    daemon.publish(1, plan);
    const auto results = daemon.results();
    for (const auto& [rank, result] : results) {
      EXPECT_EQ(result.step(), plan.step());
      EXPECT_EQ(result.rank(), static_cast<uint32_t>(rank));
    }
    outcome.add(results);
  }
  return outcome;
}

TEST(WorkerProcess, RunsPlansWithTheSameBitsOnAnyNumberOfRanks) {
  const Outcome one = undisturbed(1);
  EXPECT_EQ(one.digests.size(), 78u);
  EXPECT_EQ(one.tokens.size(), 5u);
  EXPECT_EQ(undisturbed(2), one);
  EXPECT_EQ(undisturbed(4), one);
}

TEST(WorkerProcess, TwoPlansInFlight) {
  ScriptedDaemon daemon(kModel, 2);
  for (int rank = 0; rank < 2; ++rank) daemon.start_worker(rank);
  daemon.begin(1);
  const auto plans = script(daemon);
  Outcome outcome;
  daemon.publish(1, plans[0]);
  for (size_t i = 1; i < plans.size(); ++i) {
    daemon.publish(1, plans[i]);
    outcome.add(daemon.results());
  }
  outcome.add(daemon.results());
  EXPECT_EQ(outcome, undisturbed(1));
}

TEST(WorkerProcess, DescribesTheModel) {
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  const wire::ModelDescription& model = daemon.description();
  EXPECT_EQ(model.protocol_version(), kWorkerProtocol);
  EXPECT_EQ(model.model_type(), "glm_moe_dsa");
  EXPECT_EQ(model.name(), "glm_moe_dsa");
  EXPECT_EQ(model.hidden(), 64u);
  EXPECT_EQ(model.layers(), 6u);
  EXPECT_EQ(model.index_layers(), 3u);
  EXPECT_EQ(model.heads(), 8u);
  EXPECT_EQ(model.vocabulary(), 512u);
  EXPECT_EQ(model.max_context(), 4096u);
  EXPECT_EQ(model.entry_bytes(), (32u + 8u) * 4);
  EXPECT_EQ(model.index_key_bytes(), 16u * 4);
  EXPECT_EQ(model.index_topk(), 16u);
  EXPECT_EQ(model.query_bytes(), 40u * 4);
  EXPECT_EQ(model.value_width(), 32u);
  EXPECT_EQ(model.entry_parts(), 1u);
  EXPECT_EQ(model.dense_layers(), 1u);
  EXPECT_EQ(model.weight_dtype(), wire::DTYPE_F32);
  EXPECT_EQ(model.weight_format(), "");
  EXPECT_EQ(model.dense_segments(), 0b10100100u);  // three units of 64 columns over eight segments
  EXPECT_EQ(model.moe_segments(), 0xffu);          // twelve experts
  EXPECT_FALSE(model.instruction_set().empty());
}

TEST(WorkerProcess, SharesTheLoadingAndGoesOnAfterARespawn) {
  ScriptedDaemon daemon(kModel, 2);
  for (int rank = 0; rank < 2; ++rank) daemon.start_worker(rank);
  EXPECT_GT(daemon.loaded()[0].bytes(), 0u);
  EXPECT_GT(daemon.loaded()[1].bytes(), 0u);
  daemon.begin(1);
  Outcome first;
  daemon.publish(1, script(daemon)[0]);
  first.add(daemon.results());

  ASSERT_EQ(::kill(daemon.worker(1).pid, SIGKILL), 0);
  daemon.control().abort_epoch(Epoch{1});
  EXPECT_EQ(daemon.worker(0).receive().aborted().epoch(), 1u);
  daemon.worker(1).wait_exit();
  daemon.start_worker(1);
  daemon.begin(2);
  Outcome second;
  daemon.publish(2, script(daemon)[0]);
  second.add(daemon.results());
  EXPECT_EQ(first, second);
}

TEST(WorkerProcess, ASpareTakesTheRankOfOneThatDied) {
  ScriptedDaemon daemon(kModel, 2);
  for (int rank = 0; rank < 2; ++rank) daemon.start_worker(rank);
  WorkerHandle spare = daemon.start_spare();
  daemon.begin(1);
  Outcome first;
  daemon.publish(1, script(daemon)[0]);
  first.add(daemon.results());

  ASSERT_EQ(::kill(daemon.worker(1).pid, SIGKILL), 0);
  daemon.control().abort_epoch(Epoch{1});
  EXPECT_EQ(daemon.worker(0).receive().aborted().epoch(), 1u);
  daemon.worker(1).wait_exit();
  daemon.take_rank(1, std::move(spare));
  daemon.begin(2);
  Outcome second;
  daemon.publish(2, script(daemon)[0]);
  second.add(daemon.results());
  EXPECT_EQ(first, second);
  const uint32_t beat = daemon.control().rank_state(1).heartbeat.load();
  while (daemon.control().rank_state(1).heartbeat.load() - beat < 2) ::sched_yield();
}

TEST(WorkerProcess, RepeatsAfterAKillAtAnyPlaceWithTheSameBits) {
  const Outcome expected = undisturbed(1);
  ScriptedDaemon daemon(kModel, 2);
  for (int rank = 0; rank < 2; ++rank) daemon.start_worker(rank);
  uint32_t epoch = 1;
  daemon.begin(epoch);
  Outcome outcome;
  int victim = 0;
  uint32_t exchange = 1;
  for (const wire::StepPlan& plan : script(daemon)) {
    // Killed when it has passed a few exchange points of the step; then the step is run again, undisturbed.
    const uint32_t target = daemon.control().rank_state(victim).exchange.load() + exchange;
    daemon.publish(epoch, plan);
    while (daemon.control().rank_state(victim).exchange.load() < target) ::sched_yield();
    ASSERT_EQ(::kill(daemon.worker(victim).pid, SIGKILL), 0);
    daemon.control().abort_epoch(Epoch{epoch});
    EXPECT_EQ(daemon.worker(1 - victim).receive().aborted().epoch(), epoch);
    daemon.worker(victim).wait_exit();
    for (int rank = 0; rank < 2; ++rank) {
      while (daemon.control().take_result(rank)) {  // a rank may have been done already
      }
    }
    daemon.start_worker(victim);
    daemon.begin(++epoch);
    daemon.publish(epoch, plan);
    outcome.add(daemon.results());
    victim = 1 - victim;
    exchange += 3;
  }
  EXPECT_EQ(outcome, expected);
}

TEST(WorkerProcess, EndsWithItsDaemon) {
  ScriptedDaemon daemon(kModel, 2);
  for (int rank = 0; rank < 2; ++rank) daemon.start_worker(rank);
  daemon.begin(1);
  daemon.publish(1, daemon.plan(1, 0, 45));
  // Rank 0 idle or computing, rank 1 likewise: the socket alone decides.
  for (int rank = 0; rank < 2; ++rank) daemon.worker(rank).socket.reset();
  for (int rank = 0; rank < 2; ++rank) {
    const int status = daemon.worker(rank).wait_exit();
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitDaemonGone) << status;
  }
}

// The plan says how long a rank waits for another; the one that is missing is named.
TEST(WorkerProcess, NamesARankThatDoesNotArrive) {
  ScriptedDaemon daemon(kModel, 2);
  daemon.start_worker(0);
  daemon.start_worker(1);
  daemon.begin(1);
  ASSERT_EQ(::kill(daemon.worker(1).pid, SIGSTOP), 0);
  wire::StepPlan plan = daemon.plan(1, 0, 20);
  plan.set_wait_ms(100);
  daemon.publish(1, plan);
  const wire::FromWorker answer = daemon.worker(0).receive();
  EXPECT_EQ(answer.failure().code(), static_cast<uint32_t>(ErrorCode::kDeadlineExceeded));
  EXPECT_NE(answer.failure().message().find("rank 1 did not arrive"), std::string::npos)
      << answer.ShortDebugString();
  EXPECT_NE(answer.failure().message().find("within 0.1 s"), std::string::npos) << answer.ShortDebugString();
  ASSERT_EQ(::kill(daemon.worker(1).pid, SIGKILL), 0);
  for (int rank = 0; rank < 2; ++rank) (void)daemon.worker(rank).wait_exit();
}

TEST(WorkerProcess, StopsWithStatusZero) {
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  daemon.begin(1);
  wire::ToWorker stop;
  stop.mutable_stop();
  daemon.worker(0).send(stop);
  EXPECT_EQ(daemon.worker(0).wait_exit(), 0);
}

TEST(WorkerProcess, BeatsWhileIdle) {
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  const std::atomic<uint32_t>& heartbeat = daemon.control().rank_state(0).heartbeat;
  const uint32_t before = heartbeat.load();
  while (heartbeat.load() < before + 3) ::sched_yield();  // before Begin
  daemon.begin(1);
  const uint32_t then = heartbeat.load();
  while (heartbeat.load() < then + 3) ::sched_yield();  // and in an epoch without plans
}

TEST(WorkerProcess, KeepsNoInheritedDescriptor) {
  // Left open on purpose and without close-on-exec, as a careless library in the daemon might.
  const kv::Descriptor stray(::dup(STDOUT_FILENO));
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  const std::string folder = "/proc/" + std::to_string(daemon.worker(0).pid) + "/";
  std::set<std::string> kinds;
  int beyond_standard = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "fd")) {
    if (std::stoi(entry.path().filename()) <= STDERR_FILENO) continue;
    ++beyond_standard;
    kinds.insert(std::filesystem::read_symlink(entry.path()).string().substr(0, 7));
  }
  EXPECT_EQ(beyond_standard, 2);  // its socket and the result event
  EXPECT_EQ(kinds, (std::set<std::string>{"anon_in", "socket:"}));
  std::string name;
  std::getline(std::ifstream(folder + "comm"), name);
  EXPECT_EQ(name, "weft-worker-0");
}

// ---- what it refuses

void expect_failure(const WorkerHandle& worker, ErrorCode code, const std::string& text) {
  const wire::FromWorker answer = worker.receive();
  ASSERT_TRUE(answer.has_failure()) << answer.ShortDebugString();
  EXPECT_EQ(answer.failure().code(), static_cast<uint32_t>(code)) << answer.ShortDebugString();
  const std::string said = answer.failure().field() + ": " + answer.failure().message();
  EXPECT_NE(said.find(text), std::string::npos) << said;
  const int status = worker.wait_exit();
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitFailed) << status;
}

TEST(WorkerRefuses, BadDescribe) {
  const ScriptedDaemon daemon(kModel, 2);
  auto refuses = [&](ErrorCode code, const std::string& text, auto change) {
    wire::ToWorker message = daemon.describe_message(0);
    change(*message.mutable_describe());
    const WorkerHandle worker = WorkerHandle::start();
    worker.send(message);
    SCOPED_TRACE(text);
    expect_failure(worker, code, text);
  };
  using D = wire::Describe;
  refuses(ErrorCode::kUnsupported, "protocol version 9", [](D& d) { d.set_protocol_version(9); });
  refuses(ErrorCode::kInvalidArgument, "rank_count: 9", [](D& d) { d.set_rank_count(9); });
  refuses(ErrorCode::kInvalidArgument, "rank: 2", [](D& d) { d.set_rank(2); });
  refuses(ErrorCode::kInvalidArgument, "block_tokens: 24", [](D& d) { d.set_block_tokens(24); });
  refuses(ErrorCode::kInvalidArgument, "cache_dtype: 0", [](D& d) { d.clear_cache_dtype(); });
  refuses(ErrorCode::kInvalidArgument, "index_cache_dtype: 0", [](D& d) { d.clear_index_cache_dtype(); });
  refuses(ErrorCode::kInvalidArgument, "fp8_ds_mla is no layout of index keys",
          [](D& d) { d.set_index_cache_dtype(wire::CACHE_DTYPE_FP8_DS_MLA); });
  refuses(ErrorCode::kInvalidArgument,
          "fp8_ds_mla is a layout of latent entries (MLA), and llama caches K and V", [](D& d) {
            d.set_model_path(WEFT_GOLDEN_FOLDER "/llama");
            d.set_cache_dtype(wire::CACHE_DTYPE_FP8_DS_MLA);
          });
  refuses(ErrorCode::kInvalidArgument, "weight_dtype: 7 is no known dtype",
          [](D& d) { d.set_weight_dtype(static_cast<wire::WireDType>(7)); });
  refuses(ErrorCode::kInvalidArgument, "threads: 0", [](D& d) { d.set_threads(0); });
  refuses(ErrorCode::kInvalidArgument, "cores: core 1000000", [](D& d) { d.add_cores(1'000'000); });
  refuses(ErrorCode::kInvalidArgument, "max_context: 4097", [](D& d) { d.set_max_context(4097); });
  refuses(ErrorCode::kNotFound, "config.json", [](D& d) { d.set_model_path("/nonexistent"); });
}

TEST(WorkerRefuses, CommandsOutOfOrder) {
  const WorkerHandle early = WorkerHandle::start();
  wire::ToWorker begin;
  begin.mutable_begin()->set_epoch(1);
  early.send(begin);
  expect_failure(early, ErrorCode::kBadMessage, "out of order");

  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  daemon.worker(0).send(daemon.describe_message(0));
  expect_failure(daemon.worker(0), ErrorCode::kBadMessage, "out of order");
}

TEST(WorkerRefuses, ARankThatIsNoneOrIsNotItsToTake) {
  wire::ToWorker take;
  take.mutable_take_rank()->set_rank(0);
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  daemon.worker(0).send(take);
  expect_failure(daemon.worker(0), ErrorCode::kBadMessage, "out of order");

  ScriptedDaemon other(kModel, 1);
  other.start_worker(0);
  for (const bool begins : {true, false}) {
    const WorkerHandle spare = other.start_spare();
    wire::ToWorker message;
    if (begins) {
      message.mutable_begin()->set_epoch(1);
    } else {
      message.mutable_take_rank()->set_rank(1);
    }
    spare.send(message);
    expect_failure(spare, ErrorCode::kBadMessage, begins ? "out of order" : "1 is no rank");
  }
}

TEST(WorkerRefuses, Garbage) {
  const WorkerHandle worker = WorkerHandle::start();
  kv::send_packet(worker.socket.get(), std::vector<std::byte>(100, std::byte{0xff})).value();
  expect_failure(worker, ErrorCode::kBadMessage, "100 bytes are no known command");
}

TEST(WorkerRefuses, ArenasThatDoNotFit) {
  auto refuses = [&](const std::string& text, auto change) {
    ScriptedDaemon daemon(kModel, 1);
    daemon.start_worker(0);  // makes the arenas
    const WorkerHandle worker = WorkerHandle::start();
    worker.send(daemon.describe_message(0));
    EXPECT_TRUE(worker.receive().has_description());
    wire::ToWorker message = daemon.map_message();
    std::vector<int> descriptors = daemon.map_descriptors();
    change(*message.mutable_map_arenas(), descriptors);
    worker.send(message, descriptors);
    SCOPED_TRACE(text);
    const wire::FromWorker answer = worker.receive();
    EXPECT_NE(answer.failure().ShortDebugString().find(text), std::string::npos) << answer.ShortDebugString();
    worker.wait_exit();
  };
  using M = wire::MapArenas;
  using Fds = std::vector<int>;
  refuses("descriptors", [](M&, Fds& fds) { fds.pop_back(); });
  refuses("weight_bytes", [](M& m, Fds&) { m.set_weight_bytes(100); });
  refuses("mailbox_bytes", [](M& m, Fds&) { m.set_mailbox_bytes(100); });
  refuses("pool_bytes", [](M& m, Fds&) { m.mutable_pool_pages(0)->set_entries(1000); });
  refuses("cannot be mapped", [](M& m, Fds&) { m.set_control_bytes(1 << 30); });
  refuses("not a control arena", [](M&, Fds& fds) { fds[0] = fds[1]; });
}

TEST(WorkerRefuses, APlanThatCannotRun) {
  ScriptedDaemon daemon(kModel, 1);
  daemon.start_worker(0);
  daemon.begin(1);
  daemon.publish(1, daemon.plan(1, 0, 65));  // more rows than max_step_rows
  expect_failure(daemon.worker(0), ErrorCode::kTooLarge, "65 rows");
}

TEST(WorkerRefuses, ABadCommandLine) {
  for (const char* bad : {"", "x", "-1", "1", "999"}) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(STDERR_FILENO);
      ::execl(WEFT_WORKER_BINARY, "weft-worker", "--socket-fd", bad, nullptr);
      ::_exit(127);
    }
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == kExitUsage) << bad;
  }
}

}  // namespace
}  // namespace weft::worker
