#include "kernels/entry.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "kernels/fp8_rows.h"
#include "kernels/gemm.h"

namespace weft::kernels {
namespace {

// Calls body(first element, count, index of the scale) for every group.
template <typename Body>
void for_groups(const Fp8Part& fp8, const Body& body) {
  const int64_t group = fp8.scaled ? kFp8Group : fp8.run;
  int64_t scale = 0;
  for (int64_t begin = 0; begin < fp8.elements(); begin += fp8.run) {
    for (int64_t at = 0; at < fp8.run; at += group) body(begin + at, std::min(group, fp8.run - at), scale++);
  }
}

}  // namespace

void store_entry(const EntryFormat& format, const float* values, void* entry) {
  auto* codes = static_cast<uint8_t*>(entry);
  const Fp8Part& fp8 = format.fp8;
  uint8_t* scales = codes + fp8.elements();
  for_groups(fp8, [&](int64_t at, int64_t count, int64_t index) {
    if (!fp8.scaled) return encode_e4m3(values + at, count, 1, codes + at);
    const float scale = quantise_e4m3(values + at, count, true, codes + at);
    std::memcpy(scales + 4 * index, &scale, sizeof scale);
  });
  convert(values + fp8.elements(), format.width - fp8.elements(), format.dtype, scales + 4 * fp8.scales());
}

void load_fp8_entry(const EntryFormat& format, const void* entry, uint16_t* values) {
  const auto* codes = static_cast<const uint8_t*>(entry);
  const Fp8Part& fp8 = format.fp8;
  const uint8_t* scales = codes + fp8.elements();
  for_groups(fp8, [&](int64_t at, int64_t count, int64_t index) {
    float scale = 1;
    if (fp8.scaled) std::memcpy(&scale, scales + 4 * index, sizeof scale);
    decode_e4m3(codes + at, count, scale, values + at);
  });
  std::memcpy(values + fp8.elements(), scales + 4 * fp8.scales(),
              static_cast<size_t>(format.width - fp8.elements()) * sizeof(uint16_t));
}

}  // namespace weft::kernels
