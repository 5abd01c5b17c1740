#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/candidate_list.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/cpu/lanes-inl.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kStep = static_cast<int64_t>(kLanes);

// Appends the lanes of one vector that reach the floor and lie in [first, kStep), the last lane first; writes
// whole vectors. Returns how many.
HWY_INLINE int64_t Append(VF score, int64_t first, int64_t position, VF floor, float* held_scores,
                          int32_t* held_positions) {
  const F32 d;
  const I32 di;
  const VF lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const VF plain = hn::Add(hn::IfThenElse(hn::Eq(score, score), score, lowest), hn::Zero(d));
  const VF reversed = hn::Reverse(d, plain);
  const auto positions = hn::Reverse(di, hn::Iota(di, static_cast<int32_t>(position)));
  const auto mask = hn::And(hn::Ge(reversed, floor), hn::FirstN(d, static_cast<size_t>(kStep - first)));
  hn::StoreU(hn::Compress(reversed, mask), d, held_scores);
  hn::StoreU(hn::Compress(positions, hn::RebindMask(di, mask)), di, held_positions);
  return static_cast<int64_t>(hn::CountTrue(d, mask));
}

// Appends the scores that reach the floor behind `held`, the last first. Returns the new count.
int64_t AppendSurvivors(const float* scores, int64_t count, int64_t first_position, float floor,
                        float* held_scores, int32_t* held_positions, int64_t held) {
  const F32 d;
  const VF limit = hn::Set(d, floor);
  const auto append = [&](VF score, int64_t first, int64_t at) {
    held += Append(score, first, first_position + at, limit, held_scores + held, held_positions + held);
  };
  int64_t end = count;
  // Four vectors to a branch: late in a stream most such groups hold no survivor; early, which of the four
  // holds one cannot be predicted and is not asked. (NaN is not below the floor here: append() decides.)
  for (; end >= 4 * kStep; end -= 4 * kStep) {
    const float* from = scores + end - 4 * kStep;
    VF score[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) score[v] = hn::LoadU(d, from + v * kStep);
    const auto below = hn::And(hn::And(hn::Lt(score[0], limit), hn::Lt(score[1], limit)),
                               hn::And(hn::Lt(score[2], limit), hn::Lt(score[3], limit)));
    if (hn::AllTrue(d, below)) continue;
#pragma GCC unroll 4
    for (int v = 3; v >= 0; --v) append(score[v], 0, end - (4 - v) * kStep);
  }
  for (; end >= kStep; end -= kStep) append(hn::LoadU(d, scores + end - kStep), 0, end - kStep);
  if (end > 0) {  // the oldest few, in the upper lanes
    HWY_ALIGN float rest[kLanes] = {};
    for (int64_t i = 0; i < end; ++i) rest[kStep - end + i] = scores[i];
    append(hn::Load(d, rest), kStep - end, end - kStep);
  }
  return held;
}

int64_t CountGreater(const float* scores, int64_t count, float threshold) {
  const F32 d;
  const VF limit = hn::Set(d, threshold);
  int64_t greater = 0;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    greater += static_cast<int64_t>(hn::CountTrue(d, hn::Gt(hn::LoadU(d, scores + i), limit)));
  }
  for (; i < count; ++i) greater += scores[i] > threshold ? 1 : 0;
  return greater;
}

float Largest(const float* scores, int64_t count) {
  const F32 d;
  float largest = scores[0];
  int64_t i = 0;
  if (count >= kStep) {
    VF lanes = hn::LoadU(d, scores);
    for (i = kStep; i + kStep <= count; i += kStep) lanes = hn::Max(lanes, hn::LoadU(d, scores + i));
    largest = hn::GetLane(hn::MaxOfLanes(d, lanes));
  }
  for (; i < count; ++i) largest = scores[i] > largest ? scores[i] : largest;
  return largest;
}

// Keeps, in place and in order, the candidates above the threshold and, after the first `skip`, those equal
// to it. The arrays are padded by a vector beyond `count`. Returns how many stay.
int64_t Keep(float* scores, int32_t* positions, int64_t count, float threshold, int64_t skip) {
  const F32 d;
  const I32 di;
  const VF limit = hn::Set(d, threshold);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += kStep) {
    const VF score = hn::LoadU(d, scores + i);
    const auto position = hn::LoadU(di, positions + i);
    const auto valid = hn::FirstN(d, static_cast<size_t>(count - i));
    const auto equal = hn::And(valid, hn::Eq(score, limit));
    const auto equals = static_cast<int64_t>(hn::CountTrue(d, equal));
    if (skip > 0 && skip < equals) {
      HWY_ALIGN float s[kLanes];
      HWY_ALIGN int32_t p[kLanes];
      hn::Store(score, d, s);
      hn::Store(position, di, p);
      for (int64_t j = 0; j < kStep && i + j < count; ++j) {
        if (!(s[j] > threshold) && (s[j] != threshold || skip-- > 0)) continue;
        scores[kept] = s[j];
        positions[kept++] = p[j];
      }
      skip = 0;
      continue;
    }
    const auto above = hn::And(valid, hn::Gt(score, limit));
    const auto mask = skip > 0 ? above : hn::Or(above, equal);
    skip -= std::min(skip, equals);
    hn::StoreU(hn::Compress(score, mask), d, scores + kept);
    hn::StoreU(hn::Compress(position, hn::RebindMask(di, mask)), di, positions + kept);
    kept += static_cast<int64_t>(hn::CountTrue(d, mask));
  }
  return kept;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(AppendSurvivors);
