// Goal: entries of several parts (one for each KV head) lie where the rule puts them, each rank reads exactly
// its parts, results do not depend on the grouping, and what crosses equals the cost arithmetic.
// Method: make_views, store_entries and attend of every rank on real pools, without a model around them; the
// sequence goes in two chunks that begin and end inside blocks, then a decode row. Nobody writes, so nobody
// may read, pages outside the rule: they hold NaN.
#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <map>
#include <memory>

#include "kernels/attention.h"
#include "kernels/parallel.h"
#include "kv/cost.h"
#include "proto/vocab/random.h"
#include "tests/worker/cost_plan.h"
#include "worker/comm/exchange.h"
#include "worker/model/attend.h"
#include "worker/model/cache_view.h"
#include "worker/model/selection.h"

namespace weft::worker {
namespace {

constexpr int64_t kBlockTokens = 8;
constexpr int64_t kTableBlocks = 10;
constexpr int64_t kLayers = 2;
constexpr int64_t kPositions = 62;

ModelConfig config_of(int64_t heads, int kv_heads) {
  ModelConfig config;
  config.heads = heads;
  config.kv_heads = kv_heads;
  config.hidden = 16;
  config.vocabulary = 32;
  config.latent = 8;
  config.rope = 4;
  config.scale = 0.3f;
  config.layers.assign(kLayers, {});
  return config;
}

// Pseudo-random floats that depend on what they belong to alone.
std::vector<float> values(uint64_t what, int64_t layer, int64_t position, int64_t index, int64_t count) {
  SplitMix64 random(
      mix64(what + 16 * mix64(static_cast<uint64_t>((layer * 1000 + position) * 1000 + index))));
  std::vector<float> out;
  for (int64_t i = 0; i < count; ++i) out.push_back(static_cast<float>(random.below(2001)) / 1000.0f - 1.0f);
  return out;
}

kv::Mapping memory(size_t bytes) {
  const kv::Descriptor fd = kv::create_memory("test", bytes).value();
  return kv::Mapping::map(fd.get(), bytes).value();
}

// Results by (layer, position, head): [latent], shards merged.
using Results = std::map<std::array<int64_t, 3>, std::vector<float>>;

class World {
 public:
  World(const ModelConfig& config, int ranks) : config_(config), ranks_(ranks) {
    geometry_ = config.cache_geometry(DType::kF32, kBlockTokens);
    const kv::ControlLimits limits{ranks, kBlockTokens, geometry_.parts(), 1, kTableBlocks, 0, 0, 1, 64, 64};
    control_ = std::make_unique<kv::ControlArena>(
        kv::ControlArena::format(memory(kv::control_arena_bytes(limits)), limits).value());
    const size_t mailbox = mailbox_bytes(64);
    std::vector<std::byte*> mailboxes;
    for (int rank = 0; rank < ranks; ++rank)
      mailboxes.push_back(memory_.emplace_back(memory(mailbox)).data());
    const kv::PoolPages pages{kTableBlocks * geometry_.parts(), 0};
    std::vector<kv::PagePool> pools;
    for (int rank = 0; rank < ranks; ++rank) {
      const size_t bytes = kv::pool_bytes(geometry_, pages);
      std::memset(memory_.emplace_back(memory(bytes)).data(), 0xff, bytes);
      pools.emplace_back(memory_.back().data(), geometry_, pages);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      exchanges_.push_back(std::make_unique<Exchange>(*control_, mailboxes, mailbox, rank));
      RunnerSetup setup;
      setup.config = &config_;
      setup.weights = &weights_;
      setup.block_tokens = kBlockTokens;
      setup.rank = rank;
      setup.control = control_.get();
      setup.pools = pools;
      setup.exchange = exchanges_.back().get();
      setup.parallel = &kernels::serial();
      states_.push_back(std::make_unique<StepState>(std::move(setup)));
    }
  }

  void place(const kv::Residency& residency, int origin) {
    std::vector<PageId> pages;
    for (int64_t block = 0; block < kTableBlocks; ++block) {
      for (int part = 0; part < geometry_.parts(); ++part) {
        const RankMask holders = kv::part_holders(geometry_, residency, block, part, origin, ranks_);
        const PageId page{static_cast<uint32_t>(block * geometry_.parts() + part)};
        for (int rank = 0; rank < ranks_; ++rank) pages.push_back(holds(holders, rank) ? page : kNoPage);
      }
    }
    control_->write_table(TableId{0}, 0, pages);
    control_->set_table_version(TableId{0}, 1);
  }

