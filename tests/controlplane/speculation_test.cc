// Drafts: where they come from, and what becomes of a step's rows when all, some or none of them hold.
#include "controlplane/speculation.h"

#include "proto/vocab/random.h"
#include "tests/controlplane/harness.h"

namespace weft::controlplane {
namespace {

using Tokens = std::vector<uint32_t>;

// Slow and obvious: every length from the longest, every place from the latest.
Tokens look_up_slowly(const Tokens& tokens, int64_t limit) {
  const auto count = std::ssize(tokens);
  for (int64_t length = 8; length >= 2; --length) {
    for (int64_t end = count - 1; end >= length; --end) {
      if (!std::equal(tokens.end() - length, tokens.end(), tokens.begin() + end - length)) continue;
      return {tokens.begin() + end, tokens.begin() + std::min(count, end + limit)};
    }
  }
  return {};
}

// Texts that grow by one or several tokens between look-ups, as answers do.
TEST(LookUp, FindsWhatTheObviousSearchFinds) {
  const uint64_t seed = 5;
  SplitMix64 random(seed);
  int64_t found = 0;
  for (int round = 0; round < 4'000; ++round) {
    Tokens tokens;
    LookupIndex index;
    const uint64_t letters = 1 + random.below(6), length = random.below(120);
    while (tokens.size() < length) {
      const uint64_t more = random.below(4) == 0 ? random.below(40) : 1 + random.below(3);
      for (uint64_t i = 0; i < more; ++i) tokens.push_back(static_cast<uint32_t>(random.below(letters)));
      if (random.below(4) == 0) index.extend(tokens);
      const auto limit = static_cast<int64_t>(1 + random.below(8));
      const Tokens expected = look_up_slowly(tokens, limit);
      ASSERT_EQ(look_up(tokens, index, limit), expected) << "seed " << seed << " round " << round;
      found += expected.empty() ? 0 : 1;
    }
  }
  EXPECT_GT(found, 30'000);
}

// Many different runs: the tables grow, and runs of one slot are told apart.
TEST(LookUp, FindsLongAgoInALongText) {
  const uint64_t seed = 6;
  SplitMix64 random(seed);
  Tokens tokens;
  LookupIndex index;
  for (int i = 0; i < 30'000; ++i) tokens.push_back(static_cast<uint32_t>(random.below(200'000)));
  index.extend(tokens);
  for (int round = 0; round < 50; ++round) {
    const size_t from = random.below(20'000), length = 1 + random.below(12);
    for (size_t i = 0; i < length; ++i) tokens.push_back(tokens[from + i]);
    ASSERT_EQ(look_up(tokens, index, 4), look_up_slowly(tokens, 4)) << "seed " << seed << " round " << round;
  }
}

TEST(Draft, IsWhatTheScriptSaysOfTheNextTokens) {
  const Speculation script{DraftSource::kForced, 3, {10, 11, 12, 13}};
  const Tokens tokens = {1, 2, 10};  // a prompt of two, one answered
  LookupIndex index;
  EXPECT_EQ(draft(script, tokens, 1, {}, index, 16), (Tokens{11, 12, 13}));
  EXPECT_EQ(draft(script, tokens, 1, {}, index, 2), (Tokens{11, 12}));
  EXPECT_EQ(draft(script, {}, 6, {}, index, 16), Tokens{});
  EXPECT_EQ(draft({}, tokens, 1, {}, index, 16), Tokens{});
}

// A request whose script is its answer, changed at some places.
RequestArrived scripted(Harness& h, Tokens prompt, int64_t max_tokens, const std::vector<size_t>& wrong,
                        int64_t draft_tokens) {
  RequestArrived out = h.arrival(std::move(prompt), max_tokens);
  const Truth truth = h.truth_of(out.prompt, max_tokens, {}, -1);
  out.speculation = {DraftSource::kForced, draft_tokens, {}};
  out.speculation.forced.assign(truth.tokens.begin() + truth.prompt, truth.tokens.end());
  for (const size_t i : wrong) out.speculation.forced.at(i) = (out.speculation.forced[i] + 1) % kVocabulary;
  return out;
}

TEST(Drafts, ThatHoldSaveSteps) {
  Harness h(small_limits(2, 60));
  const RequestId id = h.submit(scripted(h, text(1, 9), 11, {}, 4));
  ASSERT_TRUE(h.step());  // the prompt, and the first token
  const Plan plan = h.plan().value();
  EXPECT_EQ(plan.spans[0].rows, 5);
  EXPECT_EQ(plan.spans[0].sample_rows, 5);
  EXPECT_EQ(plan.spans[0].start, 9);
  EXPECT_FALSE(h.plan().has_value()) << "where the next step starts depends on this one";
  h.run_oldest();
  EXPECT_EQ(h.outcome(id).tokens.size(), 6u);
  // Five tokens to come, and the last is never an input.
  const Plan last = h.plan().value();
  EXPECT_EQ(last.spans[0].rows, 5);
  h.run_oldest();
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).drafted_tokens, 8);
  EXPECT_EQ(h.finished(id).accepted_tokens, 8);
  EXPECT_EQ(h.finished(id).computed_tokens, 9 + 11 - 1);
}