HWY_EXPORT(CountGreater);
HWY_EXPORT(Largest);
HWY_EXPORT(Keep);

namespace {

constexpr int64_t kPadding = 16;  // kernels store whole vectors
constexpr int64_t kMostAtOnce = 256;

int64_t capacity(int64_t top_k) { return top_k + top_k / 2 + kMostAtOnce; }

// Floats in their order as integers, and back. The two zeros are neighbours.
constexpr int64_t ordinal(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  return bits < 0 ? int64_t{bits ^ 0x7fffffff} : int64_t{bits};
}
constexpr float from_ordinal(int64_t value) {
  const auto bits = static_cast<int32_t>(value);
  return std::bit_cast<float>(bits < 0 ? bits ^ 0x7fffffff : bits);
}

// Bisects for a threshold that at least `wanted` and at most `most` of the scores exceed; at least `wanted`
// exceed `low` (an ordinal). Where there is none, the threshold is the wanted-th largest score itself and
// `tied` is set.
struct Threshold {
  int64_t ordinal = 0;
  int64_t above = 0;  // scores that exceed it
  bool tied = false;
};
Threshold bisect(const float* scores, int64_t count, int64_t low, int64_t wanted, int64_t most) {
  const auto count_greater = HWY_DYNAMIC_DISPATCH(CountGreater);
  int64_t high = ordinal(HWY_DYNAMIC_DISPATCH(Largest)(scores, count));
  int64_t above_high = 0;  // fewer than `wanted`, always
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const int64_t greater = count_greater(scores, count, from_ordinal(middle));
    if (greater >= wanted && greater <= most) return {middle, greater, false};
    if (greater >= wanted) {
      low = middle;
    } else {
      high = middle;
      above_high = greater;
    }
  }
  return {high, above_high, true};
}

}  // namespace

Kth kth_largest(const float* scores, int64_t count, int64_t k) {
  const int64_t lowest = ordinal(-std::numeric_limits<float>::infinity());
  const Threshold found = bisect(scores, count, lowest - 1, k, k - 1);
  return {from_ordinal(found.ordinal) + 0.0f, found.above};
}

void CandidateList::reset(int64_t top_k) {
  top_k_ = top_k;
  count_ = 0;
  written_ = 0;
  floor_ = -std::numeric_limits<float>::infinity();
  const auto size = static_cast<size_t>(capacity(top_k) + kPadding);
  if (scores_.size() < size) {
    scores_.resize(size);
    positions_.resize(size);
  }
}

void CandidateList::make_room(int64_t count) {
  if (count_ + count > capacity(top_k_)) cut(top_k_, top_k_ + top_k_ / 8);
}

void CandidateList::offer(const float* scores, int64_t count, int64_t first_position) {
  for (int64_t end = count; end > 0;) {
    const int64_t n = std::min(kMostAtOnce, end);
    end -= n;
    make_room(n);
    const int64_t before = count_;
    count_ = HWY_DYNAMIC_DISPATCH(AppendSurvivors)(scores + end, n, first_position + end, floor_,
                                                   scores_.data(), positions_.data(), count_);
    written_ += count_ - before;
  }
}

void CandidateList::offer(const Candidate* candidates, int64_t count) {
  for (int64_t i = count - 1; i >= 0; --i) {
    make_room(1);
    if (!(candidates[i].score >= floor_)) continue;
    scores_[static_cast<size_t>(count_)] = candidates[i].score;
    positions_[static_cast<size_t>(count_++)] = candidates[i].position;
    ++written_;
  }
}

void CandidateList::cut(int64_t wanted, int64_t most) {
  if (count_ <= wanted) return;
  // Kept ties may equal the floor.
  const Threshold found = bisect(scores_.data(), count_, ordinal(floor_) - 1, wanted, most);
  const float threshold = from_ordinal(found.ordinal);
  int64_t skip = std::numeric_limits<int64_t>::max();  // ties that are dropped: the newest
  if (found.tied) {
    floor_ = threshold;
    // How many reach the threshold: those above the next lower number, if there is one.
    const int64_t reached =
        std::isinf(threshold) && threshold < 0
            ? count_
            : HWY_DYNAMIC_DISPATCH(CountGreater)(scores_.data(), count_, from_ordinal(found.ordinal - 1));
    skip = reached - wanted;
  } else {
    floor_ = from_ordinal(found.ordinal + 1);
  }
  count_ = HWY_DYNAMIC_DISPATCH(Keep)(scores_.data(), positions_.data(), count_, threshold, skip);
}

int64_t CandidateList::take(Candidate* out) {
  cut(top_k_, top_k_);
  for (int64_t i = 0; i < count_; ++i) {
    const auto from = static_cast<size_t>(count_ - 1 - i);
    out[i] = {scores_[from], positions_[from]};
  }
  return count_;
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
