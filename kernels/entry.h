// How an entry lies in the cache, to the byte.
//
//   plain  width × dtype
//   FP8    runs · run × E4M3 │ float32 scales, if scaled │ the other elements as bf16
//
// A run's values share a scale in groups of 128 counted from its start; the last group may be short. A scale
// is the power of two of fp8_scale(): stored = e4m3(value / scale). Without scales stored = e4m3(value).
// Nothing is padded or aligned. Published layouts: 512 latent and 64 rotary dimensions are 656 bytes
// (`fp8_ds_mla`) as {kBF16, 576, {1, 512, true}}, 576 bytes as {kBF16, 576, {1, 576, false}}.
//
// An FP8 entry is computed with as bf16: every stored value times its scale is exact there. Stateless; any
// thread with flush-to-zero on. No errors.
#pragma once

#include <cstdint>

#include "kernels/fp8.h"
#include "proto/vocab/ids.h"

namespace weft::kernels {

// The first elements of an entry, those that are E4M3.
struct Fp8Part {
  int64_t runs = 0, run = 0;
  bool scaled = false;
  constexpr int64_t elements() const { return runs * run; }
  constexpr int64_t scales() const { return scaled ? runs * ((run + kFp8Group - 1) / kFp8Group) : 0; }
  friend bool operator==(const Fp8Part&, const Fp8Part&) = default;
};

struct EntryFormat {
  DType dtype = DType::kF32;  // of what is not E4M3; kBF16 where something is
  int64_t width = 0;          // elements in all
  Fp8Part fp8;
  constexpr int64_t bytes() const {
    return fp8.elements() + 4 * fp8.scales() +
           (width - fp8.elements()) * static_cast<int64_t>(dtype_bytes(dtype));
  }
};

// values: [width].
void store_entry(const EntryFormat& format, const float* values, void* entry);
// An FP8 entry as bf16, [width].
void load_fp8_entry(const EntryFormat& format, const void* entry, uint16_t* values);

}  // namespace weft::kernels
