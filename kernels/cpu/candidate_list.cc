#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/candidate_list.cc"
#include "hwy/foreach_target.h"
//
#include "hwy/highway.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/cpu/lanes-inl.h"

#include <algorithm>
#include <bit>
#include <limits>

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kStep = static_cast<int64_t>(kLanes);

// Appends the lanes of one vector that the mask names; writes whole vectors. Returns how many.
template <class M>
HWY_INLINE int64_t Append(VF score, M mask, int64_t position, float* held_scores, int32_t* held_positions) {
  const I32 di;
  const auto positions = hn::Iota(di, static_cast<int32_t>(position));
  hn::StoreU(hn::Compress(score, mask), F32(), held_scores);
  hn::StoreU(hn::Compress(positions, hn::RebindMask(di, mask)), di, held_positions);
  return static_cast<int64_t>(hn::CountTrue(F32(), mask));
}

// Appends the scores that exceed the threshold behind `held`. Returns the new count.
int64_t AppendSurvivors(const float* scores, int64_t count, int64_t first_position, float threshold,
                        float* held_scores, int32_t* held_positions, int64_t held) {
  const F32 d;
  const VF limit = hn::Set(d, threshold);
  int64_t i = 0;
  // Four vectors to a branch: late in a stream most such groups hold no survivor; early, which of the four
  // holds one cannot be predicted and is not asked.
  for (; i + 4 * kStep <= count; i += 4 * kStep) {
    VF score[4];
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) score[v] = hn::LoadU(d, scores + i + v * kStep);
    const auto any = hn::Or(hn::Or(hn::Gt(score[0], limit), hn::Gt(score[1], limit)),
                            hn::Or(hn::Gt(score[2], limit), hn::Gt(score[3], limit)));
    if (hn::AllFalse(d, any)) continue;
#pragma GCC unroll 4
    for (int v = 0; v < 4; ++v) {
      const VF plain = hn::Add(score[v], hn::Zero(d));
      held += Append(plain, hn::Gt(plain, limit), first_position + i + v * kStep, held_scores + held,
                     held_positions + held);
    }
  }
  for (; i < count; i += kStep) {
    const VF score = hn::Add(LoadPart(d, scores + i, count - i), hn::Zero(d));
    const auto valid = hn::FirstN(d, static_cast<size_t>(count - i));
    held += Append(score, hn::And(hn::Gt(score, limit), valid), first_position + i, held_scores + held,
                   held_positions + held);
  }
  return held;
}

// Appends every score, NaN as −infinity.
int64_t AppendAll(const float* scores, int64_t count, int64_t first_position, float* held_scores,
                  int32_t* held_positions, int64_t held) {
  const F32 d;
  const VF lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < count; i += kStep) {
    const VF score = hn::Add(LoadPart(d, scores + i, count - i), hn::Zero(d));
    hn::StoreU(hn::IfThenElse(hn::Eq(score, score), score, lowest), d, held_scores + held + i);
    hn::StoreU(hn::Iota(I32(), static_cast<int32_t>(first_position + i)), I32(), held_positions + held + i);
  }
  return held + count;
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

