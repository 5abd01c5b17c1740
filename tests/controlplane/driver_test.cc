// Goal: whatever arrives, pauses, is cancelled, regrouped, crashes or is abandoned, every request gets
// exactly the tokens it would get alone, nothing reads a byte that is not its own, and no page is lost.
//
// Method: random event streams against fake workers (fake_workers.h) with tiny pools, delayed, reordered and
// repeated acknowledgements, half-executed plans. check_invariants() runs after every event. The seed is in
// every failure message; rare paths are counted and must have been taken.
#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <ranges>
#include <set>

#include "controlplane/control_plane.h"
#include "proto/vocab/random.h"
#include "tests/controlplane/fake_workers.h"

namespace weft::controlplane {
namespace {

// How often the rare paths were taken, over all seeds.
struct Marks {
  int64_t rows = 0, plans = 0, finished = 0, hits = 0, full_hits = 0, evictions = 0, copies = 0, stopped = 0;
  int64_t regroups = 0, moved = 0, thinned = 0, regroups_refused = 0, refused = 0, cancelled = 0, crashes = 0;
  int64_t abandoned = 0, internal = 0, numerical = 0, duplicates = 0, late = 0, input_refs = 0, mixed = 0,
          owned = 0;
  int64_t late_ends = 0, passes = 0;
  int64_t all_hold = 0, some_hold = 0, none_holds = 0, drafts_end = 0, guesses_hold = 0;
};

// Each of them must have been taken, or the test proves little.
void expect_taken(const Marks& marks) {
#define EXPECT_TAKEN(path) EXPECT_GT(marks.path, 0)
  EXPECT_TAKEN(rows);
  EXPECT_TAKEN(plans);
  EXPECT_TAKEN(finished);
  EXPECT_TAKEN(hits);
  EXPECT_TAKEN(full_hits);
  EXPECT_TAKEN(evictions);
  EXPECT_TAKEN(copies);
  EXPECT_TAKEN(stopped);
  EXPECT_TAKEN(regroups);
  EXPECT_TAKEN(moved);
  EXPECT_TAKEN(thinned);
  EXPECT_TAKEN(regroups_refused);
  EXPECT_TAKEN(refused);
  EXPECT_TAKEN(cancelled);
  EXPECT_TAKEN(crashes);
  EXPECT_TAKEN(abandoned);
  EXPECT_TAKEN(internal);
  EXPECT_TAKEN(numerical);
  EXPECT_TAKEN(duplicates);
  EXPECT_TAKEN(late);
  EXPECT_TAKEN(input_refs);
  EXPECT_TAKEN(mixed);
  EXPECT_TAKEN(owned);
  EXPECT_TAKEN(late_ends);
  EXPECT_TAKEN(passes);
  EXPECT_TAKEN(all_hold);
  EXPECT_TAKEN(some_hold);
  EXPECT_TAKEN(none_holds);
  EXPECT_TAKEN(drafts_end);
  EXPECT_TAKEN(guesses_hold);
#undef EXPECT_TAKEN
  std::cerr << marks.plans << " plans, " << marks.rows << " rows, " << marks.finished << " finished, "
            << marks.hits << " with a prefix hit, " << marks.evictions << " evictions, " << marks.copies
            << " copies, " << marks.abandoned << " abandoned, " << marks.mixed << " mixed steps\n";
}

struct Profile {
  int64_t iterations = 1500;
  bool tight = false;  // pools in which hardly two requests fit
};

class Driver {
 public:
  Driver(uint64_t seed, const Profile& profile, Marks& marks)
      : random_(seed),
        profile_(profile),
        marks_(marks),
        limits_(make_limits()),
        plane_(limits_),
        workers_(limits_) {
    for (int i = 0; i < 4; ++i) {
      std::vector<uint32_t>& text = documents_.emplace_back();
      for (int64_t n = 0; n < limits_.max_context; ++n)
        text.push_back(static_cast<uint32_t>(below(kVocabulary)));
    }
  }