  // Stores, then attends, on all ranks; adds to `results`. Bytes of entries that crossed in one layer, by
  // rank.
  std::vector<int64_t> run(const kv::CostSpan& span, Results& results) {
    const wire::StepPlan plan = test::plan_of(span, 1, [](int64_t) { return 0u; });
    for (auto& state : states_) {
      state->layout = StepLayout::make(plan, state->config.index_topk, ranks_).value();
      state->crossed.assign(1, {});
      Selection(*state).reset();
      const Result<void> views = make_views(*state, plan);
      EXPECT_TRUE(views.has_value()) << views.error().message;
    }
    for (int64_t layer = 0; layer < kLayers; ++layer) {
      for (auto& state : states_) store(*state, layer);
      partials_.clear();
      for (auto& state : states_) attend_rank(*state, layer);
      merge(span, layer, results);
    }
    std::vector<int64_t> crossed;
    for (auto& state : states_) crossed.push_back(state->crossed[0][kv::CrossKind::kEntries] / kLayers);
    return crossed;
  }

 private:
  void store(StepState& state, int64_t layer) {
    const kv::Range parts = state.parts_of(state.layout.spans()[0]);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
      std::vector<float> rows;
      for (const HomeRow& row : state.home()) {
        const auto entry = values(1, layer, row.position, part, config_.entry_width());
        rows.insert(rows.end(), entry.begin(), entry.end());
        rows.push_back(0);  // rows may lie apart
      }
      store_entries(state, layer,
                    {static_cast<int>(part), 0, state.home_count(), rows.data(), config_.entry_width() + 1});
    }
  }

  // Jobs by part: the heads of this rank's c-group (wide) or all heads (whole) that read it.
  void attend_rank(StepState& state, int64_t layer) {
    const SpanRoute& span = state.layout.spans()[0];
    const int64_t words = kernels::partial_words(config_.latent);
    const kv::Range heads =
        span.wide ? kv::group_heads(span.grouping, state.rank, config_.heads) : kv::Range{0, config_.heads};
    const int64_t group = config_.heads / config_.kv_heads;
    std::vector<std::vector<float>> queries;
    std::vector<AttendJob> jobs;
    for (int part = 0; part < config_.kv_heads; ++part) {
      const int64_t begin = std::max(heads.begin, part * group),
                    end = std::min(heads.end, (part + 1) * group);
      if (begin >= end) continue;
      for (int64_t home = 0; home < state.home_count(); ++home) {
        const int64_t position = state.home()[static_cast<size_t>(home)].position;
        std::vector<float>& query = queries.emplace_back();
        for (int64_t head = begin; head < end; ++head) {
          const auto one = values(2, layer, position, head, config_.entry_width());
          query.insert(query.end(), one.begin(), one.end());
        }
        std::vector<float>& out = partials_[{position, begin, state.rank}];
        out.resize(static_cast<size_t>((end - begin) * words));
        jobs.push_back({0, position, home, part, query.data(), end - begin, out.data(), nullptr});
      }
    }
    attend(state, layer, jobs);
  }

  // What the ranks of a c-group found of a head, by residue class, down the tree.
  void merge(const kv::CostSpan& span, int64_t layer, Results& results) {
    const int64_t words = kernels::partial_words(config_.latent);
    const int c = states_[0]->layout.spans()[0].wide ? span.grouping.c : 1;
    std::map<std::array<int64_t, 3>, std::vector<float>> classes;  // position, head, group
    for (const auto& [key, partials] : partials_) {
      const auto [position, first_head, rank] = key;
      const auto owned = static_cast<int64_t>(kv::owned_class(static_cast<int>(rank % c), span.origin, c));
      for (int64_t i = 0; i * words < std::ssize(partials); ++i) {
        auto& merged = classes[{position, first_head + i, rank / c}];
        merged.resize(static_cast<size_t>(c * words));
        std::memcpy(merged.data() + owned * words, partials.data() + i * words,
                    static_cast<size_t>(words) * sizeof(float));
      }
    }
    for (auto& [key, merged] : classes) {
      kernels::merge_partials(merged.data(), c, words, config_.latent);
      std::vector<float> out(static_cast<size_t>(config_.latent));
      kernels::finish_partial(merged.data(), config_.latent, out.data());
      const auto [place, added] = results.try_emplace({layer, key[0], key[1]}, out);
      // Groups that compute the same head agree.
      EXPECT_EQ(std::memcmp(place->second.data(), out.data(), out.size() * sizeof(float)), 0);
    }
  }

