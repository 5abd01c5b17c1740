// Matrix products on random numbers, ready to take turns with others (rounds.h).
//
// Quantised weights are multiplied with bf16. Work is counted in operations, 2 · rows · outputs · k, or,
// where a product waits for memory, in bytes of packed weights.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/gemm.h"
#include "kernels/parallel.h"
#include "proto/vocab/ids.h"
#include "tests/bench/rounds.h"

namespace weft::bench {

struct Weights {
  const char* name;
  DType x;
  kernels::PanelFormat format = kernels::PanelFormat::kDense;
};
inline constexpr Weights kWeights[] = {{"f32", DType::kF32},
                                       {"bf16", DType::kBF16},
                                       {"fp8", DType::kBF16, kernels::PanelFormat::kFp8},
                                       {"fp4", DType::kBF16, kernels::PanelFormat::kFp4}};

struct LinearShape {
  int64_t rows, outputs, k;
};

// One matrix, used again and again: it stays in whatever cache holds it.
Contender gemm(const Weights& weights, const LinearShape& shape, kernels::Parallel& parallel);
// As many matrices as fill `bytes`, at least one, in rotation: none is in a cache when its turn comes.
Contender gemv(const Weights& weights, const LinearShape& shape, kernels::Parallel& parallel, size_t bytes);

}  // namespace weft::bench
