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
#include "kernels/split_top_k.h"
#include "proto/vocab/random.h"
#include "worker/step_runner.h"

namespace weft::worker {
namespace {

constexpr int64_t kTopK = 5;

ModelConfig small_model(int64_t heads) {
  ModelConfig config;
  config.heads = heads;
  config.hidden = 24;
  config.vocabulary = 100;
  config.latent = 6;
  config.rope = 4;
  config.index_heads = 2;
  config.index_width = 8;
  config.index_topk = kTopK;
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
    span->set_pass_query(owned && random.below(2) == 0);
    span->set_origin(static_cast<uint32_t>(random.below(8)));
    std::vector<int> divisors;
    for (int c = 1; c <= ranks; ++c) {
      if (ranks % c == 0) divisors.push_back(c);
    }
    span->set_index_c(1);
    // Half of the groups span all ranks; c and the parts of the index are any divisors of the width.
    const auto any_divisor = [&](int of) {
      for (;;) {
        const int d = divisors[random.below(divisors.size())];
        if (of % d == 0) return d;
      }
    };
    const int width = random.below(2) == 0 ? ranks : any_divisor(ranks);
    const int c = any_divisor(width);
    span->set_group_base(
        static_cast<uint32_t>(width * static_cast<int>(random.below(static_cast<uint64_t>(ranks / width)))));
    span->set_group_width(static_cast<uint32_t>(width));
    span->set_group_c(static_cast<uint32_t>(c));
    span->set_replicate_query(random.below(3) == 0);
    span->set_tree_partials((c & (c - 1)) == 0 && random.below(2) == 0);
    if (random.below(2) == 0) span->set_index_c(static_cast<uint32_t>(any_divisor(width)));
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
    const StepLayout layout = StepLayout::make(plan, kTopK, ranks).value();
    std::vector<int> homes(static_cast<size_t>(layout.row_count()), 0);
    for (int rank = 0; rank < ranks; ++rank) {
      int64_t last_global = -1;
      for (size_t i = 0; i < layout.home(rank).size(); ++i) {
        const HomeRow& row = layout.home(rank)[i];
        ++homes[static_cast<size_t>(row.global)];
        const SpanRoute& span = layout.spans()[static_cast<size_t>(row.span)];
        ASSERT_EQ(row.global, span.first_row + row.row);
        ASSERT_EQ(row.position, span.start + row.row);
        // Ascending within each group of wide rows, and among whole rows.
        if (static_cast<int64_t>(i) == layout.wide_count()) last_global = -1;
        for (const WideGroup& group : layout.wide_groups()) {
          if (static_cast<int64_t>(i) == group.first) last_global = -1;
        }
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

// One rank of a step, data only: each phase fills its outbox, passes, and checks every word that it is owed.
struct Player {
  const ModelConfig& config;
  const StepLayout& layout;
  Exchange& exchange;
  const int rank;
  const int ranks = layout.rank_count();
  const int64_t d = config.hidden;

  int64_t heads(const SpanRoute& span, int r) const {
    return kv::rank_heads(span.grouping, r, config.heads).size();
  }
  int64_t nodes(const WideGroup& group, int r) const {
    if (!group.ranks.contains(r)) return 0;
    return std::ssize(kv::tree_nodes(kv::owned_segments(r - group.ranks.base, group.ranks.width)));
  }
  float* out() const { return reinterpret_cast<float*>(exchange.outbox().data()); }
  const float* in(int from) const { return reinterpret_cast<const float*>(exchange.inbox(from).data()); }

  template <typename Body>  // body(offset in floats, row, word)
  void queries(const SpanRoute& span, int from, const Body& body) const {
    if (!span.gathers_query() && !span.pass_query) return;
    const size_t at =
        queries_offsets(layout, config, DType::kF32, from)[static_cast<size_t>(span.index)] / sizeof(float);
    const int64_t words = (span.pass_query ? config.heads : heads(span, from)) * config.entry_width();
    const int64_t rows = span.pass_query ? layout.owned_rows(span, from).size() : span.rows;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t i = 0; i < words; ++i) body(static_cast<int64_t>(at) + row * words + i, row, i);
    }
  }

  void entries() const {
    if (!layout.passes_entries(Indexer::kFull)) return;
    const EntriesOutbox at = entries_outbox(layout, config, DType::kF32, rank);
    ASSERT_LE(at.bytes, exchange.outbox().size());
    for (const SpanRoute& span : layout.spans()) {
      queries(span, rank, [&](int64_t place, int64_t row, int64_t i) {
        ASSERT_LT(static_cast<size_t>(place) * sizeof(float), at.heads);
        out()[place] = word(0, rank, 0, span.first_row + row, i);
      });
    }
    std::byte* outbox = exchange.outbox().data();
    auto* offers = reinterpret_cast<kernels::OfferHead*>(outbox + at.heads);
    auto* scores = reinterpret_cast<float*>(outbox + at.scores);
    auto* positions = reinterpret_cast<int32_t*>(outbox + at.positions);
    for (int64_t row = 0; row < layout.split_count(); ++row) {
      offers[row].count = static_cast<int32_t>((row + rank) % (config.index_topk + 1));
      for (int32_t i = 0; i < offers[row].count; ++i) {
        scores[row * config.index_topk + i] = word(1, rank, 0, row, i);
        positions[row * config.index_topk + i] = static_cast<int32_t>(row * 10 + i);
      }
    }
    ASSERT_TRUE(exchange.pass(ExchangePoint::kEntries, 0));
    for (int from = 0; from < ranks; ++from) {
      for (const SpanRoute& span : layout.spans()) {
        queries(span, from, [&](int64_t place, int64_t row, int64_t i) {
          ASSERT_EQ(in(from)[place], word(0, from, 0, span.first_row + row, i));
        });
      }
      const EntriesOutbox there = entries_outbox(layout, config, DType::kF32, from);
      const std::byte* inbox = exchange.inbox(from).data();
      const auto* from_offers = reinterpret_cast<const kernels::OfferHead*>(inbox + there.heads);
      const auto* from_scores = reinterpret_cast<const float*>(inbox + there.scores);
      const auto* from_positions = reinterpret_cast<const int32_t*>(inbox + there.positions);
      for (int64_t row = 0; row < layout.split_count(); ++row) {
        ASSERT_EQ(from_offers[row].count, (row + from) % (config.index_topk + 1));
        for (int32_t i = 0; i < from_offers[row].count; ++i) {
          ASSERT_EQ(from_scores[row * config.index_topk + i], word(1, from, 0, row, i));
          ASSERT_EQ(from_positions[row * config.index_topk + i], row * 10 + i);
        }
      }
    }
  }

  template <typename Body>
  void slice(const SpanRoute& span, int from, int member, int round, const Body& body) const {
    const auto at = static_cast<int64_t>(PartialsMap(layout, config, from, round).offset(span, member));
    const int64_t words = heads(span, member) * kernels::partial_words(config.value_width());
    for (int64_t row = 0; row < span.rows; ++row) {
      for (int64_t i = 0; i < words; ++i) body(at + row * words + i, row, i);
    }
  }
  // Calls body(span, from, member) for all slices that `from` sends in a round.
  template <typename Body>
  void slices(int from, int round, const Body& body) const {
    for (const SpanRoute& span : layout.spans()) {
      if (!span.dcp() || !span.grouping.contains(from)) continue;
      const int first = group_first(from, span.grouping.c);
      for (int member = first; member < first + span.grouping.c; ++member) {
        if (sends_partials(span, from, member, round)) body(span, member);
      }
    }
  }

  // body(offset, owner, row, word) for what a reader sends to other owners of spans that pass queries.
  template <typename Body>
  void passed(int reader, const Body& body) const {
    const int64_t words = config.group_heads() * kernels::partial_words(config.value_width());
    for (const PassedPartials& sent : passed_partials(layout, config, reader)) {
      const SpanRoute& span = layout.spans()[static_cast<size_t>(sent.span)];
      for (int64_t i = 0; i < layout.owned_rows(span, sent.owner).size() * words; ++i) {
        body(static_cast<int64_t>(sent.offset) + i,
             word(5, reader, sent.owner, span.index * 8 + sent.part, i));
      }
    }
  }

  void partials() const {
    for (int round = 0; round < layout.partial_rounds(); ++round) {
      slices(rank, round, [&](const SpanRoute& span, int member) {
        slice(span, rank, member, round, [&](int64_t at, int64_t row, int64_t i) {
          ASSERT_LT(static_cast<size_t>(at) * sizeof(float), exchange.outbox().size());
          out()[at] = word(2, rank, member, span.first_row + row, i);
        });
      });
      if (round == 0) {
        passed(rank, [&](int64_t at, float value) {
          ASSERT_LT(static_cast<size_t>(at) * sizeof(float), exchange.outbox().size());
          out()[at] = value;
        });
      }
      ASSERT_TRUE(exchange.pass(ExchangePoint::kPartials, 0));
      for (int from = 0; from < ranks; ++from) {
        if (round == 0) passed(from, [&](int64_t at, float value) { ASSERT_EQ(in(from)[at], value); });
        slices(from, round, [&](const SpanRoute& span, int member) {
          slice(span, from, member, round, [&](int64_t at, int64_t row, int64_t i) {
            ASSERT_EQ(in(from)[at], word(2, from, member, span.first_row + row, i));
          });
        });
      }
    }
  }

  void attention_sums() const {
    if (!layout.passes_sums()) return;
    const auto& groups = layout.wide_groups();
    const auto sums = [&](int from, auto&& body) {
      for (size_t g = 0; g < groups.size(); ++g) {
        const int64_t begin = attention_sums_row(layout, from, g) * d;
        for (int64_t at = 0; at < nodes(groups[g], from) * groups[g].rows * d; ++at) {
          body(begin + at, word(3, from, static_cast<int>(g), at / 4096, at % 4096));
        }
      }
    };
    const auto whole_rows = [&](int from, auto&& body) {
      const int64_t begin = attention_sums_row(layout, from, groups.size()) * d;
      for (int64_t j = layout.wide_count(); j < std::ssize(layout.home(from)); ++j) {
        const int64_t global = layout.home(from)[static_cast<size_t>(j)].global;
        for (int64_t i = 0; i < d; ++i) {
          body(begin + (j - layout.wide_count()) * d + i, word(4, 0, 0, global, i), global);
        }
      }
    };
    sums(rank, [&](int64_t at, float value) { out()[at] = value; });
    whole_rows(rank, [&](int64_t at, float value, int64_t) { out()[at] = value; });
    ASSERT_TRUE(exchange.pass(ExchangePoint::kAttentionSums, 0));
    std::vector<int64_t> seen(static_cast<size_t>(layout.row_count()), 0);
    for (int64_t row = 0; row < layout.wide_count(); ++row)
      seen[static_cast<size_t>(layout.home(rank)[static_cast<size_t>(row)].global)] = d;
    for (int from = 0; from < ranks; ++from) {
      sums(from, [&](int64_t at, float value) { ASSERT_EQ(in(from)[at], value); });
      whole_rows(from, [&](int64_t at, float value, int64_t global) {
        ++seen[static_cast<size_t>(global)];
        ASSERT_EQ(in(from)[at], value);
      });
    }
    // Every rank now has the normed row of every row of the step, once.
    ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [&](int64_t n) { return n == d; }));
  }

