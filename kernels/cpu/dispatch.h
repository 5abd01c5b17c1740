// The instruction set in use, for code that chooses between Highway's kernels and those written with
// intrinsics (the bf16 dot product). The names are in kernels/features.h.
#pragma once

#include <cstdint>

namespace weft::kernels {

enum class InstructionSet : uint8_t { kPortable, kAvx2, kAvx512, kAvx512Bf16 };
InstructionSet instruction_set_in_use();

// True where VDPBF16PS may be used: functions of *_avx512bf16.cc must not run otherwise.
inline bool have_bf16_dot() { return instruction_set_in_use() == InstructionSet::kAvx512Bf16; }
// True where AVX-512 VBMI may be used (*_avx512vbmi.cc).
bool have_byte_permutes();

}  // namespace weft::kernels
