// The largest logit of a row and where it is first: exact in any order, so lanes are free.
#include "kernels/cpu/row_max.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/row_max.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

int64_t FirstLargest(const float* x, int64_t count) {
  const F32 d;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  VF best = hn::Set(d, x[0]);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) best = hn::Max(best, hn::LoadU(d, x + i));
  float largest = hn::GetLane(hn::MaxOfLanes(d, best));
  for (; i < count; ++i) largest = x[i] > largest ? x[i] : largest;
  i = 0;
  while (i + 1 < count && x[i] != largest) ++i;
  return i;
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(FirstLargest);
int64_t first_largest(const float* x, int64_t count) { return HWY_DYNAMIC_DISPATCH(FirstLargest)(x, count); }

}  // namespace weft::kernels
#endif  // HWY_ONCE