  void play() const {
    entries();
    partials();
    attention_sums();
  }
};

// Every (part, class) of an owned row is read by one holder: by the owner itself where it holds it.
TEST(Routes, EveryClassIsReadOnce) {
  SplitMix64 random(5);
  ModelConfig config = small_model(8);
  for (int round = 0; round < 500; ++round) {
    const int ranks = 1 + static_cast<int>(random.below(8));
    config.kv_heads = 1 << random.below(4);
    const StepLayout layout = StepLayout::make(random_plan(random, ranks), kTopK, ranks).value();
    for (const SpanRoute& span : layout.spans()) {
      const kv::Residency residency = kv::residency_of(span.grouping, kv::IndexKind::kCopied, ranks);
      for (int owner = 0; owner < ranks; ++owner) {
        for (int64_t block = 0; block < 16; ++block) {
          for (int part = 0; part < config.kv_heads; ++part) {
            const RankMask holders = kv::part_holders(config.cache_geometry(DType::kF32, 8), residency, block,
                                                      part, span.origin, ranks);
            RankMask readers = 0;
            for (int reader = 0; reader < ranks; ++reader) {
              const bool of_class = span.grouping.contains(reader) &&
                                    class_of(span, reader) == kv::residue_class(block, span.grouping.c);
              if (of_class && reads_for(span, config, ranks, reader, owner, part)) readers |= mask_of(reader);
            }
            ASSERT_EQ(rank_count_of(readers), 1);
            ASSERT_EQ(readers & ~holders, 0u);
            if (holds(holders, owner)) {
              ASSERT_EQ(readers, mask_of(owner));
            }
          }
        }
      }
    }
  }
}

// Each head of each row reaches its owner from every member of the c-group once, directly or merged on the
// way.
TEST(Routes, PartialsOfEveryClassReachTheOwnerOnce) {
  SplitMix64 random(99);
  for (int round = 0; round < 500; ++round) {
    const int ranks = 1 + static_cast<int>(random.below(8));
    const StepLayout layout = StepLayout::make(random_plan(random, ranks), kTopK, ranks).value();
    for (const SpanRoute& span : layout.spans()) {
      if (!span.dcp()) continue;
      const int first = group_first(span.grouping.base, span.grouping.c), c = span.grouping.c;
      for (int owner = first; owner < first + c; ++owner) {
        std::vector<std::vector<int>> has(static_cast<size_t>(ranks));  // whose partials a rank has merged
        for (int r = first; r < first + c; ++r) has[static_cast<size_t>(r)] = {r};
        for (int step = 0; step < layout.partial_rounds(); ++step) {
          const auto before = has;
          for (int from = first; from < first + c; ++from) {
            if (!sends_partials(span, from, owner, step)) continue;
            int to = owner;
            if (span.tree_partials) {
              to = first + kv::class_owner(class_of(span, from) ^ (c >> (step + 1)), span.origin, c);
            }
            auto& list = has[static_cast<size_t>(to)];
            list.insert(list.end(), before[static_cast<size_t>(from)].begin(),
                        before[static_cast<size_t>(from)].end());
          }
        }
        auto& got = has[static_cast<size_t>(owner)];
        std::sort(got.begin(), got.end());
        ASSERT_EQ(std::ssize(got), c);
        for (int i = 0; i < c; ++i) ASSERT_EQ(got[static_cast<size_t>(i)], first + i);
      }
    }
  }
}

TEST(Routes, DataArrivesWhereTheOtherSideLooks) {
  const uint64_t seed = 7;
  SplitMix64 random(seed);
  for (int ranks = 1; ranks <= 8; ++ranks) {
    const ModelConfig config = small_model(ranks % 2 == 0 ? 8 : 3);
    const size_t mailbox = mailbox_bytes(outbox_bytes(config, DType::kF32, ranks, 128));
    kv::ControlLimits limits{ranks, 8, 2, 2, 16, 0, 0, 128, 4096, 4096};
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
      const StepLayout layout = StepLayout::make(plan, kTopK, ranks).value();
      std::vector<std::thread> threads;
      for (int rank = 0; rank < ranks; ++rank) {
        threads.emplace_back([&, rank] {
          Player{config, layout, *exchanges[static_cast<size_t>(rank)], rank}.play();
        });
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
    const auto layout = StepLayout::make(plan, kTopK, 4);
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
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_width(3); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_c(3); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_group_base(4); }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.set_index_c(3); }));
  EXPECT_TRUE(broken([](wire::Span& span) {
    span.set_group_base(1);
    span.set_group_width(2);
    span.set_group_c(1);
    span.set_index_c(1);
  }));
  EXPECT_TRUE(broken([](wire::Span& span) { span.clear_tokens(); }));
}

}  // namespace
}  // namespace weft::worker