  const ModelConfig config_;
  const int ranks_;
  const ModelWeights weights_;
  kv::CacheGeometry geometry_;
  std::vector<kv::Mapping> memory_;
  std::unique_ptr<kv::ControlArena> control_;
  std::vector<std::unique_ptr<Exchange>> exchanges_;
  std::vector<std::unique_ptr<StepState>> states_;
  std::map<std::array<int64_t, 3>, std::vector<float>> partials_;  // by (position, first head, rank)
};

// Runs the whole sequence one way; every step's counters against the arithmetic.
Results run_sequence(const ModelConfig& config, int ranks, const kv::Grouping& grouping, kv::Split split) {
  World world(config, ranks);
  kv::CostModel model;
  model.geometry = config.cache_geometry(DType::kF32, kBlockTokens);
  model.layers = kLayers;
  model.rank_count = ranks;
  kv::CostSpan span;
  span.grouping = grouping;
  span.residency = kv::residency_of(grouping, kv::IndexKind::kCopied, ranks);
  span.origin = grouping.c - 1;
  world.place(span.residency, span.origin);
  Results results;
  for (const auto& [start, rows] : {std::pair<int64_t, int64_t>{0, 21}, {21, 40}, {61, 1}}) {
    span.start = start;
    span.rows = rows;
    span.split = rows == 1 ? kv::Split::kShared : split;
    const std::vector<int64_t> crossed = world.run(span, results);
    for (int rank = 0; rank < ranks; ++rank) {
      const kv::Cost cost = kv::layer_cost(model, span, rank, false);
      EXPECT_EQ(crossed[static_cast<size_t>(rank)], cost.crossed[kv::CrossKind::kEntries])
          << "rank " << rank << ", rows " << start << " + " << rows;
    }
  }
  return results;
}

void expect_equal(const Results& got, const Results& expected, bool bits) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [key, values] : expected) {
    const std::vector<float>& other = got.at(key);
    for (size_t i = 0; i < values.size(); ++i) {
      if (bits) {
        ASSERT_EQ(std::bit_cast<uint32_t>(other[i]), std::bit_cast<uint32_t>(values[i]));
      } else {
        ASSERT_NEAR(other[i], values[i], 1e-5);
      }
    }
  }
}

TEST(Parts, EveryGroupingComputesTheSameAndCountsWhatCrosses) {
  kernels::set_flush_to_zero();
  for (const auto& [heads, kv_heads] : {std::pair{4, 1}, {9, 3}, {8, 8}, {8, 2}, {3, 3}}) {
    const ModelConfig config = config_of(heads, kv_heads);
    const Results alone = run_sequence(config, 1, {0, 1, 1}, kv::Split::kShared);
    ASSERT_EQ(std::ssize(alone), kLayers * kPositions * heads);
    for (const int ranks : {2, 3, 4, 6, 8}) {
      for (const kv::DecodeWish& wish : kv::decode_wishes(ranks)) {
        const int width = wish.kind == kv::DecodeKind::kDp ? wish.width : ranks;
        const kv::Grouping grouping{ranks - width, width, wish.c};
        for (const kv::Split split : {kv::Split::kShared, kv::Split::kZigzag, kv::Split::kInterleave}) {
          SCOPED_TRACE(std::to_string(heads) + " heads, " + std::to_string(kv_heads) + " KV heads, " +
                       kv::grouping_name(grouping, ranks) + " on " + std::to_string(ranks) + ", " +
                       kv::split_name(split));
          const Results results = run_sequence(config, ranks, grouping, split);
          expect_equal(results, alone, kv::kShards % wish.c == 0);
          if (HasFailure()) return;
        }
      }
    }
  }
}

}  // namespace
}  // namespace weft::worker
