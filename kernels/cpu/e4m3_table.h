// Both bytes of the bf16 of every E4M3 code without its sign, for look-ups of 64 at a time (*_avx512vbmi.cc).
// A NaN stays one. Constants alone: nothing here is compiled into a function.
#pragma once

namespace weft::kernels {

struct E4m3Table {
  alignas(64) unsigned char low[128], high[128];
};

consteval E4m3Table make_e4m3_table() {
  E4m3Table out{};
  for (unsigned code = 0; code < 128; ++code) {
    unsigned value = (code << 4) + (120u << 7);  // normal: exponent moved to bias 127
    if (code < 8) {                              // subnormal: code · 2⁻⁹
      unsigned exponent = 118, fraction = code;
      for (; fraction != 0 && fraction < 8; fraction *= 2) --exponent;
      value = fraction == 0 ? 0 : ((exponent + 3) << 7) + ((fraction - 8) << 4);
    }
    if (code == 127) value = 0x7fc0;
    out.low[code] = static_cast<unsigned char>(value & 255u);
    out.high[code] = static_cast<unsigned char>(value >> 8);
  }
  return out;
}

inline constexpr E4m3Table kE4m3Table = make_e4m3_table();

}  // namespace weft::kernels
