// Row-wise ops by lanes. Sums follow the 16-lane order of kernels/elementwise.h; everything else is lane by
// lane.
#include "kernels/elementwise.h"

#include <cmath>

#include "proto/vocab/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/elementwise.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
// After foreach_target.
#include "hwy/highway.h"
#include "kernels/cpu/exp2-inl.h"
#include "kernels/cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels {
namespace HWY_NAMESPACE {

// Calls body(index, lanes in use) for every vector of a row. The last one may be partial.
template <typename Body>
HWY_INLINE void ForVectors(int64_t width, const Body& body) {
  for (int64_t i = 0; i < width; i += static_cast<int64_t>(kLanes)) body(i, width - i);
}

// Σ term(vector) over a row in the 16-lane order; term sees zeros past the end and must map them to zero.
template <typename Term>
HWY_INLINE float SumRow(const float* x, int64_t width, const Term& add_term) {
  const F32 d;
  VF sums[kVectorsPer16];
  for (auto& sum : sums) sum = hn::Zero(d);
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    for (size_t v = 0; v < kVectorsPer16; ++v) sums[v] = add_term(hn::LoadU(d, x + i + v * kLanes), sums[v]);
  }
  for (size_t v = 0; v < kVectorsPer16; ++v) {
    const int64_t left = width - i - static_cast<int64_t>(v * kLanes);
    if (left > 0) sums[v] = add_term(LoadPart(d, x + i + v * kLanes, left), sums[v]);
  }
  return SumLanes16(sums);
}

HWY_INLINE float Sqrt1(float x) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(hn::Sqrt(hn::Set(d, x)));
}
HWY_INLINE float ReciprocalRoot(float x) { return 1.0f / Sqrt1(x); }

void RmsNorm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
             float* out, int64_t out_stride) {
  const F32 d;
  for (int64_t r = 0; r < rows; ++r, x += x_stride, out += out_stride) {
    const float squares = SumRow(x, width, [](VF v, VF sum) HWY_ATTR { return Fma(v, v, sum); });
    const VF root = hn::Set(d, ReciprocalRoot(squares / static_cast<float>(width) + eps));
    ForVectors(width, [&](int64_t i, int64_t left) HWY_ATTR {
      const VF scaled = hn::Mul(LoadPart(d, x + i, left), root);
      StorePart(hn::Mul(scaled, LoadPart(d, weight + i, left)), d, out + i, left);
    });
  }
}

void LayerNorm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps,
               int64_t rows, int64_t width, float* out, int64_t out_stride) {
  const F32 d;
  const float count = static_cast<float>(width);
  for (int64_t r = 0; r < rows; ++r, x += x_stride, out += out_stride) {
    const float total = SumRow(x, width, [](VF v, VF sum) HWY_ATTR { return hn::Add(sum, v); });
    const VF mean = hn::Set(d, total / count);
    // The differences are stored first: a partial vector then has zeros, not −mean, past the end.
    ForVectors(width, [&](int64_t i, int64_t left)
                          HWY_ATTR { StorePart(hn::Sub(LoadPart(d, x + i, left), mean), d, out + i, left); });
    const float squares = SumRow(out, width, [](VF v, VF sum) HWY_ATTR { return Fma(v, v, sum); });
    const VF root = hn::Set(d, ReciprocalRoot(squares / count + eps));
    ForVectors(width, [&](int64_t i, int64_t left) HWY_ATTR {
      const VF scaled = hn::Mul(LoadPart(d, out + i, left), root);
      StorePart(Fma(scaled, LoadPart(d, weight + i, left), LoadPart(d, bias + i, left)), d, out + i, left);
    });
  }
}

// (a, b) → (a·c − b·s, b·c + a·s), each as a product and a fused multiply-add.
template <class V>
HWY_INLINE void Rotate(V a, V b, V cosine, V sine, V& first, V& second) {
  first = Fma(a, cosine, hn::Neg(hn::Mul(b, sine)));
  second = Fma(b, cosine, hn::Mul(a, sine));
}

template <class D>
HWY_INLINE void RotateAt(D d, float* x, int64_t half, int64_t j, const float* cosine, const float* sine,
                         RopeLayout layout) {
  hn::Vec<D> a, b, first, second;
  if (layout == RopeLayout::kInterleaved) {
    hn::LoadInterleaved2(d, x + 2 * j, a, b);
  } else {
    a = hn::LoadU(d, x + j);
    b = hn::LoadU(d, x + half + j);
  }
  Rotate(a, b, hn::LoadU(d, cosine + j), hn::LoadU(d, sine + j), first, second);
  if (layout == RopeLayout::kInterleaved) {
    hn::StoreInterleaved2(first, second, d, x + 2 * j);
  } else {
    hn::StoreU(first, d, x + j);
    hn::StoreU(second, d, x + half + j);
  }
}

