// A panel of index keys (kernels/cpu/index_tile.h) out of FP8 keys that lie one after the other.
//
// Values are exact; scales are left out. Stateless, any thread with flush-to-zero on. No errors.
#pragma once

#include <cstdint>

namespace weft::kernels {

// codes: [lanes][width] E4M3 values, width even and at most kFp8Group, lanes 8 or 16.
// panel: [width / 2][lanes] pairs of bf16.
void decode_index_panel(const uint8_t* codes, int64_t width, int64_t lanes, float* panel);

}  // namespace weft::kernels