  void run() {
    for (int64_t i = 0; i < profile_.iterations; ++i) act(true);
    const auto ids = std::views::keys(live_);
    for (const RequestId id : std::vector<RequestId>(ids.begin(), ids.end())) feed(PauseChanged{id, false});
    for (int64_t i = 0; i < 200000 && !live_.empty(); ++i) act(false);
    ASSERT_TRUE(live_.empty()) << "no end in sight";
    while (!executed_.empty() || !in_flight_.empty()) act(false);  // wasted rows
    expect_all_pages_back();
    marks_.rows += workers_.rows_checked();
    marks_.passes += plane_.counters().passes;
    marks_.evictions += plane_.counters().evicted_blocks;
    marks_.duplicates += plane_.counters().duplicate_acknowledgements;
    marks_.late += plane_.counters().late_acknowledgements;
    EXPECT_EQ(plane_.running_count() + plane_.waiting_count(), 0);
  }

 private:
  struct Live {
    RequestArrived arrival;
    int64_t answered = 0;
    bool cancelled = false;
    int64_t accepted = 0;  // drafts
    bool abandoned_alone = false;
  };
  struct Executed {
    Plan plan;
    std::vector<Sample> samples;
    RankMask unsent = 0;  // ranks whose acknowledgement has not been delivered
  };

  int64_t below(int64_t bound) { return static_cast<int64_t>(random_.below(static_cast<uint64_t>(bound))); }
  bool chance(int64_t percent) { return below(100) < percent; }

  Limits make_limits() {
    Limits limits;
    constexpr int kRanks[] = {1, 2, 3, 4, 4, 6, 8};
    limits.rank_count = kRanks[below(7)];
    limits.geometry.block_tokens = chance(50) ? 4 : 8;
    const int parts = std::array{1, 1, 2, 3, 8}[static_cast<size_t>(below(5))];
    limits.geometry.streams[0] = {3, 16, parts};
    limits.geometry.heads = parts * (1 + below(4));
    limits.geometry.streams[1] = chance(20) ? kv::StreamGeometry{} : kv::StreamGeometry{1, 8};
    limits.max_context = 40 + below(80);
    const int64_t whole = limits.table_blocks();
    for (int r = 0; r < limits.rank_count; ++r) {
      const int64_t pages = profile_.tight ? whole / 2 + 1 + below(whole) : whole * 3 + below(whole * 4);
      limits.pool_pages.push_back({pages * parts, pages - below(2)});
    }
    limits.max_running = 1 + below(8);
    limits.max_waiting = 1 + below(6);
    limits.max_passes = below(4);
    limits.table_count = limits.max_running + 1 + below(4);
    limits.max_samples = limits.max_running + below(3);
    limits.max_step_rows = limits.max_running + below(60);
    limits.max_chunk_rows = chance(50) ? 0 : 1 + below(40);
    limits.plans_in_flight = chance(85) ? 2 : 1;
    limits.eviction = chance(50) ? Eviction::kReuse : Eviction::kLru;
    return limits;
  }

  GroupingWish random_wish() {
    GroupingWish wish;
    wish.prefill = static_cast<kv::Split>(below(kv::kSplits));
    const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(limits_.rank_count);
    wish.decode = wishes[static_cast<size_t>(below(static_cast<int64_t>(wishes.size())))];
    wish.index = {static_cast<kv::IndexKind>(below(2)), chance(50) ? 0 : divisor()};
    return wish;
  }

  int divisor() {
    for (;;) {
      const int c = 1 + static_cast<int>(below(limits_.rank_count));
      if (limits_.rank_count % c == 0) return c;
    }
  }

  void feed(const Event& event) {
    take(plane_.handle(tick(), {&event, 1}));
    plane_.check_invariants();
    for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
      const PoolCounts pool = plane_.pool(stream, rank);
      ASSERT_EQ(pool.free + pool.used + pool.cached + pool.in_flight, pool.pages);
    });
  }

  void act(bool disturb) {
    switch (below(disturb ? 16 : 8)) {
      case 0:
      case 1:
      case 2:
        return make_plan();
      case 3:
      case 4:
        return execute_next();
      case 5:
      case 6:
      case 7:
        return acknowledge();
      case 8:
      case 9:
        return arrive();
      case 10:
        return chance(15) ? cancel() : void();
      case 11:
        return pause();
      case 12:
      case 13:
        return regroup();
      case 14:
        return chance(30) ? crash() : void();
      case 15:
        return chance(4) ? abandon() : execute_next();
    }
  }

