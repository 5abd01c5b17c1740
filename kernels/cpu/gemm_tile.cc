// Register tiles for float32, and for bf16 where there is no dot-product instruction.
//
// Why 6 rows × 4 panels on AVX-512: 24 accumulators, 4 panel vectors and a broadcast fill 29 of 32 registers
// and need 10 loads for 24 multiply-adds, well under the two loads a core does beside two multiply-adds. On
// AVX2 (16 registers, two vectors a panel) 6 × 1: 12 + 2 + 1.
#include "kernels/cpu/gemm_tile.h"

#include <cstring>

#include "kernels/cpu/dispatch.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gemm_tile.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/bf16-inl.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

constexpr int kV = static_cast<int>(kVectorsPer16);
constexpr int kAccumulators = HWY_TARGET == HWY_AVX3 ? 24 : 12;
// Registers want straight-line code; the portable target has none to fill, and would only compile for
// minutes.
constexpr int kUnroll = kV > 2 ? 1 : 8;

constexpr int MaxPanels(int rows) {
  const int panels = kAccumulators / (rows * kV);
  if (panels >= kTilePanels) return kTilePanels;
  return panels > 4 ? 4 : (panels < 1 ? 1 : panels);
}

// One step in every lane: a step's 4 bytes of x are broadcast.
struct F32Step {
  static HWY_INLINE VF Run(VU x, VU w, VF sum) {
    return Fma(hn::BitCast(F32(), x), hn::BitCast(F32(), w), sum);
  }
};
struct PairStep {
  static HWY_INLINE VF Run(VU x, VU w, VF sum) { return PairDot(x, w, sum); }
};

HWY_INLINE VU Broadcast(const char* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return hn::Set(U32(), word);
}

// One accumulator an output, over steps [begin, end).
template <class Step, int R, int P>
HWY_INLINE void Walk(const char* const (&x)[R], const uint32_t* const (&w)[P], int64_t begin, int64_t end,
                     VF (&sums)[R][P][kV]) {
  const U32 du;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  for (int64_t step = begin; step < end; ++step) {
    VU panel[P][kV];
#pragma GCC unroll kUnroll
    for (int p = 0; p < P; ++p) {
#pragma GCC unroll kUnroll
      for (int v = 0; v < kV; ++v) panel[p][v] = hn::LoadU(du, w[p] + step * 16 + v * lanes);
    }
#pragma GCC unroll kUnroll
    for (int r = 0; r < R; ++r) {
      const VU scalar = Broadcast(x[r] + step * 4);
#pragma GCC unroll kUnroll
      for (int p = 0; p < P; ++p) {
#pragma GCC unroll kUnroll
        for (int v = 0; v < kV; ++v) sums[r][p][v] = Step::Run(scalar, panel[p][v], sums[r][p][v]);
      }
    }
  }
}

template <int R, int P>
HWY_INLINE void Start(const GemmTile& t, VF (&sums)[R][P][kV]) {
  const F32 d;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      for (int v = 0; v < kV; ++v) {
        sums[r][p][v] = t.carry ? LoadPart(d, t.y[p] + r * t.y_stride + v * lanes, t.columns[p] - v * lanes)
                                : hn::Zero(d);
      }
    }
  }
}

// Where the accumulators are the result.
template <class Step, int R, int P>
void RunPlain(const GemmTile& t, const char* const (&x)[R], const uint32_t* const (&w)[P]) {
  VF sums[R][P][kV];
  Start<R, P>(t, sums);
  int64_t fetched = 0;
  for (int64_t step = 0; step < t.steps;) {
    const int64_t fetch_end =
        fetched + t.fetch_per_round < t.fetch_steps ? fetched + t.fetch_per_round : t.fetch_steps;
    for (; fetched < fetch_end; ++fetched) {
      for (int p = 0; p < P; ++p) __builtin_prefetch(t.fetch[p] + fetched * 16, 0, 2);
    }
    const int64_t end = step + kFetchEvery < t.steps ? step + kFetchEvery : t.steps;
    Walk<Step, R, P>(x, w, step, end, sums);
    step = end;
  }
  const int64_t lanes = static_cast<int64_t>(kLanes);
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) {
      for (int v = 0; v < kV; ++v) {
        StorePart(sums[r][p][v], F32(), t.y[p] + r * t.y_stride + v * lanes, t.columns[p] - v * lanes);
      }
    }
  }
}

