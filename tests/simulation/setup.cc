#include "tests/simulation/setup.h"

#include <algorithm>
#include <numeric>

namespace weft::simulation {
namespace {

using controlplane::Limits;

// None, one that holds hardly one context, or one for many.
void draw_host_pool(Draw& draw, Limits& limits) {
  const int64_t whole = limits.table_blocks();
  const int64_t blocks = draw.one_of(std::array{int64_t{0}, 1 + draw.below(whole), whole + draw.below(whole),
                                                whole * 2 + draw.below(whole * 8)});
  for (const kv::Stream stream : kv::kAllStreams) {
    const int64_t parts = limits.geometry.stream(stream).used_parts();
    limits.host_pages[static_cast<size_t>(stream)] =
        blocks * parts + (blocks > 0 && parts > 1 ? draw.below(parts) : 0);
  }
  limits.host_write = draw.chance(50) ? controlplane::HostWrite::kBack : controlplane::HostWrite::kThrough;
  const int64_t block_bytes = limits.geometry.block_tokens * limits.geometry.token_bytes();
  limits.host_plan_bytes = draw.one_of(std::array{int64_t{1}, 2 * block_bytes, limits.host_plan_bytes});
}

// Of a model whose rows select what they read. Often index keys have room for contexts whose entries do not
// fit the devices, and the host has it.
void draw_host_contexts(Draw& draw, Limits& limits) {
  if (!limits.uses(kv::Stream::kIndexKeys) || draw.chance(25)) return;
  limits.index_topk = 1 + draw.below(30);
  limits.hot_tokens = draw.one_of(std::array{int64_t{0}, 1 + draw.below(16), 1 + draw.below(80)});
  limits.host_window = 1 + draw.below(draw.chance(50) ? 4 : 16);
  const int64_t whole = limits.table_blocks();
  if (draw.chance(60)) {
    const int64_t parts = limits.geometry.stream(kv::Stream::kEntries).used_parts();
    for (auto& pages : limits.pool_pages)
      pages = {(2 + whole / 4 + draw.below(whole / 2)) * parts, whole + draw.below(whole * 3)};
  }
  if (draw.chance(60)) {
    for (const kv::Stream stream : kv::kAllStreams) {
      int64_t& pages = limits.host_pages[static_cast<size_t>(stream)];
      pages = std::max(pages, (whole + draw.below(whole * 3)) * limits.geometry.stream(stream).used_parts());
    }
  }
}

Limits draw_limits(Draw& draw) {
  Limits limits;
  limits.rank_count = draw.one_of(std::array{1, 2, 2, 3, 4, 4, 6, 8});
  limits.geometry.block_tokens = draw.chance(50) ? 4 : 8;
  const int parts = draw.one_of(std::array{1, 1, 2, 3, 8});
  limits.geometry.streams[0] = {3, 16, parts};
  limits.geometry.heads = parts * (1 + draw.below(4));
  limits.geometry.streams[1] = draw.chance(20) ? kv::StreamGeometry{} : kv::StreamGeometry{1, 8};
  limits.max_context = 40 + draw.below(80);
  const int64_t whole = limits.table_blocks();
  // In tight pools hardly two requests fit.
  const bool tight = draw.chance(50);
  for (int r = 0; r < limits.rank_count; ++r) {
    const int64_t pages = tight ? whole * 2 / 3 + 1 + draw.below(whole) : whole * 3 + draw.below(whole * 4);
    limits.pool_pages.push_back({pages * parts, pages - draw.below(2)});
  }
  limits.max_running = 1 + draw.below(8);
  limits.max_waiting = 1 + draw.below(6);
  limits.max_passes = draw.below(4);
  limits.table_count = limits.max_running + 1 + draw.below(4);
  limits.max_samples = limits.max_running + draw.below(3);
  limits.max_step_rows = limits.max_running + draw.below(60);
  limits.max_chunk_rows = draw.chance(50) ? 0 : 1 + draw.below(40);
  limits.draft_layers = draw.below(3);
  limits.kept_contexts = 1 + draw.below(20);
  limits.kept_tokens = 1 + draw.below(draw.chance(50) ? 300 : 2000);
  limits.plans_in_flight = draw.chance(85) ? 2 : 1;
  limits.copy_plan_bytes = draw.one_of(std::array{0, 1, 500, 4000});
  limits.on_pressure = static_cast<controlplane::OnPressure>(draw.one_of(std::array{0, 1, 2, 2}));
  limits.calm_plans = 1 + draw.below(30);
  limits.eviction = draw.chance(50) ? controlplane::Eviction::kReuse : controlplane::Eviction::kLru;
  draw_host_pool(draw, limits);
  draw_host_contexts(draw, limits);
  return limits;
}

// In the order of ActKind.
constexpr std::array<int64_t, kActKinds> kWeights = {50,  4,   14,  40,  14,  4,  4, 4, 3,      // requests
                                                     220, 200, 220, 240, 60,  40, 8, 4, 6, 24,  // daemon
                                                     300, 60,  100, 100, 100, 3,  6,            // workers
                                                     2,   2,   1,   1};  // their faults

constexpr bool is_varied(ActKind kind) {
  return (kind <= ActKind::kDeadline && kind != ActKind::kResume && kind != ActKind::kUnpin) ||
         kind == ActKind::kReorder || kind == ActKind::kDuplicate || kind == ActKind::kLate ||
         kind == ActKind::kDrain || kind >= ActKind::kKill;
}

}  // namespace

Setup setup_of(uint64_t seed) {
  Draw draw(mix64(seed));
  Setup setup;
  setup.seed = seed;
  setup.limits = draw_limits(draw);
  using namespace std::chrono_literals;
  setup.tick = draw.one_of(std::array<Duration, 4>{200us, 1ms, 5ms, 20ms});
  setup.supervisor = {3000 * setup.tick, 400 * setup.tick, 400 * setup.tick,
                      10 * setup.tick,   200 * setup.tick, 2000 * setup.tick};
  setup.hang_deadline = draw.one_of(std::array{50, 150, 400}) * setup.tick;
  for (int kind = 0; kind < kActKinds; ++kind) {
    int64_t& weight = setup.weights[static_cast<size_t>(kind)];
    weight = kWeights[static_cast<size_t>(kind)] * 4;
    if (is_varied(static_cast<ActKind>(kind)))
      weight = weight * draw.one_of(std::array{0, 1, 2, 4, 4, 8, 12}) / 4;
  }
  auto& arrivals = setup.weights[static_cast<size_t>(ActKind::kArrive)];
  arrivals = std::max<int64_t>(arrivals, 60);
  // Some seeds look at every phase, some run through plans quickly.
  if (draw.chance(50)) setup.weights[static_cast<size_t>(ActKind::kRush)] *= 8;
  setup.short_answers = draw.below(100);
  setup.turns = draw.one_of(std::array{0, 20, 50});
  setup.on_host = setup.limits.index_topk > 0 && setup.limits.host_pages[0] > 0
                      ? draw.one_of(std::array{5, 20, 50, 90})
                      : draw.below(5);
  setup.on_device = draw.one_of(std::array{2, 8});
  setup.poison = draw.below(4);
  // In some seeds the control plane hears late of what is done, and plans that kill workers pile up behind
  // it.
  if (draw.chance(8)) {
    setup.poison = 25;
    for (const ActKind kind : {ActKind::kDeliver, ActKind::kReorder})
      setup.weights[static_cast<size_t>(kind)] /= 20;
  }
  setup.nan = draw.below(6);
  setup.with_deadline = draw.one_of(std::array{0, 5, 30});
  setup.max_live =
      2 + draw.below(setup.limits.max_running + setup.limits.max_waiting + (draw.chance(10) ? 4 : -1));
  return setup;
}

Script script_of(const Setup& setup, int64_t events) {
  Draw draw(mix64(setup.seed) ^ 0xac75);
  const int64_t sum = std::accumulate(setup.weights.begin(), setup.weights.end(), int64_t{0});
  // Many an act meets a state in which it can do nothing.
  const int64_t acts = events * 25;
  Script script{setup.seed, events, {}};
  script.acts.reserve(static_cast<size_t>(acts));
  for (int64_t i = 0; i < acts; ++i) {
    int64_t at = draw.below(sum);
    size_t kind = 0;
    while (at >= setup.weights[kind]) at -= setup.weights[kind++];
    script.acts.push_back({static_cast<ActKind>(kind), draw.random.next()});
  }
  return script;
}

}  // namespace weft::simulation
