// Which instruction set the kernels of this process use: "avx512_bf16", "avx512", "avx2", …. Bits are promised
// within one name.
#pragma once

namespace weft::kernels {
const char* instruction_set();
}
