// Packing of weights into panels. Runs once per matrix, at load: plain code; the sixteen outputs of a panel
// are gathered k by k, so that a panel is written front to back.
#include <algorithm>
#include <cstring>

#include "kernels/bf16.h"
#include "kernels/gemm.h"
#include "kernels/quantised_panel.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

int64_t panels_of(int64_t outputs) { return (outputs + kPanel - 1) / kPanel; }
int64_t padded_k(DType dtype, int64_t k) { return dtype == DType::kBF16 ? k + k % 2 : k; }

void store(float value, float& to) { to = value; }
void store(float value, uint16_t& to) { to = f32_to_bf16(value); }
void store(uint16_t value, float& to) { to = bf16_to_f32(value); }
void store(uint16_t value, uint16_t& to) { to = value; }

// Where k and output o lie in a panel.
template <typename To>
int64_t offset_in_panel(int64_t k, int64_t o) {
  if constexpr (sizeof(To) == 4) {
    return k * kPanel + o;
  } else {
    return (k / 2 * kPanel + o) * 2 + k % 2;
  }
}

template <typename From, typename To>
void pack_panel(const From* from, const PackSource& source, int64_t outputs, int64_t k, int64_t k_padded,
                To* panel) {
  if (outputs < kPanel || k < k_padded) std::fill_n(panel, k_padded * kPanel, To{0});
  for (int64_t i = 0; i < k; ++i) {
    for (int64_t o = 0; o < outputs; ++o) {
      store(from[o * source.output_stride + i * source.k_stride], panel[offset_in_panel<To>(i, o)]);
    }
  }
}

struct Shape {
  DType dtype;
  int64_t group_outputs, k, group_begin, group_end;
};

template <typename From, typename To>
void pack(const Shape& shape, const PackSource& source, void* out) {
  const int64_t panels = panels_of(shape.group_outputs);
  const int64_t k_padded = padded_k(shape.dtype, shape.k);
  for (int64_t g = shape.group_begin; g < shape.group_end; ++g) {
    const From* group = static_cast<const From*>(source.data) + g * source.group_stride;
    for (int64_t p = 0; p < panels; ++p) {
      To* panel = static_cast<To*>(out) + (g * panels + p) * k_padded * kPanel;
      const int64_t outputs = std::min(kPanel, shape.group_outputs - p * kPanel);
      pack_panel(group + p * kPanel * source.output_stride, source, outputs, shape.k, k_padded, panel);
    }
  }
}

}  // namespace

size_t packed_bytes(DType dtype, int64_t groups, int64_t group_outputs, int64_t k, PanelFormat format) {
  if (format != PanelFormat::kDense) {
    return static_cast<size_t>(groups * panels_of(group_outputs) * QuantisedPanel(format, k).bytes());
  }
  return static_cast<size_t>(groups * panels_of(group_outputs) * padded_k(dtype, k) * kPanel) *
         dtype_bytes(dtype);
}

void pack_matrix(DType dtype, int64_t groups, int64_t group_outputs, int64_t k, const PackSource& source,
                 void* out, int64_t group_begin, int64_t group_end) {
  CHECK(0 <= group_begin && group_begin <= group_end && group_end <= groups, "groups ", group_begin, " … ",
        group_end, " of ", groups);
  CHECK_EQ(reinterpret_cast<uintptr_t>(out) % 64, 0u);
  const Shape shape{dtype, group_outputs, k, group_begin, group_end};
  if (dtype == DType::kF32) {
    source.dtype == DType::kF32 ? pack<float, float>(shape, source, out)
                                : pack<uint16_t, float>(shape, source, out);
  } else {
    source.dtype == DType::kF32 ? pack<float, uint16_t>(shape, source, out)
                                : pack<uint16_t, uint16_t>(shape, source, out);
  }
}

}  // namespace weft::kernels
