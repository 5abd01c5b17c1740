#include "kernels/reference/attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace weft::kernels::reference {
namespace {

// The exponents of one head, [entry_count].
std::vector<double> exponents(const AttentionInput& in, int64_t head) {
  std::vector<double> t;
  for (int64_t u = 0; u < in.entry_count(); ++u) {
    double dot = 0;
    for (int64_t i = 0; i < in.shape.key; ++i) {
      dot += in.query[static_cast<size_t>(head * in.shape.key + i)] *
             in.entries[static_cast<size_t>(u * in.shape.width() + i)];
    }
    t.push_back(dot * in.scale_log2);
  }
  return t;
}

}  // namespace

std::vector<double> attention(const AttentionInput& in) {
  std::vector<double> out(static_cast<size_t>(in.heads * in.shape.value), 0.0);
  if (in.entry_count() == 0) return out;
  for (int64_t h = 0; h < in.heads; ++h) {
    const std::vector<double> t = exponents(in, h);
    const double largest = *std::max_element(t.begin(), t.end());
    double total = 0;
    for (double value : t) total += std::exp2(value - largest);
    for (int64_t u = 0; u < in.entry_count(); ++u) {
      const double weight = std::exp2(t[static_cast<size_t>(u)] - largest) / total;
      for (int64_t i = 0; i < in.shape.value; ++i) {
        out[static_cast<size_t>(h * in.shape.value + i)] +=
            weight * in.entries[static_cast<size_t>(u * in.shape.width() + in.shape.value_offset + i)];
      }
    }
  }
  return out;
}

std::vector<double> log2_sum(const AttentionInput& in) {
  std::vector<double> out(static_cast<size_t>(in.heads), -std::numeric_limits<double>::infinity());
  if (in.entry_count() == 0) return out;
  for (int64_t h = 0; h < in.heads; ++h) {
    const std::vector<double> t = exponents(in, h);
    const double largest = *std::max_element(t.begin(), t.end());
    double total = 0;
    for (double value : t) total += std::exp2(value - largest);
    out[static_cast<size_t>(h)] = largest + std::log2(total);
  }
  return out;
}

}  // namespace weft::kernels::reference
