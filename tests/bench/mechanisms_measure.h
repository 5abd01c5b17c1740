// What each way to exchange bytes costs: time beside counted bytes, through real daemons.
//
// Families of variants, each against its usual one: on two workers, the recall model (groupings, splits,
// indexes, queries, partials, experts) and a dense one of random weights (context of owned rows, their form);
// on four workers that share the two cores, groups of two. The variants of a family take turns in every
// round, with the same prompt and the prefix cache off, and must give the same tokens where bits are
// promised.
#pragma once

#include "tests/bench/serving_measure.h"

namespace weft::bench {

Result<void> measure_mechanisms(const Settings& settings, const ServingPlace& place, Report& report);

}  // namespace weft::bench
