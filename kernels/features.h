// Which instruction set the kernels of this process use: "avx512_bf16", "avx512", "avx2" or "portable". Bits
// are promised within one name.
//
// Chosen at the first call from what the machine has. "portable" is plain C++ (fused multiply-adds through
// the math library): right, and slow.
#pragma once

namespace weft::kernels {

const char* instruction_set();

// Uses a lesser set than the machine's best, so that tests reach every path and unlike machines can agree on
// bits. Returns false, and changes nothing, if the machine lacks it or the name is unknown. Not while a
// kernel runs.
bool use_instruction_set(const char* name);

}  // namespace weft::kernels
