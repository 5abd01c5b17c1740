// The distribution that sample() draws from, in double: slow and obvious.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/sample.h"

namespace weft::kernels::reference {

// Probability of every token of the vocabulary; zero where cut. Temperature must be above 0.
std::vector<double> distribution(const Sampler& p, const float* logits, int64_t vocabulary);

}  // namespace weft::kernels::reference