void Rope(float* x, int64_t width, const float* cosine, const float* sine, RopeLayout layout) {
  const int64_t half = width / 2;
  const int64_t lanes = static_cast<int64_t>(kLanes);
  int64_t j = 0;
  for (; j + lanes <= half; j += lanes) RotateAt(F32(), x, half, j, cosine, sine, layout);
  for (; j < half; ++j) {
    const hn::CappedTag<float, 1> one;
    float& a = layout == RopeLayout::kInterleaved ? x[2 * j] : x[j];
    float& b = layout == RopeLayout::kInterleaved ? x[2 * j + 1] : x[half + j];
    hn::Vec<decltype(one)> first, second;
    Rotate(hn::Set(one, a), hn::Set(one, b), hn::Set(one, cosine[j]), hn::Set(one, sine[j]), first, second);
    a = hn::GetLane(first);
    b = hn::GetLane(second);
  }
}

// exp(−x) as 2^(−x·log2 e).
template <class V>
HWY_INLINE V ExpOfNegative(V x) {
  const hn::DFromV<V> d;
  return Exp2(hn::Mul(x, hn::Set(d, -0x1.715476p+0f)));
}
template <class V>
HWY_INLINE V OnePlusExpOfNegative(V x) {
  return hn::Add(hn::Set(hn::DFromV<V>(), 1.0f), ExpOfNegative(x));
}

void Swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
            int64_t width, float* out, int64_t out_stride) {
  const F32 d;
  for (int64_t r = 0; r < rows; ++r, gate += gate_stride, up += up_stride, out += out_stride) {
    ForVectors(width, [&](int64_t i, int64_t left) HWY_ATTR {
      const VF g = LoadPart(d, gate + i, left);
      const VF silu = hn::Div(g, OnePlusExpOfNegative(g));
      StorePart(hn::Mul(silu, LoadPart(d, up + i, left)), d, out + i, left);
    });
  }
}

void Add(float* a, const float* b, int64_t count) {
  const F32 d;
  ForVectors(count, [&](int64_t i, int64_t left) HWY_ATTR {
    StorePart(hn::Add(LoadPart(d, a + i, left), LoadPart(d, b + i, left)), d, a + i, left);
  });
}

void Axpy(float factor, const float* x, float* y, int64_t count) {
  const F32 d;
  const VF factors = hn::Set(d, factor);
  ForVectors(count, [&](int64_t i, int64_t left) HWY_ATTR {
    StorePart(Fma(factors, LoadPart(d, x + i, left), LoadPart(d, y + i, left)), d, y + i, left);
  });
}

void Scale(float* x, float factor, int64_t count) {
  const F32 d;
  const VF factors = hn::Set(d, factor);
  ForVectors(count, [&](int64_t i, int64_t left)
                        HWY_ATTR { StorePart(hn::Mul(LoadPart(d, x + i, left), factors), d, x + i, left); });
}

void Multiply(float* a, const float* b, int64_t count) {
  const F32 d;
  ForVectors(count, [&](int64_t i, int64_t left) HWY_ATTR {
    StorePart(hn::Mul(LoadPart(d, a + i, left), LoadPart(d, b + i, left)), d, a + i, left);
  });
}

void Hadamard(float* x, int64_t width) {
  const F32 d;
  for (int64_t apart = 1; apart < width; apart *= 2) {
    for (int64_t block = 0; block < width; block += 2 * apart) {
      ForVectors(apart, [&](int64_t i, int64_t left) HWY_ATTR {
        float* low = x + block + i;
        float* high = low + apart;
        const VF a = LoadPart(d, low, left), b = LoadPart(d, high, left);
        StorePart(hn::Add(a, b), d, low, left);
        StorePart(hn::Sub(a, b), d, high, left);
      });
    }
  }
  Scale(x, ReciprocalRoot(static_cast<float>(width)), width);
}

// By the exponent bits: works whatever the thread's floating-point mode.
bool AllFinite(const float* x, int64_t count) {
  const U32 du;
  const VU exponent = hn::Set(du, 0x7f800000u);
  VU worst = hn::Zero(du);
  ForVectors(count, [&](int64_t i, int64_t left) HWY_ATTR {
    const VU bits = hn::BitCast(du, LoadPart(F32(), x + i, left));
    worst = hn::Max(worst, hn::And(bits, exponent));
  });
  return hn::GetLane(hn::MaxOfLanes(du, worst)) < 0x7f800000u;
}

