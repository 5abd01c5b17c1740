// Index of the largest of `count` > 0 finite values, the lowest among equals (−0 equals +0).
#pragma once

#include <cstdint>

namespace weft::kernels {
int64_t first_largest(const float* x, int64_t count);
}
