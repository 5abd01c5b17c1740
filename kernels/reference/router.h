// Expert choice in double, by sorting: slow and obvious.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/router.h"

namespace weft::kernels::reference {

struct Route {
  std::vector<int32_t> ids;  // ascending
  std::vector<double> weights;
  // How far apart, in score, the nearest chosen and passed-over were (groups and experts): a kernel in
  // float32 may choose otherwise only if this is within its rounding.
  double margin = 0;
};
Route route(const Router& p, const float* logits);

}  // namespace weft::kernels::reference
