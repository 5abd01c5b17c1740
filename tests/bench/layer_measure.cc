#include "tests/bench/layer_measure.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>

#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/layer_world.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

// One worker process: all that weft-worker does of a step.
void run_rank(const LayerWorld& world, int rank) {
  const Duration spin = worker::spin_time(kLayerRanks);
  worker::ThreadPool threads(1);
  const int core = rank == 0 ? world.run.cores.first : world.run.cores.second;
  threads.pin({&core, 1}).value();
  worker::Exchange exchange(*world.control, world.mailboxes, world.mailbox, rank);
  exchange.set_spin(spin);
  exchange.begin_epoch(Epoch{1});
  double last = 0;
  LayerWorld::Outcome discarded{};
  LayerWorld::Outcome* outcome = &discarded;
  uint64_t digest = 0;
  worker::RunnerSetup setup;
  setup.config = &world.config;
  setup.weights = &world.weights;
  setup.cache = world.run.cache;
  setup.block_tokens = kLayerBlock;
  setup.max_step_rows = world.run.rows;
  setup.rank = rank;
  setup.control = world.control.get();
  setup.pools = world.pools;
  setup.exchange = &exchange;
  setup.parallel = &threads;
  setup.on_stage = [&](worker::Stage stage) {
    const double now = wall_seconds();
    outcome->seconds[static_cast<size_t>(stage)] += now - last;
    last = now;
  };
  setup.on_logits = [&](uint64_t request, int64_t, std::span<const float> logits) {
    uint64_t hash = request;
    for (const float value : logits) hash = mix64(hash ^ std::bit_cast<uint32_t>(value));
    digest += hash;
  };
  worker::StepRunner runner(std::move(setup));
  int64_t number = 0;
  for (int round = -1; round < world.run.rounds; ++round) {  // the first only warms up
    for (size_t g = 0; g < world.groupings.size(); ++g) {
      outcome = round < 0 ? &discarded : world.outcome(rank, g, round);
      digest = 0;
      for (int step = 0; step < world.run.steps; ++step) {
        wire::StepPlan plan;
        world.write_plan(plan, g, number + step);
        last = wall_seconds();
        const wire::StepResult result = runner.run(plan, Epoch{1}).value();
        LayerWorld::Step& seen = *world.step(rank, g);
        seen.exchanges = result.exchanges();
        seen.crossed = {};
        for (const wire::SpanMeter& meter : result.meters()) {
          for (int kind = 0; kind < kv::kCrossKinds; ++kind) {
            seen.crossed.by_kind[static_cast<size_t>(kind)] += static_cast<int64_t>(meter.crossed(kind));
          }
        }
      }
      world.step(rank, g)->digest += digest;
      for (double& seconds : outcome->seconds) seconds /= world.run.steps;
    }
    number += world.run.steps;
  }
}

void run_ranks(const LayerWorld& world) {
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < kLayerRanks; ++rank) {
    const pid_t child = ::fork();
    CHECK_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      run_rank(world, rank);
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
}

}  // namespace

std::vector<LayerGrouping> layer_groupings() {
  const kv::DecodeWish tp, dcp{kv::DecodeKind::kDcp, kLayerRanks}, dp{kv::DecodeKind::kDp};
  return {{"tp", tp, {}},
          {"dcp(2)", dcp, {}},
          {"dcp(2), index split", dcp, kv::IndexKind::kSplit},
          {"dp", dp, {}}};
}

std::vector<LayerTimes> measure_layer(const LayerRun& run) {
  CHECK_EQ(run.shape.context % kLayerBlock, 0);
  const LayerWorld world(run);
  run_ranks(world);
  std::vector<LayerTimes> out(world.groupings.size());
  for (size_t g = 0; g < out.size(); ++g) {
    uint64_t digest = 0, first = 0;
    for (int rank = 0; rank < kLayerRanks; ++rank) {
      const LayerWorld::Step& step = *world.step(rank, g);
      out[g].exchanges = step.exchanges;
      out[g].crossed += step.crossed;
      digest += step.digest;
      first += world.step(rank, 0)->digest;
    }
    CHECK(digest == first, world.groupings[g].name, " gave other logits than ", world.groupings[0].name);
    for (int round = 0; round < run.rounds; ++round) {
      auto& mean = out[g].rounds.emplace_back();
      for (size_t stage = 0; stage < mean.size(); ++stage) {
        for (int rank = 0; rank < kLayerRanks; ++rank)
          mean[stage] += world.outcome(rank, g, round)->seconds[stage] / kLayerRanks;
      }
    }
  }
  return out;
}

}  // namespace weft::bench
