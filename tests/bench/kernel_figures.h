// The kernels part of weft-bench: matrix products, indexer and attention, each beside what this machine does
// in the same rounds.
#pragma once

#include "tests/bench/figures.h"
#include "tests/bench/settings.h"

namespace weft::bench {

void measure_kernels(const Settings& settings, Report& report);

}  // namespace weft::bench
