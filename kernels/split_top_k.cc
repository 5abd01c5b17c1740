#include "kernels/split_top_k.h"

#include <algorithm>

#include "kernels/cpu/candidate_list.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

class Finder {
 public:
  Finder(std::span<const Offer> offers, int64_t top_k, SplitTopK& out)
      : offers_(offers), top_k_(top_k), out_(out) {
    out_.by_position = out_.second_read = false;
    out_.ties.clear();
    out_.scores.clear();
    out_.segments.clear();
    out_.reads.assign(offers.size(), {});
  }

  void run() {
    for (size_t i = 0; i < offers_.size(); ++i) {
      out_.reads[i].bytes = sizeof(OfferHead);
      read_scores(i, offers_[i].head->first);
    }
    if (std::ssize(out_.scores) < top_k_) {
      read_rests([](const Candidate&) { return true; });
    }
    find_last();
    // What is read now comes before the last key or after it, so the others' rests stay where they were.
    if (read_rests([&](const Candidate& next) { return next.score > out_.last_score; })) find_last();
    settle_ties();
    count_chosen();
  }

 private:
  bool has_rest(size_t i) const { return out_.reads[i].scores < offers_[i].head->count; }

  void read_scores(size_t i, int64_t end) {
    SplitTopK::Read& read = out_.reads[i];
    const int64_t count = end - read.scores;
    const auto begin = std::ssize(out_.scores);
    out_.segments.push_back({static_cast<int32_t>(i), read.scores, begin, count});
    const float* from = offers_[i].scores + read.scores;
    out_.scores.insert(out_.scores.end(), from, from + count);
    read.scores = end;
    read.bytes += count * static_cast<int64_t>(sizeof(float));
  }

  // Of the offers whose best unread key is `wanted`. True if there were any.
  template <typename Wanted>
  bool read_rests(const Wanted& wanted) {
    bool any = false;
    for (size_t i = 0; i < offers_.size(); ++i) {
      if (!has_rest(i) || !wanted(offers_[i].head->next)) continue;
      read_scores(i, offers_[i].head->count);
      any = out_.second_read = true;
    }
    return any;
  }

  void find_last() {
    const Kth kth = kth_largest(out_.scores.data(), std::ssize(out_.scores), top_k_);
    out_.last_score = kth.score;
    wanted_ties_ = top_k_ - kth.above;
  }

  // Which keys of the last score are chosen: the first ones. Where all are, no position is read.
  void settle_ties() {
    const auto read = std::count(out_.scores.begin(), out_.scores.end(), out_.last_score);
    bool unread = false;
    for (size_t i = 0; i < offers_.size(); ++i) {
      unread = unread || (has_rest(i) && offers_[i].head->next.score == out_.last_score);
    }
    if (read == wanted_ties_ && !unread) return;
    out_.by_position = true;
    for (const SplitTopK::Segment& segment : out_.segments) read_ties(segment);
    keep_first_ties();
    const size_t before = out_.segments.size();
    const int32_t last = out_.ties.back().position;
    read_rests([&](const Candidate& next) { return next.score == out_.last_score && next.position < last; });
    for (size_t i = before; i < out_.segments.size(); ++i) read_ties(out_.segments[i]);
    if (out_.segments.size() > before) keep_first_ties();
  }

  // A segment ascends in position: beyond the ties wanted it holds no chosen one.
  void read_ties(const SplitTopK::Segment& segment) {
    int64_t found = 0;
    for (int64_t i = 0; i < segment.count && found < wanted_ties_; ++i) {
      if (out_.scores[static_cast<size_t>(segment.begin + i)] != out_.last_score) continue;
      ++found;
      out_.ties.push_back(
          {offers_[static_cast<size_t>(segment.offer)].positions[segment.from + i], segment.offer});
    }
    out_.reads[static_cast<size_t>(segment.offer)].bytes += found * static_cast<int64_t>(sizeof(int32_t));
  }

  void keep_first_ties() {
    std::sort(out_.ties.begin(), out_.ties.end(),
              [](const auto& a, const auto& b) { return a.position < b.position; });
    out_.ties.resize(static_cast<size_t>(wanted_ties_));
  }

  void count_chosen() {
    const float last = out_.last_score;
    for (const SplitTopK::Segment& segment : out_.segments) {
      const float* scores = out_.scores.data() + segment.begin;
      int64_t chosen = 0;
      for (int64_t i = 0; i < segment.count; ++i) {
        chosen += out_.by_position ? scores[i] > last : scores[i] >= last;
      }
      out_.reads[static_cast<size_t>(segment.offer)].chosen += chosen;
    }
    for (const SplitTopK::Tie& tie : out_.ties) ++out_.reads[static_cast<size_t>(tie.offer)].chosen;
  }

  const std::span<const Offer> offers_;
  const int64_t top_k_;
  SplitTopK& out_;
  int64_t wanted_ties_ = 0;
};

}  // namespace

void write_offer(std::span<const Candidate> best, int64_t first, OfferHead* head, float* scores,
                 int32_t* positions) {
  const auto count = std::ssize(best);
  first = std::min(first, count);
  *head = {static_cast<int32_t>(count), static_cast<int32_t>(first), {}};
  if (count == 0) return;
  CHECK_GT(first, 0);
  static thread_local std::vector<float> values;
  values.clear();
  for (const Candidate& candidate : best) values.push_back(candidate.score);
  const Kth kth = kth_largest(values.data(), count, first);
  int64_t ties = first - kth.above;  // of the keys that have the first-th score, the first ones go in front
  int64_t front = 0, back = first;
  for (const Candidate& candidate : best) {
    const bool in_front = candidate.score > kth.score || (candidate.score == kth.score && ties-- > 0);
    if (!in_front && (back == first || ranks_before(candidate, head->next))) head->next = candidate;
    int64_t& at = in_front ? front : back;
    scores[at] = candidate.score;
    positions[at++] = candidate.position;
  }
}

void find_split_top_k(std::span<const Offer> offers, int64_t top_k, SplitTopK& out) {
  CHECK_GT(top_k, 0);
  int64_t offered = 0;
  for (const Offer& offer : offers) offered += offer.head->count;
  CHECK_GE(offered, top_k);
  Finder(offers, top_k, out).run();
}

int64_t read_chosen(const Offer& offer, int64_t number, SplitTopK& found, int32_t* out) {
  int64_t count = 0;
  for (const SplitTopK::Segment& segment : found.segments) {
    if (segment.offer != number) continue;
    for (int64_t i = 0; i < segment.count; ++i) {
      const float score = found.scores[static_cast<size_t>(segment.begin + i)];
      if (score < found.last_score || (score == found.last_score && found.by_position)) continue;
      out[count++] = offer.positions[segment.from + i];
    }
  }
  found.reads[static_cast<size_t>(number)].bytes += count * static_cast<int64_t>(sizeof(int32_t));
  for (const SplitTopK::Tie& tie : found.ties) {
    if (tie.offer == number) out[count++] = tie.position;
  }
  return count;
}

}  // namespace weft::kernels
