#include "kernels/cpu/index_panel.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/index_panel.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/lanes-inl.h"
#include "kernels/cpu/transpose-inl.h"
#include "kernels/fp8.h"
#include "kernels/fp8_rows.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {
namespace {

// keys: [lanes][words]; panel: [words][lanes].
void TransposeKeys(const float* keys, int64_t words, int64_t lanes, float* panel) {
  const F32 d;
  constexpr int64_t kSide = static_cast<int64_t>(kLanes);
  if (words % kSide != 0 || lanes % kSide != 0) {
    for (int64_t key = 0; key < lanes; ++key) {
      for (int64_t w = 0; w < words; ++w) std::memcpy(panel + w * lanes + key, keys + key * words + w, 4);
    }
    return;
  }
  for (int64_t key = 0; key < lanes; key += kSide) {
    for (int64_t w = 0; w < words; w += kSide) {
      VF square[kLanes];
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i) {
        square[i] = hn::LoadU(d, keys + (key + static_cast<int64_t>(i)) * words + w);
      }
      Transpose(square);
#pragma GCC unroll 16
      for (size_t i = 0; i < kLanes; ++i) {
        hn::StoreU(square[i], d, panel + (w + static_cast<int64_t>(i)) * lanes + key);
      }
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(TransposeKeys);

void decode_index_panel(const uint8_t* codes, int64_t width, int64_t lanes, float* panel) {
  alignas(64) float keys[16 * kFp8Group / 2];
  decode_e4m3(codes, lanes * width, 1, reinterpret_cast<uint16_t*>(keys));
  HWY_DYNAMIC_DISPATCH(TransposeKeys)(keys, width / 2, lanes, panel);
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
