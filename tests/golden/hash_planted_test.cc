// Goal: every mistake that a cache, its tables, its transfers or its merges can make changes the hash model's
// tokens, at once and from then on. Method: one request over four runners; before one of its decode steps a
// mistake is planted in a table, in a page, or (by functions wrapped at link time, see CMakeLists.txt) in a
// merge; the tokens are compared with the oracle's.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>

#include "kernels/attention.h"
#include "tests/support/hash_folder.h"
#include "tests/support/local_engine.h"
#include "worker/model/hash_math.h"

namespace weft::test {
namespace {

enum class Merge { kSound, kLost, kDoubled };
std::atomic<Merge> merge{Merge::kSound};
constexpr int kClasses = 4;  // of the request's partials; merges within a rank are of eight

}  // namespace
}  // namespace weft::test

using weft::test::Merge;
namespace kernels = weft::kernels;

// NOLINTBEGIN: names are the linker's
extern "C" {

// The partial of the last residue class never arrives, or arrives twice.
void __real__ZN4weft7kernels14merge_partialsEPflll(float* partials, int64_t count, int64_t stride,
                                                   int64_t width);
void __wrap__ZN4weft7kernels14merge_partialsEPflll(float* partials, int64_t count, int64_t stride,
                                                   int64_t width) {
  float* last = partials + (count - 1) * stride;
  const bool planted = count == weft::test::kClasses;
  const std::vector<float> again(last, last + kernels::partial_words(width));
  if (planted && weft::test::merge == Merge::kLost) {
    std::fill(last, last + width + 1, 0.0f);
    std::memcpy(last + width + 1, &kernels::kEmptyPartial, sizeof kernels::kEmptyPartial);
  }
  if (planted && weft::test::merge == Merge::kDoubled) kernels::merge_partial(last, again.data(), width);
  __real__ZN4weft7kernels14merge_partialsEPflll(partials, count, stride, width);
}

// The same between partners of a tree.
void __real__ZN4weft7kernels13merge_partialEPfPKfl(float* a, const float* b, int64_t width);
void __wrap__ZN4weft7kernels13merge_partialEPfPKfl(float* a, const float* b, int64_t width) {
  if (weft::test::merge == Merge::kLost) return;
  __real__ZN4weft7kernels13merge_partialEPfPKfl(a, b, width);
  if (weft::test::merge == Merge::kDoubled) __real__ZN4weft7kernels13merge_partialEPfPKfl(a, b, width);
}

}  // extern "C"
// NOLINTEND

namespace weft::test {
namespace {

using hash_checkpoint::Attention;

constexpr uint64_t kSeed = 77;
constexpr int64_t kPrompt = 150, kAnswer = 12, kBlock = 8;
constexpr int64_t kPlanted = kPrompt + 4;  // the position of the row before whose step it happens

struct Site {
  LocalEngine& engine;
  TableId table;

  // The page of a block's first part, and a rank that has it.
  std::pair<int, PageId> page(int64_t block) const {
    const auto pages = engine.workers().control().pages(table, block, 0);
    for (size_t rank = 0; rank < pages.size(); ++rank) {
      if (pages[rank] != kNoPage) return {static_cast<int>(rank), pages[rank]};
    }
    CHECK(false, "nobody holds block ", block);
  }
  // Of that page, in the last layer.
  std::byte* slots(int64_t block) const {
    const auto [rank, id] = page(block);
    const kv::CacheGeometry& geometry = engine.workers().geometry();
    const int64_t layer = geometry.stream(kv::Stream::kEntries).layers - 1;
    return engine.workers().pool(rank).layer(kv::Stream::kEntries, id, layer);
  }
  size_t entry_bytes() const {
    return static_cast<size_t>(engine.workers().geometry().stream(kv::Stream::kEntries).bytes_per_token);
  }
};

struct Case {
  const char* name;
  Attention attention = Attention::kGrouped;
  const char* mechanisms = "";
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class HashPlanted : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override { merge = Merge::kSound; }
  void TearDown() override { merge = Merge::kSound; }

