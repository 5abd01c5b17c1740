// Runs a test body once on every instruction set that this machine has, then goes back to the best.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "kernels/features.h"
#include "kernels/parallel.h"

namespace weft::test {

template <typename Body>
void each_instruction_set(const Body& body) {
  kernels::set_flush_to_zero();
  const std::string best = kernels::instruction_set();
  for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16"}) {
    if (!kernels::use_instruction_set(name)) continue;
    SCOPED_TRACE(name);
    body();
  }
  kernels::use_instruction_set(best.c_str());
}

}  // namespace weft::test