bool AllFiniteBf16(const uint16_t* x, int64_t count) {
  constexpr uint16_t kExponent = 0x7f80;
  const hn::ScalableTag<uint16_t> d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto exponent = hn::Set(d, kExponent);
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    if (!hn::AllFalse(d, hn::Eq(hn::And(hn::LoadU(d, x + i), exponent), exponent))) return false;
  }
  for (; i < count; ++i) {
    if ((x[i] & kExponent) == kExponent) return false;
  }
  return true;
}

float Exp2One(float x) {
  const hn::CappedTag<float, 1> d;
  return hn::GetLane(Exp2(hn::Set(d, x)));
}

void Exp2Row(const float* x, float* out, int64_t count) {
  const F32 d;
  ForVectors(count, [&](int64_t i, int64_t left)
                        HWY_ATTR { StorePart(Exp2(LoadPart(d, x + i, left)), d, out + i, left); });
}

float SigmoidOne(float x) {
  const hn::CappedTag<float, 1> d;
  return 1.0f / hn::GetLane(OnePlusExpOfNegative(hn::Set(d, x)));
}

void SigmoidRow(const float* x, float* out, int64_t count) {
  const F32 d;
  ForVectors(count, [&](int64_t i, int64_t left) HWY_ATTR {
    const VF divisor = OnePlusExpOfNegative(LoadPart(d, x + i, left));
    StorePart(hn::Div(hn::Set(d, 1.0f), divisor), d, out + i, left);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace weft::kernels
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(RmsNorm);
HWY_EXPORT(LayerNorm);
HWY_EXPORT(Rope);
HWY_EXPORT(Swiglu);
HWY_EXPORT(Add);
HWY_EXPORT(Axpy);
HWY_EXPORT(Scale);
HWY_EXPORT(Multiply);
HWY_EXPORT(Hadamard);
HWY_EXPORT(AllFinite);
HWY_EXPORT(AllFiniteBf16);
HWY_EXPORT(Exp2One);
HWY_EXPORT(Exp2Row);
HWY_EXPORT(SigmoidOne);
HWY_EXPORT(SigmoidRow);

void rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t rows, int64_t width,
              float* out, int64_t out_stride) {
  CHECK_GT(width, 0);
  HWY_DYNAMIC_DISPATCH(RmsNorm)(x, x_stride, weight, eps, rows, width, out, out_stride);
}

void layer_norm(const float* x, int64_t x_stride, const float* weight, const float* bias, float eps,
                int64_t rows, int64_t width, float* out, int64_t out_stride) {
  CHECK_GT(width, 0);
  HWY_DYNAMIC_DISPATCH(LayerNorm)(x, x_stride, weight, bias, eps, rows, width, out, out_stride);
}

void rope(float* x, int64_t width, const float* cosine, const float* sine, RopeLayout layout) {
  CHECK_EQ(width % 2, 0);
  HWY_DYNAMIC_DISPATCH(Rope)(x, width, cosine, sine, layout);
}

void swiglu(const float* gate, int64_t gate_stride, const float* up, int64_t up_stride, int64_t rows,
            int64_t width, float* out, int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(Swiglu)(gate, gate_stride, up, up_stride, rows, width, out, out_stride);
}

void add(float* a, const float* b, int64_t count) { HWY_DYNAMIC_DISPATCH(Add)(a, b, count); }
void axpy(float scale, const float* x, float* y, int64_t count) {
  HWY_DYNAMIC_DISPATCH(Axpy)(scale, x, y, count);
}
void scale(float* x, float factor, int64_t count) { HWY_DYNAMIC_DISPATCH(Scale)(x, factor, count); }

void multiply(float* a, const float* b, int64_t count) { HWY_DYNAMIC_DISPATCH(Multiply)(a, b, count); }

void hadamard(float* x, int64_t width) {
  CHECK(width > 0 && (width & (width - 1)) == 0, "width ", width);
  HWY_DYNAMIC_DISPATCH(Hadamard)(x, width);
}
bool all_finite(const float* x, int64_t count) { return HWY_DYNAMIC_DISPATCH(AllFinite)(x, count); }
bool all_finite(DType dtype, const void* x, int64_t count) {
  return dtype == DType::kF32 ? all_finite(static_cast<const float*>(x), count)
                              : HWY_DYNAMIC_DISPATCH(AllFiniteBf16)(static_cast<const uint16_t*>(x), count);
}
float sigmoid(float x) { return HWY_DYNAMIC_DISPATCH(SigmoidOne)(x); }
void sigmoid(const float* x, float* out, int64_t count) { HWY_DYNAMIC_DISPATCH(SigmoidRow)(x, out, count); }
float exp2(float x) { return HWY_DYNAMIC_DISPATCH(Exp2One)(x); }
void exp2(const float* x, float* out, int64_t count) { HWY_DYNAMIC_DISPATCH(Exp2Row)(x, out, count); }

}  // namespace weft::kernels
#endif  // HWY_ONCE