  void arrive() {
    RequestArrived arrival;
    arrival.request = RequestId{++requests_};
    const auto& text = documents_[static_cast<size_t>(below(4))];
    int64_t length = 1 + below(limits_.max_context * (chance(10) ? 10 : 7) / 10);
    if (chance(40)) length = round_up(length, limits_.geometry.block_tokens);  // full prefix hits need these
    length = std::min(length, limits_.max_context);
    arrival.prompt.assign(text.begin(), text.begin() + length);
    if (chance(40)) {
      for (int64_t i = below(length); i < length; ++i)
        arrival.prompt[static_cast<size_t>(i)] = static_cast<uint32_t>(below(kVocabulary));
    }
    arrival.max_tokens = 1 + below(chance(20) ? 40 : 10);
    const uint64_t salt = random_.below(2);
    arrival.root = kv::namespace_hash("m", "f", std::to_string(salt));
    arrival.use_prefix_cache = chance(85);
    if (arrival.use_prefix_cache || chance(50)) {
      arrival.hashes = kv::block_hashes(arrival.root, arrival.prompt, limits_.geometry.block_tokens);
    }
    if (chance(50))
      arrival.stop_tokens = {static_cast<uint32_t>(below(kVocabulary)),
                             static_cast<uint32_t>(below(kVocabulary))};
    arrival.grouping = random_wish();
    arrival.digest = chance(20);
    if (chance(30)) arrival.priority = static_cast<int>(below(3)) - 1;
    if (chance(5)) arrival.deadline = Duration(1 + below(300));
    const int64_t nan_row = chance(4) ? length - 1 + below(arrival.max_tokens) : -1;
    Truth truth = truth_of(salt, arrival.prompt, arrival.max_tokens, arrival.stop_tokens, nan_row);
    if (chance(2)) truth.poison_row = below(static_cast<int64_t>(truth.tokens.size()));
    arrival.speculation = random_speculation(truth);
    workers_.add(arrival.request, truth);
    live_[arrival.request].arrival = arrival;
    feed(arrival);
  }

  Speculation random_speculation(const Truth& truth) {
    Speculation out;
    out.source = static_cast<DraftSource>(below(4));
    if (out.on()) out.draft_tokens = 1 + below(6);
    if (out.source != DraftSource::kForced) return out;
    // The answer as it will be, with some guesses wrong, and perhaps more than there will be.
    out.forced.assign(truth.tokens.begin() + truth.prompt, truth.tokens.end());
    const int64_t wrong = std::array{0, 10, 40, 100}[static_cast<size_t>(below(4))];
    for (uint32_t& token : out.forced) {
      if (chance(wrong)) token = static_cast<uint32_t>(below(kVocabulary));
    }
    for (int64_t more = below(4); more > 0; --more) out.forced.push_back(0);
    return out;
  }

  std::optional<RequestId> any_live() {
    if (live_.empty()) return std::nullopt;
    return std::next(live_.begin(), below(static_cast<int64_t>(live_.size())))->first;
  }
  void cancel() {
    if (const auto id = any_live()) {
      live_[*id].cancelled = true;
      feed(CancelRequested{*id});
    }
  }
  void pause() {
    if (const auto id = any_live()) feed(PauseChanged{*id, chance(30)});
  }
  void regroup() {
    const auto id = any_live();
    if (!id) return;
    RegroupRequested request{++commands_, *id, chance(30), chance(80), chance(40), random_wish(), chance(20)};
    // A tree needs powers of two.
    const bool tree = (limits_.rank_count & (limits_.rank_count - 1)) == 0;
    if (chance(30)) request.mechanisms = tree ? "query=replicated,partials=tree" : "context=pass-q";
    feed(request);
  }