TEST(Drafts, AfterTheFirstWrongOneRunAgain) {
  Harness h(small_limits(2, 60));
  const RequestId id = h.submit(scripted(h, text(1, 9), 12, {3, 7}, 4));
  ASSERT_TRUE(h.step());
  ASSERT_TRUE(h.step());  // guesses 1, 2 hold, 3 does not, 4 is in vain
  EXPECT_EQ(h.outcome(id).tokens.size(), 4u);
  EXPECT_EQ(h.outcome(id).drafts.back().accepted, 2);
  const Plan plan = h.plan().value();
  EXPECT_EQ(plan.spans[0].start, 9 + 3);
  EXPECT_EQ(plan.spans[0].tokens[0], h.outcome(id).tokens.back());
  h.run_oldest();
  EXPECT_EQ(h.outcome(id).drafts.back().accepted, 3);  // guesses 4, 5, 6 hold, 7 does not
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.plane.counters().accepted_tokens, h.finished(id).accepted_tokens);
  EXPECT_EQ(h.plane.counters().drafted_tokens, h.finished(id).drafted_tokens);
}

// Each step asks for guesses, in cells and on pages of their own; the next one runs them.
TEST(Drafts, OfTheDraftLayerAreAskedForAStepAhead) {
  Harness h(small_limits(2, 60));
  RequestArrived arrival = h.arrival(text(1, 9), 12);
  arrival.speculation = {DraftSource::kMtp, 3, {}};
  const RequestId id = h.submit(arrival);
  const Plan prompt = h.plan().value();
  EXPECT_EQ(prompt.spans[0].draft_tokens, 1) << "a prompt's last row is guessed from once";
  h.run_oldest();
  const Plan plan = h.plan().value();
  EXPECT_EQ(plan.spans[0].rows, 2);
  EXPECT_EQ(plan.spans[0].draft_tokens, 3);
  // Positions 9 and 10, and of two more guesses 11 and 12: the fourth block.
  int64_t blocks = 0;
  for (const TableWrite& write : plan.table_writes)
    blocks = std::max(blocks, write.first_block + std::ssize(write.pages) / 4);
  EXPECT_EQ(blocks, 4);
  h.run_oldest();
  h.run_all();
  h.expect_right(id);
  EXPECT_GT(h.finished(id).accepted_tokens, 0);
  EXPECT_GT(h.finished(id).drafted_tokens, h.finished(id).accepted_tokens);
}

TEST(Drafts, DraftLayersAreToldTheTokensBehindAChunk) {
  for (const int64_t layers : {0, 1, 3}) {
    Limits limits = small_limits(1, 60);
    limits.max_chunk_rows = 6;
    limits.draft_layers = layers;
    Harness h(limits);
    const RequestArrived arrival = h.arrival(text(1, 14), 2);
    h.submit(arrival);
    const Plan first = h.plan().value();
    const Tokens behind(arrival.prompt.begin() + 6, arrival.prompt.begin() + 6 + layers);
    EXPECT_EQ(first.spans[0].next_tokens, behind);
    h.run_oldest();
    // Two rows are left behind the second chunk; the third of three layers would need a token that is not
    // drawn.
    const Plan second = h.plan().value();
    EXPECT_EQ(second.spans[0].rows, layers < 3 ? 6 : 8);
    EXPECT_EQ(std::ssize(second.spans[0].next_tokens), layers < 3 ? layers : 0);
    h.run_all();
  }
}

TEST(Drafts, LeaveRoomForEverybodysRow) {
  Limits limits = small_limits(1, 200);
  limits.max_step_rows = limits.max_samples = 10;
  limits.max_running = 4;
  Harness h(limits);
  std::vector<RequestId> ids;
  for (uint32_t i = 0; i < 4; ++i) ids.push_back(h.submit(scripted(h, text(i, 2), 30, {}, 8)));
  ASSERT_TRUE(h.step());
  const Plan plan = h.plan().value();
  ASSERT_EQ(plan.spans.size(), 4u);
  int64_t rows = 0;
  for (const Span& span : plan.spans) rows += span.rows;
  EXPECT_EQ(rows, 10);
  h.run_oldest();
  h.run_all();
  for (const RequestId id : ids) h.expect_right(id);
}

TEST(Drafts, EndWithTheStopToken) {
  Harness h(small_limits(1, 60));
  RequestArrived arrival = scripted(h, text(3, 6), 20, {}, 8);
  arrival.stop_tokens = {arrival.speculation.forced[4]};
  const RequestId id = h.submit(arrival);
  h.run_all();
  h.expect_right(id);
  EXPECT_EQ(h.finished(id).reason, FinishReason::kStop);
  EXPECT_LE(h.outcome(id).tokens.size(), 5u);
}

}  // namespace
}  // namespace weft::controlplane
