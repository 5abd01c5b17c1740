// y = x · Wᵀ in double, from the unpacked matrix: what the kernels are measured against.
#pragma once

#include <cstdint>

namespace weft::kernels::reference {

// y[row][output] = Σ_k x[row][k] · w[output][k], k in [k_begin, k_end). x, w are row-major with `k` columns.
// magnitude[row][output] = Σ_k |x · w|: a float32 walk errs by at most about (k_end − k_begin) · 2^−24 of it.
void gemm(const float* x, const float* w, int64_t rows, int64_t outputs, int64_t k, int64_t k_begin,
          int64_t k_end, double* y, double* magnitude);

}  // namespace weft::kernels::reference
