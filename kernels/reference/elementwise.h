// The row-wise ops of kernels/elementwise.h in double, on one row: slow and obvious.
#pragma once

#include <cstdint>
#include <vector>

namespace weft::kernels::reference {

std::vector<double> rms_norm(const std::vector<float>& x, const std::vector<float>& weight, double eps);
std::vector<double> layer_norm(const std::vector<float>& x, const std::vector<float>& weight,
                               const std::vector<float>& bias, double eps);
// Pair j turned by angles[j]; interleaved: pairs (2j, 2j+1), else (j, j + half).
std::vector<double> rope(const std::vector<float>& x, const std::vector<double>& angles, bool interleaved);
std::vector<double> swiglu(const std::vector<float>& gate, const std::vector<float>& up);

}  // namespace weft::kernels::reference
