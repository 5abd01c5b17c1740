#include "kernels/reference/gemm.h"

#include <cmath>

namespace weft::kernels::reference {

void gemm(const float* x, const float* w, int64_t rows, int64_t outputs, int64_t k, int64_t k_begin,
          int64_t k_end, double* y, double* magnitude) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t output = 0; output < outputs; ++output) {
      double sum = 0, size = 0;
      for (int64_t i = k_begin; i < k_end; ++i) {
        const double product = static_cast<double>(x[row * k + i]) * static_cast<double>(w[output * k + i]);
        sum += product;
        size += std::fabs(product);
      }
      y[row * outputs + output] = sum;
      magnitude[row * outputs + output] = size;
    }
  }
}

}  // namespace weft::kernels::reference