// y = fma(scales, sums, y or +0); the sums start again.
template <int R, int P>
HWY_INLINE void AddScaled(const GemmTile& t, int64_t block, bool add, VF (&sums)[R][P][kV]) {
  const F32 d;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  for (int p = 0; p < P; ++p) {
    for (int v = 0; v < kV; ++v) {
      const VF scales = hn::LoadU(d, t.scales[p] + block * t.scale_stride + v * lanes);
      for (int r = 0; r < R; ++r) {
        float* y = t.y[p] + r * t.y_stride + v * lanes;
        const int64_t columns = t.columns[p] - v * lanes;
        const VF base = add ? LoadPart(d, y, columns) : hn::Zero(d);
        StorePart(Fma(scales, sums[r][p][v], base), d, y, columns);
        sums[r][p][v] = hn::Zero(d);
      }
    }
  }
}

// Where the accumulators are scaled, block by block. Nothing is fetched early.
template <class Step, int R, int P>
void RunScaled(const GemmTile& t, const char* const (&x)[R], const uint32_t* const (&w)[P]) {
  VF sums[R][P][kV];
  Start<R, P>(t, sums);
  int64_t end = t.block_steps > 0 && t.first_steps < t.steps ? t.first_steps : t.steps;
  for (int64_t step = 0, block = 0;; ++block) {
    Walk<Step, R, P>(x, w, step, end, sums);
    AddScaled<R, P>(t, block, t.add || block > 0, sums);
    if (end == t.steps) return;
    step = end;
    end = end + t.block_steps < t.steps ? end + t.block_steps : t.steps;
  }
}

template <class Step, int R, int P>
void RunTile(const GemmTile& t) {
  const uint32_t* w[P];
  const char* x[R];
  for (int p = 0; p < P; ++p) w[p] = t.w[p];
  for (int r = 0; r < R; ++r) x[r] = reinterpret_cast<const char*>(t.x) + r * t.x_stride_bytes;
  t.scales[0] == nullptr ? RunPlain<Step, R, P>(t, x, w) : RunScaled<Step, R, P>(t, x, w);
}

// From run-time counts to the compiled tile; P counts down to the first that fits.
template <class Step, int R, int P>
void ChoosePanels(const GemmTile& t) {
  if constexpr (P > 1) {
    if (t.panels < P) return ChoosePanels<Step, R, (P > 4 ? 4 : P - 1)>(t);
  }
  RunTile<Step, R, P>(t);
}

template <class Step>
void ChooseRows(const GemmTile& t) {
  switch (t.rows) {
    case 1:
      return ChoosePanels<Step, 1, MaxPanels(1)>(t);
    case 2:
      return ChoosePanels<Step, 2, MaxPanels(2)>(t);
    case 3:
      return ChoosePanels<Step, 3, MaxPanels(3)>(t);
    case 4:
      return ChoosePanels<Step, 4, MaxPanels(4)>(t);
    case 5:
      return ChoosePanels<Step, 5, MaxPanels(5)>(t);
    case 6:
      return ChoosePanels<Step, 6, MaxPanels(6)>(t);
  }
}

template <class Step>
TileKernel MakeKernel() {
  TileKernel kernel;
  kernel.run = ChooseRows<Step>;
  for (int rows = 1; rows <= kTileRows; ++rows) kernel.max_panels[rows] = MaxPanels(rows);
  return kernel;
}

TileKernel F32Tile() { return MakeKernel<F32Step>(); }
TileKernel PairTile() { return MakeKernel<PairStep>(); }

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(F32Tile);
HWY_EXPORT(PairTile);

TileKernel f32_tile() { return HWY_DYNAMIC_DISPATCH(F32Tile)(); }
TileKernel bf16_tile() { return have_bf16_dot() ? bf16_tile_avx512bf16() : HWY_DYNAMIC_DISPATCH(PairTile)(); }

}  // namespace weft::kernels
#endif  // HWY_ONCE
