// Goal: the address maps of all exchange points agree on both sides, for random steps.
// Method: random plans (any mix of groupings and splits, ranks without rows included) on 1 … 8 ranks. Layouts
// are checked for overlap and against a naive model; then every rank, a thread each, fills its outboxes with
// values that name (point, from, to, row, word), passes real exchange points, and readers check every word
// they are owed.
#include "worker/comm/routes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "kernels/attention.h"
#include "kernels/indexer.h"
#include "proto/vocab/random.h"
#include "worker/step_runner.h"

namespace weft::worker {
namespace {

ModelConfig small_model(int64_t heads) {
  ModelConfig config;
  config.heads = heads;
  config.hidden = 24;
  config.vocabulary = 100;
  config.latent = 6;
  config.rope = 4;
  config.index_heads = 2;
  config.index_width = 8;
  config.index_topk = 5;
  config.layers = {{FeedForward::kDense, Indexer::kFull}, {FeedForward::kMoe, Indexer::kShared}};
  return config;
}

wire::StepPlan random_plan(SplitMix64& random, int ranks) {
  wire::StepPlan plan;
  plan.set_step(1 + random.below(100));
  const uint64_t spans = 1 + random.below(5);
  for (uint64_t i = 0; i < spans; ++i) {
    wire::Span* span = plan.add_spans();
    span->set_request(i + 1);
    span->set_start(random.below(40));
    const auto rows = static_cast<uint32_t>(random.below(3) == 0 ? 1 : 1 + random.below(20));
    span->set_rows(rows);
    for (uint32_t row = 0; row < rows; ++row) span->add_tokens(row);
    const bool owned = ranks > 1 && random.below(3) == 0;
    span->set_split(owned ? static_cast<uint32_t>(1 + random.below(kv::kSplits - 1)) : 0);
    span->set_origin(static_cast<uint32_t>(random.below(8)));
    std::vector<int> divisors;
    for (int c = 1; c <= ranks; ++c) {
      if (ranks % c == 0) divisors.push_back(c);
    }
    span->set_index_c(1);
    if (random.below(4) == 0) {
      span->set_group_base(static_cast<uint32_t>(random.below(static_cast<uint64_t>(ranks))));
      span->set_group_width(1);
      span->set_group_c(1);
    } else {
      const int c = divisors[random.below(divisors.size())];
      span->set_group_width(static_cast<uint32_t>(ranks));
      span->set_group_c(static_cast<uint32_t>(c));
      if (random.below(2) == 0)
        span->set_index_c(static_cast<uint32_t>(divisors[random.below(divisors.size())]));
    }
    span->set_sample_rows(static_cast<uint32_t>(random.below(std::min<uint64_t>(span->rows(), 4) + 1)));
    span->set_digest(random.below(4) == 0);
    span->set_sampler_rank(static_cast<uint32_t>(random.below(static_cast<uint64_t>(ranks))));
  }
  return plan;
}

TEST(Routes, EveryRowIsAtHomeWhereItShouldBe) {
  const uint64_t seed = 20240611;
  SplitMix64 random(seed);
  for (int round = 0; round < 2'000; ++round) {
    const int ranks = 1 + static_cast<int>(random.below(8));
    const wire::StepPlan plan = random_plan(random, ranks);
    const StepLayout layout = StepLayout::make(plan, ranks).value();
    std::vector<int> homes(static_cast<size_t>(layout.row_count()), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t last_global = -1;
      for (size_t i = 0; i < layout.home(rank).size(); ++i) {
        const HomeRow& row = layout.home(rank)[i];
        ++homes[static_cast<size_t>(row.global)];
        const SpanRoute& span = layout.spans()[static_cast<size_t>(row.span)];
        ASSERT_EQ(row.global, span.first_row + row.row);
        ASSERT_EQ(row.position, span.start + row.row);
        if (static_cast<int64_t>(i) == layout.wide_count()) last_global = -1;
        ASSERT_GT(row.global, last_global);
        last_global = row.global;
        ASSERT_EQ(span.wide, static_cast<int64_t>(i) < layout.wide_count());
      }
    }
    for (const SpanRoute& span : layout.spans()) {
      for (int64_t row = 0; row < span.rows; ++row) {
        ASSERT_EQ(homes[static_cast<size_t>(span.first_row + row)], span.wide ? ranks : 1) << "seed " << seed;
      }
    }
  }
}

float word(int point, int from, int to, int64_t row, int64_t i) {
  const uint64_t key =
      ((((static_cast<uint64_t>(point) * 8 + static_cast<uint64_t>(from)) * 8 + static_cast<uint64_t>(to))
        << 20) +
       static_cast<uint64_t>(row)) *
          4096 +
      static_cast<uint64_t>(i);
  return static_cast<float>(mix64(key) >> 41);
}

kv::Mapping memory(size_t bytes) {
  return kv::Mapping::map(kv::create_memory("test", bytes).value().get(), bytes).value();
}

// What one rank does in a step, data only.
void play(const ModelConfig& config, const StepLayout& layout, Exchange& exchange, int rank) {
  const int ranks = layout.rank_count();
  const int64_t words = kernels::partial_words(config.latent);
  auto heads = [&](int r) { return kv::owned_heads(r, ranks, config.heads).size(); };
  auto nodes = [&](int r) { return std::ssize(kv::tree_nodes(kv::owned_segments(r, ranks))); };
  auto out = [&] { return reinterpret_cast<float*>(exchange.outbox().data()); };
  auto in = [&](int from) { return reinterpret_cast<const float*>(exchange.inbox(from).data()); };

  if (layout.passes_entries(Indexer::kFull)) {
    const EntriesOutbox at = entries_outbox(layout, config, DType::kF32, rank);
    ASSERT_LE(at.bytes, exchange.outbox().size());
    const int64_t row_words = heads(rank) * config.entry_width();
    for (int64_t row = 0; row < layout.dcp_count(); ++row) {
      for (int64_t i = 0; i < row_words; ++i) out()[row * row_words + i] = word(0, rank, 0, row, i);
    }
    auto* counts = reinterpret_cast<int32_t*>(exchange.outbox().data() + at.counts);
    auto* candidates = reinterpret_cast<kernels::Candidate*>(exchange.outbox().data() + at.candidates);
    for (int64_t row = 0; row < layout.split_count(); ++row) {
      counts[row] = static_cast<int32_t>((row + rank) % (config.index_topk + 1));
      for (int32_t i = 0; i < counts[row]; ++i) {
        candidates[row * config.index_topk + i] = {word(1, rank, 0, row, i),
                                                   static_cast<int32_t>(row * 10 + i)};
      }
    }
    ASSERT_TRUE(exchange.pass(ExchangePoint::kEntries, 0));
    for (int from = 0; from < ranks; ++from) {
      const int64_t from_words = heads(from) * config.entry_width();
      for (int64_t row = 0; row < layout.dcp_count(); ++row) {
        for (int64_t i = 0; i < from_words; ++i)
          ASSERT_EQ(in(from)[row * from_words + i], word(0, from, 0, row, i));
      }
      const EntriesOutbox there = entries_outbox(layout, config, DType::kF32, from);
      const auto* from_counts = reinterpret_cast<const int32_t*>(exchange.inbox(from).data() + there.counts);
      const auto* from_candidates =
          reinterpret_cast<const kernels::Candidate*>(exchange.inbox(from).data() + there.candidates);
      for (int64_t row = 0; row < layout.split_count(); ++row) {
        ASSERT_EQ(from_counts[row], (row + from) % (config.index_topk + 1));
        for (int32_t i = 0; i < from_counts[row]; ++i) {
          ASSERT_EQ(from_candidates[row * config.index_topk + i].score, word(1, from, 0, row, i));
        }
      }
    }
  }

  if (layout.passes_partials()) {
    auto section = [&](const SpanRoute& span, int from, int to, auto&& body) {
      const auto base = static_cast<int64_t>(partials_offset(layout, config, span, from, to));
      for (int64_t row = 0; row < span.rows; ++row) {
        for (int64_t i = 0; i < heads(to) * words; ++i) body(base + row * heads(to) * words + i, row, i);
      }
    };
    for (const SpanRoute& span : layout.spans()) {
      if (!span.dcp()) continue;
      const int first = group_first(rank, span.grouping.c);
      for (int to = first; to < first + span.grouping.c; ++to) {
        if (to == rank) continue;
        section(span, rank, to, [&](int64_t at, int64_t row, int64_t i) {
          out()[at] = word(2, rank, to, span.first_row + row, i);
        });
      }
    }
    ASSERT_TRUE(exchange.pass(ExchangePoint::kPartials, 0));
    for (const SpanRoute& span : layout.spans()) {
      if (!span.dcp()) continue;
      const int first = group_first(rank, span.grouping.c);
      for (int from = first; from < first + span.grouping.c; ++from) {
        if (from == rank) continue;
        section(span, from, rank, [&](int64_t at, int64_t row, int64_t i) {
          ASSERT_EQ(in(from)[at], word(2, from, rank, span.first_row + row, i));
        });
      }
    }
  }

  if (!layout.passes_sums()) return;
  const int64_t d = config.hidden, wide = layout.wide_count();
  for (int64_t node = 0; node < nodes(rank); ++node) {
    for (int64_t row = 0; row < wide; ++row) {
      for (int64_t i = 0; i < d; ++i)
        out()[(node * wide + row) * d + i] = word(3, rank, static_cast<int>(node), row, i);
    }
  }
  float* whole = out() + nodes(rank) * wide * d;
  for (int64_t j = wide; j < std::ssize(layout.home(rank)); ++j) {
    const int64_t global = layout.home(rank)[static_cast<size_t>(j)].global;
    for (int64_t i = 0; i < d; ++i) whole[(j - wide) * d + i] = word(4, 0, 0, global, i);
  }
  ASSERT_TRUE(exchange.pass(ExchangePoint::kAttentionSums, 0));
  std::vector<int> seen(static_cast<size_t>(layout.row_count()), 0);
  for (int64_t row = 0; row < wide; ++row)
    seen[static_cast<size_t>(layout.home(rank)[static_cast<size_t>(row)].global)] = 1;
  for (int from = 0; from < ranks; ++from) {
    for (int64_t node = 0; node < nodes(from); ++node) {
      for (int64_t row = 0; row < wide; ++row) {
        for (int64_t i = 0; i < d; ++i) {
          ASSERT_EQ(in(from)[(node * wide + row) * d + i], word(3, from, static_cast<int>(node), row, i));
        }
      }
    }
    const float* rows = in(from) + nodes(from) * wide * d;
    for (int64_t j = wide; j < std::ssize(layout.home(from)); ++j) {
      const int64_t global = layout.home(from)[static_cast<size_t>(j)].global;
      ++seen[static_cast<size_t>(global)];
      for (int64_t i = 0; i < d; ++i) ASSERT_EQ(rows[(j - wide) * d + i], word(4, 0, 0, global, i));
    }
  }
  // Every rank now has the normed row of every row of the step, once.
  ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
}

TEST(Routes, DataArrivesWhereTheOtherSideLooks) {
  const uint64_t seed = 7;
  SplitMix64 random(seed);
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const ModelConfig config = small_model(ranks % 2 == 0 ? 8 : 3);
    const size_t mailbox = mailbox_bytes(outbox_bytes(config, DType::kF32, ranks, 128));
    kv::ControlLimits limits{ranks, 8, 2, 2, 16, 128, 4096, 4096};
    kv::ControlArena control =
        kv::ControlArena::format(memory(kv::control_arena_bytes(limits)), limits).value();
    std::vector<kv::Mapping> mappings;
    std::vector<std::byte*> mailboxes;
    for (int rank = 0; rank < ranks; ++rank)
      mailboxes.push_back(mappings.emplace_back(memory(mailbox)).data());
    std::vector<std::unique_ptr<Exchange>> exchanges;
    for (int rank = 0; rank < ranks; ++rank) {
      exchanges.push_back(std::make_unique<Exchange>(control, mailboxes, mailbox, rank));
      exchanges.back()->begin_epoch(Epoch{1});
    }
    for (int round = 0; round < 40; ++round) {
      const wire::StepPlan plan = random_plan(random, ranks);
      const StepLayout layout = StepLayout::make(plan, ranks).value();
      std::vector<std::thread> threads;
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back(
            [&, rank] { play(config, layout, *exchanges[static_cast<size_t>(rank)], rank); });
      }
      for (std::thread& thread : threads) thread.join();
      ASSERT_FALSE(HasFatalFailure()) << "seed " << seed << ", ranks " << ranks << ", round " << round << "\n"
                                      << plan.DebugString();
    }
  }
}

TEST(Routes, RefusesImpossiblePlans) {
  SplitMix64 random(3);
  auto refused = [](const wire::StepPlan& plan) {
    const auto layout = StepLayout::make(plan, 4);
    return !layout.has_value() && layout.error().code == ErrorCode::kInvalidArgument;
  };
  const auto broken = [&](auto&& change) {
    wire::StepPlan plan = random_plan(random, 4);
    change(*plan.mutable_spans(0));
    return refused(plan);
  };
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_rows(span.rows() + 1); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_rows(0); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_split(kv::kSplits); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_width(2); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_c(3); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_base(4); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_index_c(3); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.clear_tokens(); }));
}

}  // namespace
}  // namespace weft::worker
