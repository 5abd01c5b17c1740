// oneDNN's bf16 matrix product, as a rival: how fast a tuned library multiplies on this machine, in this run.
//
// Debian's libdnnl-dev is used by benchmarks alone, where it is installed; the product never links it.
#pragma once

#include <cstdint>

namespace weft::bench {

// GFLOP/s of [m × k] · [k × n], bf16 in, float32 out, weights in the layout that the library likes best; its
// best of about `seconds`. 0 where this build has no oneDNN or it cannot do this here.
double onednn_bf16_gflops(int64_t m, int64_t n, int64_t k, int threads, double seconds);

}  // namespace weft::bench
