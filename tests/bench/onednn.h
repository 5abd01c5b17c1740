// oneDNN's bf16 matrix product, as a rival: never a part of the product. Built where the library is found
// (Debian's libdnnl-dev); elsewhere there is none.
#pragma once

#include <cstdint>
#include <optional>

#include "tests/bench/rounds.h"

namespace weft::bench {

// [m][k] bf16 times weights in the layout that the library likes best, to [m][n] float32, over its own
// `threads`. Work: 2 · m · n · k operations. Nothing: no oneDNN here, or none that can.
std::optional<Contender> onednn_bf16(int64_t m, int64_t n, int64_t k, int threads);

}  // namespace weft::bench