// Keeps, in place and in order, the candidates above the threshold and the first `ties` equal to it. The
// arrays are padded by a vector beyond `count`. Returns how many stay.
int64_t Keep(float* scores, int32_t* positions, int64_t count, float threshold, int64_t ties) {
  const F32 d;
  const I32 di;
  const VF limit = hn::Set(d, threshold);
  int64_t kept = 0;
  for (int64_t i = 0; i < count; i += kStep) {
    const VF score = hn::LoadU(d, scores + i);
    const auto position = hn::LoadU(di, positions + i);
    const auto valid = hn::FirstN(d, static_cast<size_t>(count - i));
    const auto equal = hn::And(valid, hn::Eq(score, limit));
    if (ties > 0 && !hn::AllFalse(d, equal)) {
      HWY_ALIGN float s[kLanes];
      HWY_ALIGN int32_t p[kLanes];
      hn::Store(score, d, s);
      hn::Store(position, di, p);
      for (int64_t j = 0; j < kStep && i + j < count; ++j) {
        if (!(s[j] > threshold) && (s[j] != threshold || ties-- <= 0)) continue;
        scores[kept] = s[j];
        positions[kept++] = p[j];
      }
      continue;
    }
    const auto mask = hn::And(valid, hn::Gt(score, limit));
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
HWY_EXPORT(AppendAll);
HWY_EXPORT(CountGreater);
HWY_EXPORT(Largest);
HWY_EXPORT(Keep);

namespace {

constexpr int64_t kPadding = 16;  // kernels store whole vectors
constexpr int64_t kMostAtOnce = 256;

// Floats in their order as integers, and back. The two zeros are neighbours.
constexpr int64_t ordinal(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  return bits < 0 ? int64_t{bits ^ 0x7fffffff} : int64_t{bits};
}
constexpr float from_ordinal(int64_t value) {
  const auto bits = static_cast<int32_t>(value);
  return std::bit_cast<float>(bits < 0 ? bits ^ 0x7fffffff : bits);
}

}  // namespace

void CandidateList::reset(int64_t top_k) {
  top_k_ = top_k;
  count_ = 0;
  open_ = true;
  // A cut leaves at most 1.25 top_k, so at least 0.75 top_k + 512 enter before the next.
  const auto size = static_cast<size_t>(2 * top_k + 512 + kPadding);
  if (scores_.size() < size) {
    scores_.resize(size);
    positions_.resize(size);
  }
}

void CandidateList::make_room(int64_t count) {
  if (count_ + count <= 2 * top_k_ + 512) return;
  cut(top_k_, top_k_ + top_k_ / 4);
}

void CandidateList::offer(const float* scores, int64_t count, int64_t first_position) {
  for (int64_t i = 0; i < count; i += kMostAtOnce) {
    const int64_t n = std::min(kMostAtOnce, count - i);
    make_room(n);
    float* held_scores = scores_.data();
    int32_t* held_positions = positions_.data();
    count_ = open_ ? HWY_DYNAMIC_DISPATCH(AppendAll)(scores + i, n, first_position + i, held_scores,
                                                     held_positions, count_)
                   : HWY_DYNAMIC_DISPATCH(AppendSurvivors)(scores + i, n, first_position + i, threshold_,
                                                           held_scores, held_positions, count_);
  }
}

void CandidateList::offer(const Candidate* candidates, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    make_room(1);
    if (!open_ && !(candidates[i].score > threshold_)) continue;
    scores_[static_cast<size_t>(count_)] = candidates[i].score;
    positions_[static_cast<size_t>(count_++)] = candidates[i].position;
  }
}

void CandidateList::cut(int64_t wanted, int64_t most) {
  if (count_ <= wanted) return;
  const auto count_greater = HWY_DYNAMIC_DISPATCH(CountGreater);
  // At least `wanted` exceed low, fewer than `wanted` exceed high. (Kept ties may equal the last threshold.)
  int64_t low = ordinal(open_ ? -std::numeric_limits<float>::infinity() : threshold_) - 1;
  int64_t high = ordinal(HWY_DYNAMIC_DISPATCH(Largest)(scores_.data(), count_));
  int64_t above_high = 0;
  int64_t ties = 0;
  float threshold = 0;
  for (;;) {
    if (high - low == 1) {  // the wanted-th score is `high` itself, and several have it
      threshold = from_ordinal(high);
      ties = wanted - above_high;
      break;
    }
    const int64_t middle = low + (high - low) / 2;
    threshold = from_ordinal(middle);
    const int64_t greater = count_greater(scores_.data(), count_, threshold);
    if (greater >= wanted && greater <= most) break;
    if (greater > most) {
      low = middle;
    } else {
      high = middle;
      above_high = greater;
    }
  }
  count_ = HWY_DYNAMIC_DISPATCH(Keep)(scores_.data(), positions_.data(), count_, threshold, ties);
  threshold_ = threshold;
  open_ = false;
}

int64_t CandidateList::take(Candidate* out) {
  cut(top_k_, top_k_);
  for (int64_t i = 0; i < count_; ++i) {
    out[i] = {scores_[static_cast<size_t>(i)], positions_[static_cast<size_t>(i)]};
  }
  return count_;
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