  // Wrong tokens: before the mistake (never any), and from its step on. `plant` is empty: nothing happens.
  struct Wrong {
    int64_t before = 0, after = 0;
    bool refused = false;  // a row was not finite: it gave no token
  };
  Wrong run(const std::function<void(const Site&)>& plant) {
    const Case& one = GetParam();
    const std::string& folder = hash_folder(
        one.name, {.attention = one.attention, .heads = 8, .vocabulary = 60'000, .index_topk = 100});
    const LocalModel& model = local_model(folder, DType::kF32);
    EngineOptions options;
    options.workers.rank_count = 4;
    options.workers.block_tokens = kBlock;
    options.workers.max_step_rows = 512;
    options.workers.pool = {400, 400};
    options.plans_in_flight = 1;
    LocalEngine engine(model, options);
    SplitMix64 random(5);
    std::vector<uint32_t> prompt;
    for (int64_t i = 0; i < kPrompt; ++i) prompt.push_back(static_cast<uint32_t>(random.below(60'000)));
    RequestOptions request;
    request.max_tokens = kAnswer;
    request.sampling.seed = kSeed;
    request.digest = false;
    request.grouping.prefill = kv::Split::kZigzag;
    request.grouping.decode = {kv::DecodeKind::kDcp, kClasses};
    request.grouping.mechanisms = kv::parse_mechanisms(one.mechanisms, {}).value();
    // Another tenant's request, whose pages stay in the cache.
    RequestOptions foreign = request;
    foreign.sampling.seed = kSeed + 1;
    foreign.salt = "other";
    foreign.max_tokens = 1;
    std::optional<TableId> table;
    engine.seen = [&](const wire::StepPlan& plan) { table = TableId{plan.spans(0).table()}; };
    engine.submit(prompt, foreign);
    engine.run_all();
    const Site other{engine, *table};
    foreign_page_.assign(other.slots(4), other.slots(4) + other.entry_bytes() * kBlock);
    engine.seen = [&](const wire::StepPlan& plan) {
      if (plan.spans(0).start() == kPlanted && plant) plant({engine, TableId{plan.spans(0).table()}});
    };
    const RequestId id = engine.submit(prompt, request);
    engine.run_all();

    Wrong wrong;
    const RequestOutcome& outcome = engine.outcome(id);
    wrong.refused = outcome.notice.reason != controlplane::FinishReason::kLength;
    std::vector<uint32_t> context = prompt;
    for (size_t i = 0; i < outcome.tokens.size(); ++i) {
      const uint32_t expected = next_token(*model.config.hash, kSeed, context);
      const bool sees_it = kPrompt + static_cast<int64_t>(i) > kPlanted;
      if (outcome.tokens[i] != expected) ++(sees_it ? wrong.after : wrong.before);
      context.push_back(expected);
    }
    return wrong;
  }

  void expect_found(const std::function<void(const Site&)>& plant) {
    const Wrong wrong = run(plant);
    EXPECT_FALSE(wrong.refused);
    EXPECT_EQ(wrong.before, 0);
    EXPECT_EQ(wrong.after, kAnswer - (kPlanted - kPrompt) - 1);  // every one
  }

  std::vector<std::byte> foreign_page_;
};

TEST_P(HashPlanted, NothingPlantedNothingFound) {
  const Wrong wrong = run({});
  EXPECT_EQ(wrong.before + wrong.after, 0);
  EXPECT_FALSE(wrong.refused);
}

TEST_P(HashPlanted, ATableNamesAnotherBlocksPage) {
  expect_found([](const Site& site) {
    // Of the same rank, so that the page is there to be read.
    const auto [rank, right] = site.page(2);
    for (int64_t block = 3;; ++block) {
      if (site.page(block).first != rank) continue;
      kv::ControlArena& control = site.engine.workers().control();
      std::vector<PageId> pages;
      for (int64_t part = 0; part < control.limits().parts; ++part) {
        const auto own = control.pages(site.table, block, static_cast<int>(part));
        pages.insert(pages.end(), own.begin(), own.end());
      }
      return control.write_table(site.table, 2, pages);
    }
  });
}

TEST_P(HashPlanted, APageWasNotWritten) {
  expect_found([](const Site& site) { std::memset(site.slots(5), 0, site.entry_bytes() * kBlock); });
}

TEST_P(HashPlanted, APagePoisonedWithNanIsRefused) {
  const Wrong wrong =
      run([](const Site& site) { std::memset(site.slots(5), 0xff, site.entry_bytes() * kBlock); });
  EXPECT_TRUE(wrong.refused);
  EXPECT_EQ(wrong.before, 0);
}

TEST_P(HashPlanted, ASlotIsThereTwice) {
  expect_found([](const Site& site) {
    std::memcpy(site.slots(6) + 3 * site.entry_bytes(), site.slots(6) + 2 * site.entry_bytes(),
                site.entry_bytes());
  });
}

TEST_P(HashPlanted, ASlotHasOneOtherBit) {
  expect_found([](const Site& site) {
    const Case& one = GetParam();
    // The first column of the value: 1.0 and 0.0 are what a lost or foreign digit looks like.
    const size_t value = one.attention == Attention::kGrouped ? 16 * sizeof(float) : 0;
    float digit;
    std::memcpy(&digit, site.slots(7) + value, sizeof digit);
    digit = digit == 0 ? 1 : digit - 1;
    std::memcpy(site.slots(7) + value, &digit, sizeof digit);
  });
}

TEST_P(HashPlanted, AnotherTenantsPage) {
  expect_found(
      [this](const Site& site) { std::memcpy(site.slots(4), foreign_page_.data(), foreign_page_.size()); });
}

TEST_P(HashPlanted, APartialIsLost) {
  expect_found([](const Site&) { merge = Merge::kLost; });
}

TEST_P(HashPlanted, APartialIsMergedTwice) {
  expect_found([](const Site&) { merge = Merge::kDoubled; });
}

INSTANTIATE_TEST_SUITE_P(Kinds, HashPlanted,
                         ::testing::Values(Case{"grouped"},
                                           Case{"grouped_tree", Attention::kGrouped, "partials=tree"},
                                           Case{"mla", Attention::kMla}),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace weft::test