  void make_plan() {
    auto plan = plane_.next_plan(tick());
    plane_.check_invariants();
    if (!plan) return;
    ASSERT_EQ(number(plan->step), ++steps_);
    check_plan(*plan);
    std::deque<Plan> others;
    for (const Executed& e : executed_) others.push_back(e.plan);
    others.insert(others.end(), in_flight_.begin(), in_flight_.end());
    ASSERT_LT(static_cast<int>(others.size()), limits_.plans_in_flight);
    workers_.publish(*plan, others);
    in_flight_.push_back(std::move(*plan));
  }

  void check_plan(const Plan& plan) {
    std::set<RequestId> seen;
    std::set<uint32_t> samples;
    std::set<std::pair<int, int>> groupings;
    int64_t prefill = 0, decode = 0, owned = 0;
    for (const Span& span : plan.spans) {
      ASSERT_TRUE(seen.insert(span.request).second) << "one span for a sequence and step";
      ASSERT_GE(span.rows, 1);
      ASSERT_TRUE(span.has_input_ref ? span.tokens.empty() && span.rows == 1
                                     : static_cast<int64_t>(span.tokens.size()) == span.rows);
      ASSERT_TRUE(span.prefill ? span.sample_rows <= 1 : span.sample_rows == span.rows);
      ASSERT_TRUE(span.draft_tokens == 0 || span.sample_rows > 0);
      for (int64_t i = 0; i < span.sample_rows + span.draft_tokens; ++i) {
        ASSERT_TRUE(samples.insert(span.sample_index + static_cast<uint32_t>(i)).second);
        ASSERT_LT(span.sample_index + i, limits_.max_samples);
        ASSERT_LT(span.sampler_rank, limits_.rank_count);
      }
      (span.prefill ? prefill : decode) += span.rows;
      ASSERT_TRUE(span.prefill || span.split == kv::Split::kShared);
      ASSERT_TRUE(span.split != kv::Split::kZigzag || span.rows >= 2 * limits_.rank_count);
      ASSERT_TRUE(span.split != kv::Split::kInterleave || span.rows >= limits_.rank_count);
      owned += span.split == kv::Split::kShared ? 0 : 1;
      if (!span.prefill) groupings.insert({span.grouping.width, span.grouping.c});
      marks_.full_hits += span.no_write ? 1 : 0;
      marks_.input_refs += span.has_input_ref ? 1 : 0;
    }
    ASSERT_FALSE(plan.spans.empty());
    ASSERT_LE(prefill + decode, limits_.max_step_rows);
    ASSERT_LE(static_cast<int64_t>(plan.copies.size()), limits_.max_copies());
    ASSERT_GE(plan.padded.prefill, prefill);
    ASSERT_GE(plan.padded.decode, decode);
    marks_.owned += owned;
    marks_.mixed += owned > 0 && groupings.size() > 1 ? 1 : 0;
    marks_.copies += static_cast<int64_t>(plan.copies.size());
    ++marks_.plans;
  }

  // A plan that kills its workers is tried twice, then given up.
  void execute_next() {
    if (in_flight_.empty()) return;
    if (workers_.poisoned(in_flight_.front())) return abandon();
    Executed done{std::move(in_flight_.front()), {}, all_ranks(limits_.rank_count)};
    in_flight_.pop_front();
    done.samples = workers_.execute(done.plan);
    executed_.push_back(std::move(done));
  }

  StepAcknowledged acknowledgement(const Executed& done, int rank) {
    StepAcknowledged ack{done.plan.step, rank, {}};
    for (const Span& span : done.plan.spans) {
      if (span.sampler_rank != rank) continue;
      for (const Sample& sample : done.samples) {
        const int64_t row = int64_t{sample.sample_index} - span.sample_index;
        if (row >= 0 && row < span.sample_rows + span.draft_tokens) ack.samples.push_back(sample);
      }
    }
    return ack;
  }

