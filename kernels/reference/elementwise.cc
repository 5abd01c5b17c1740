#include "kernels/reference/elementwise.h"

#include <cmath>

namespace weft::kernels::reference {

std::vector<double> rms_norm(const std::vector<float>& x, const std::vector<float>& weight, double eps) {
  double squares = 0;
  for (double v : x) squares += v * v;
  const double root = std::sqrt(squares / static_cast<double>(x.size()) + eps);
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i) out.push_back(x[i] / root * weight[i]);
  return out;
}

std::vector<double> layer_norm(const std::vector<float>& x, const std::vector<float>& weight,
                               const std::vector<float>& bias, double eps) {
  const double count = static_cast<double>(x.size());
  double mean = 0, variance = 0;
  for (double v : x) mean += v / count;
  for (double v : x) variance += (v - mean) * (v - mean) / count;
  std::vector<double> out;
  for (size_t i = 0; i < x.size(); ++i) {
    out.push_back((x[i] - mean) / std::sqrt(variance + eps) * weight[i] + bias[i]);
  }
  return out;
}

std::vector<double> rope(const std::vector<float>& x, const std::vector<double>& angles, bool interleaved) {
  const size_t half = x.size() / 2;
  std::vector<double> out(x.size());
  for (size_t j = 0; j < half; ++j) {
    const size_t first = interleaved ? 2 * j : j, second = interleaved ? 2 * j + 1 : j + half;
    out[first] = x[first] * std::cos(angles[j]) - x[second] * std::sin(angles[j]);
    out[second] = x[second] * std::cos(angles[j]) + x[first] * std::sin(angles[j]);
  }
  return out;
}

std::vector<double> swiglu(const std::vector<float>& gate, const std::vector<float>& up) {
  std::vector<double> out;
  for (size_t i = 0; i < gate.size(); ++i) {
    const double g = gate[i];
    out.push_back(g / (1 + std::exp(-g)) * up[i]);
  }
  return out;
}

}  // namespace weft::kernels::reference
