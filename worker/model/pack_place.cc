#include "worker/model/pack_place.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "kernels/elementwise.h"
#include "kernels/quantised.h"

namespace weft::worker {

namespace {

float widen_half(uint16_t half) {
  const auto sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t fraction = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: fraction · 2⁻²⁴, exact in float32
    const float value = static_cast<float>(fraction) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  const uint32_t wide = exponent == 31 ? 0xffu : exponent + 112;
  return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

// The elements [first, first + count) of a tensor as kernels can read them: aligned, float32 or bf16. Points
// into the mapping where that will do.
struct Elements {
  DType dtype = DType::kF32;
  const void* data = nullptr;
  std::vector<float> widened;
  std::vector<std::byte> aligned;
};

Elements elements_of(const Tensor& tensor, int64_t first, int64_t count) {
  Elements out;
  const auto size = static_cast<size_t>(count);
  if (tensor.type == TensorType::kF16) {
    out.widened.resize(size);
    const std::byte* at = tensor.data + first * 2;
    for (size_t i = 0; i < size; ++i) {
      uint16_t half = 0;
      std::memcpy(&half, at + 2 * i, sizeof half);
      out.widened[i] = widen_half(half);
    }
    out.data = out.widened.data();
    return out;
  }
  out.dtype = tensor.type == TensorType::kBF16 ? DType::kBF16 : DType::kF32;
  const size_t width = dtype_bytes(out.dtype);
  const std::byte* at = tensor.data + static_cast<size_t>(first) * width;
  out.data = at;
  if (reinterpret_cast<uintptr_t>(at) % width != 0) {
    out.aligned.assign(at, at + size * width);
    out.data = out.aligned.data();
  }
  return out;
}

void pack_plain(const WeightPlace& place, const FoundSource& found, std::byte* out) {
  const WeightSource& source = *found.source;
  // The span of elements that the place reads.
  const int64_t rows = place.form == WeightForm::kVector ? 1 : place.outputs;
  const int64_t last = (place.groups - 1) * source.group_stride + (rows - 1) * source.output_stride +
                       (place.k - 1) * source.k_stride;
  const Elements elements = elements_of(*found.item->tensor, source.offset, last + 1);
  if (place.form == WeightForm::kPacked) {
    const kernels::PackSource from{.dtype = elements.dtype,
                                   .data = elements.data,
                                   .group_stride = source.group_stride,
                                   .output_stride = source.output_stride,
                                   .k_stride = source.k_stride};
    kernels::pack_matrix(place.dtype, place.groups, place.outputs, place.k, from, out, 0, place.groups);
    return;
  }
  const int64_t count = rows * place.k;
  if (elements.dtype == place.dtype) {
    std::memcpy(out, elements.data, static_cast<size_t>(place.bytes));
  } else if (place.dtype == DType::kF32) {
    kernels::convert_to_f32(elements.data, elements.dtype, count, reinterpret_cast<float*>(out));
  } else {
    kernels::convert(static_cast<const float*>(elements.data), count, place.dtype, out);
  }
}

// ---- quantised --------------------------------------------------------------------------------------

const uint8_t* bytes_of(const Tensor& tensor) { return reinterpret_cast<const uint8_t*>(tensor.data); }

// 2^(code − 127); 255 is no number.
float e8m0_to_f32(uint8_t code) {
  if (code == 0xff) return std::numeric_limits<float>::quiet_NaN();
  return std::ldexp(1.0f, int{code} - 127);
}

std::vector<float> floats_of(const Tensor& tensor) {
  if (tensor.type == TensorType::kE8M0) {
    std::vector<float> out;
    for (int64_t i = 0; i < tensor.count(); ++i) out.push_back(e8m0_to_f32(bytes_of(tensor)[i]));
    return out;
  }
  const Elements elements = elements_of(tensor, 0, tensor.count());
  std::vector<float> out(static_cast<size_t>(tensor.count()));
  kernels::convert_to_f32(elements.data, elements.dtype, tensor.count(), out.data());
  return out;
}

// A quantised matrix as it is stored: [outputs][k].
struct QuantisedMatrix {
  int64_t outputs = 0, k = 0;
  std::vector<float> scales;  // kFp8: of the blocks; NVFP4: the one that multiplies
  kernels::Fp8Source fp8;
  kernels::Fp4Source fp4;
};

Result<QuantisedMatrix> quantised_matrix(const WeightPlace& place, const FoundSource& found) {
  QuantisedMatrix out;
  const Tensor& codes = *found.item->tensor;
  const bool is_fp8 = found.coding == WeightCoding::kFp8;
  out.outputs = codes.shape[0];
  out.k = codes.shape[1] * (is_fp8 ? 1 : 2);
  out.scales = floats_of(*found.scales.back()->tensor);
  const auto bad = [](const Checkpoint::Item& item, const WeightSource& source, const char* why) {
    return error(ErrorCode::kBadCheckpoint, why, item.file + ": " + source.name);
  };
  const auto finite = [](float scale) { return std::isfinite(scale); };
  bool good = std::ranges::all_of(out.scales, finite);
  if (found.coding == WeightCoding::kNvfp4CompressedTensors) {
    out.scales[0] = 1 / out.scales[0];  // an infinite divisor would make every weight zero
    good = good && finite(out.scales[0]);
  }
  if (!good) {
    return bad(*found.scales.back(), place.scales.back(),
               "holds a scale that is NaN, infinite or, as a divisor, zero");
  }
  if (is_fp8) {
    out.fp8 = {bytes_of(codes), out.scales.data()};
    if (!kernels::fp8_is_finite(out.fp8, out.outputs, out.k)) {
      return bad(*found.item, place.source, "holds a weight that is NaN or, with its scale, infinite");
    }
  } else {
    out.fp4 = {bytes_of(codes), bytes_of(*found.scales[0]->tensor), out.scales[0]};
    if (!kernels::fp4_is_finite(out.fp4, out.outputs, out.k)) {
      return bad(*found.scales[0], place.scales[0],
                 "holds a scale that is NaN or, with that of the matrix, infinite");
    }
  }
  return out;
}

Result<void> pack_quantised(const WeightPlace& place, const FoundSource& found, std::byte* out) {
  TRY(const QuantisedMatrix matrix, quantised_matrix(place, found));
  const bool is_fp8 = found.coding == WeightCoding::kFp8;
  if (place.format != kernels::PanelFormat::kDense) {
    is_fp8 ? kernels::pack_fp8(place.groups, place.outputs, place.k, matrix.fp8, out)
           : kernels::pack_fp4(place.groups, place.outputs, place.k, matrix.fp4, out);
    return {};
  }
  std::vector<float> weights(static_cast<size_t>(matrix.outputs * matrix.k));
  is_fp8 ? kernels::dequantise_fp8(matrix.fp8, matrix.outputs, matrix.k, weights.data())
         : kernels::dequantise_fp4(matrix.fp4, matrix.outputs, matrix.k, weights.data());
  const kernels::PackSource from{.data = weights.data() + place.source.offset,
                                 .group_stride = place.source.group_stride,
                                 .output_stride = place.source.output_stride,
                                 .k_stride = place.source.k_stride};
  kernels::pack_matrix(place.dtype, place.groups, place.outputs, place.k, from, out, 0, place.groups);
  return {};
}

// One bad value poisons whatever it touches, and often without a trace: a comparison with NaN is false, so a
// router or an indexer would go on choosing. Looks at what was packed, where also a value that its dtype
// cannot hold shows. Padding is zero.
Result<void> check_finite(const WeightPlace& place, const FoundSource& found, const std::byte* packed) {
  const auto values = place.bytes / static_cast<int64_t>(dtype_bytes(place.dtype));
  if (kernels::all_finite(place.dtype, packed, values)) return {};
  return error(ErrorCode::kBadCheckpoint,
               std::string("holds a value that is NaN, infinite or beyond ") + dtype_name(place.dtype),
               found.item->file + ": " + found.source->name);
}

}  // namespace

Result<void> pack_place(const WeightPlace& place, const FoundSource& found, std::byte* out) {
  if (found.coding != WeightCoding::kNone) TRY_VOID(pack_quantised(place, found, out));
  if (place.format != kernels::PanelFormat::kDense) return {};
  if (found.coding == WeightCoding::kNone) pack_plain(place, found, out);
  return check_finite(place, found, out);
}

}  // namespace weft::worker