  // Some time passes: up to a second.
  Time tick() { return Time{clock_ += 1 + below(1'000'000'000)}; }

  void acknowledge() {
    for (int64_t i = 1 + below(2 * limits_.rank_count); i > 0; --i) acknowledge_once();
  }
  void acknowledge_once() {
    if (!old_acks_.empty() && chance(5)) {
      feed(old_acks_[static_cast<size_t>(below(static_cast<int64_t>(old_acks_.size())))]);
      return;
    }
    if (executed_.empty()) return;
    // Mostly of the oldest plan; ranks in any order.
    Executed& done = executed_[static_cast<size_t>(below(static_cast<int64_t>(executed_.size())))];
    if (done.unsent == 0) return;
    int rank;
    do {
      rank = static_cast<int>(below(limits_.rank_count));
    } while (!holds(done.unsent, rank));
    done.unsent &= ~mask_of(rank);
    const StepAcknowledged ack = acknowledgement(done, rank);
    if (old_acks_.size() < 50)
      old_acks_.push_back(ack);
    else
      old_acks_[static_cast<size_t>(below(50))] = ack;
    while (!executed_.empty() && executed_.front().unsent == 0) executed_.pop_front();
    feed(ack);
  }

  // Workers die in the middle of a plan; all plans in flight are run again, the same bytes.
  void crash() {
    ++marks_.crashes;
    if (!in_flight_.empty()) workers_.execute(in_flight_.front(), below(60));
    for (Executed& done : executed_) {
      const std::vector<Sample> again = workers_.execute(done.plan);
      ASSERT_EQ(again.size(), done.samples.size());
      for (size_t i = 0; i < again.size(); ++i) ASSERT_EQ(again[i].token, done.samples[i].token);
    }
  }

  void abandon() {
    const int64_t count = static_cast<int64_t>(executed_.size() + in_flight_.size());
    if (count == 0) return;
    if (!in_flight_.empty()) workers_.execute(in_flight_.front(), below(60));
    for (const Executed& done : executed_) {
      if (count == 1 && done.plan.spans.size() == 1) mark_alone(done.plan);
    }
    for (const Plan& plan : in_flight_) {
      if (count == 1 && plan.spans.size() == 1) mark_alone(plan);
    }
    executed_.clear();
    in_flight_.clear();
    ++marks_.abandoned;
    feed(PlansAbandoned{});
  }
  void mark_alone(const Plan& plan) {
    const auto found = live_.find(plan.spans[0].request);
    if (found != live_.end()) found->second.abandoned_alone = true;
  }

  void take(const std::vector<Notice>& notices) {
    for (const Notice& notice : notices) {
      std::visit([&](const auto& n) { on(n); }, notice);
    }
  }
  void on(const PinNotice&) {}
  void on(const TopologyNotice& notice) { FAIL() << "nobody asked for ranks " << notice.ranks; }
  void on(const TokenNotice& notice) {
    Live& live = live_.at(notice.request);
    const Truth& truth = workers_.truth(notice.request);
    ASSERT_EQ(notice.index, live.answered++);
    ASSERT_EQ(notice.token, truth.tokens.at(static_cast<size_t>(truth.prompt + notice.index)));
  }
  void on(const DraftNotice& notice) {
    const Live& live = live_.at(notice.request);
    marks_.guesses_hold += live.arrival.speculation.source == DraftSource::kMtp ? notice.accepted : 0;
    ASSERT_TRUE(live.arrival.speculation.on());
    ASSERT_LE(notice.drafted, live.arrival.speculation.draft_tokens);
    ASSERT_EQ(notice.start, workers_.truth(notice.request).prompt + live.answered - 1);
    ++(notice.accepted == 0                ? marks_.none_holds
       : notice.accepted == notice.drafted ? marks_.all_hold
                                           : marks_.some_hold);
    live_.at(notice.request).accepted += notice.accepted;
  }
  void on(const PrefillNotice& notice) {
    ASSERT_LE(notice.done, notice.total);
    ASSERT_EQ(notice.total, workers_.truth(notice.request).prompt);
  }
  void on(const RegroupedNotice& notice) {
    if (notice.error.code == ErrorCode::kOk) {
      ++marks_.regroups;
      marks_.moved += notice.bytes_moved > 0 ? 1 : 0;
      marks_.thinned += notice.pages_dropped > 0 ? 1 : 0;
    } else {
      ++marks_.regroups_refused;
      ASSERT_EQ(notice.before, notice.after);
      ASSERT_TRUE(notice.error.code == ErrorCode::kResourceExhausted ||
                  notice.error.code == ErrorCode::kTooLarge)
          << notice.error.text();
    }
  }
  void on(const FinishedNotice& notice) {
    const auto found = live_.find(notice.request);
    ASSERT_NE(found, live_.end()) << "finished twice";
    const Live live = found->second;
    const Truth& truth = workers_.truth(notice.request);
    live_.erase(found);
    ASSERT_EQ(notice.completion_tokens, live.answered);
    ASSERT_EQ(notice.accepted_tokens, live.accepted);
    ASSERT_LE(notice.accepted_tokens, notice.drafted_tokens);
    marks_.drafts_end += live.accepted > 0 && notice.reason == FinishReason::kStop ? 1 : 0;
    ASSERT_EQ(notice.prompt_tokens, truth.prompt);
    ASSERT_TRUE(live.arrival.use_prefix_cache || notice.cached_tokens == 0);
    marks_.hits += notice.cached_tokens > 0 ? 1 : 0;
    switch (notice.reason) {
      case FinishReason::kStop:
      case FinishReason::kLength:
        ASSERT_EQ(notice.reason, truth.reason);
        ASSERT_EQ(live.answered, static_cast<int64_t>(truth.tokens.size()) - truth.prompt);
        ++marks_.finished;
        marks_.stopped += notice.reason == FinishReason::kStop ? 1 : 0;
        break;
      case FinishReason::kCancelled:
        ASSERT_TRUE(live.cancelled);
        ++marks_.cancelled;
        break;
      case FinishReason::kError:
        return on_error(notice, live, truth);
    }
  }
  void on_error(const FinishedNotice& notice, const Live& live, const Truth& truth) {
    switch (notice.error.code) {
      case ErrorCode::kNumerical:
        ASSERT_EQ(truth.reason, FinishReason::kError);
        ++marks_.numerical;
        return;
      case ErrorCode::kInternal:
        ASSERT_TRUE(live.abandoned_alone);
        ++marks_.internal;
        return;
      case ErrorCode::kDeadlineExceeded:
        ASSERT_TRUE(live.arrival.deadline.has_value());
        ++marks_.late_ends;
        return;
      case ErrorCode::kTooLarge:
      case ErrorCode::kResourceExhausted:
        ++marks_.refused;
        return;
      default:
        FAIL() << notice.error.text();
    }
  }

  void expect_all_pages_back() {
    for_each_pool(limits_.rank_count, [&](kv::Stream stream, int rank) {
      const PoolCounts pool = plane_.pool(stream, rank);
      EXPECT_EQ(pool.free + pool.cached, pool.pages);
      EXPECT_EQ(pool.used, 0);
      EXPECT_EQ(pool.in_flight, 0);
      EXPECT_EQ(pool.reserved, 0);
    });
  }

  SplitMix64 random_;
  Profile profile_;
  Marks& marks_;
  Limits limits_;
  ControlPlane plane_;
  FakeWorkers workers_;
  std::vector<std::vector<uint32_t>> documents_;
  std::map<RequestId, Live> live_;
  std::deque<Executed> executed_;
  std::deque<Plan> in_flight_;  // published, not executed
  std::vector<StepAcknowledged> old_acks_;
  uint64_t requests_ = 0, commands_ = 0, steps_ = 0;
  int64_t clock_ = 0;
};

void run_seeds(uint64_t first, uint64_t count, const Profile& profile) {
  Marks marks;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::cerr << (seed == first ? "seeds " : " ") << seed
              << std::flush;  // a CHECK leaves no time to say it later
    Driver(seed, profile, marks).run();
    if (::testing::Test::HasFailure()) return;
  }
  std::cerr << std::endl;
  expect_taken(marks);
}

TEST(Driver, RoomyPools) { run_seeds(1, 150, {.iterations = 1500, .tight = false}); }
TEST(Driver, TightPools) { run_seeds(1001, 150, {.iterations = 1500, .tight = true}); }

}  // namespace
}  // namespace weft::controlplane
