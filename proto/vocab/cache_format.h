// How the cache stores entries and index keys. Part of every block's identity; the same in all processes.
//
// To the byte: kernels/entry.h and kernels/indexer.h. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "proto/vocab/ids.h"

namespace weft {

// kFp8: everything is E4M3. Latent entries (MLA) have no scale; K and V, and index keys, have one for each
// 128 dimensions. kFp8DsMla, of latent entries alone: the latent is E4M3 with such scales, the rotary part
// bf16.
enum class CacheDType : uint8_t { kF32 = 0, kBF16 = 1, kFp8 = 2, kFp8DsMla = 3 };
inline constexpr std::array kAllCacheDTypes = {CacheDType::kF32, CacheDType::kBF16, CacheDType::kFp8,
                                               CacheDType::kFp8DsMla};

constexpr const char* cache_dtype_name(CacheDType type) {
  switch (type) {
    case CacheDType::kF32:
      return "f32";
    case CacheDType::kBF16:
      return "bf16";
    case CacheDType::kFp8:
      return "fp8";
    case CacheDType::kFp8DsMla:
      return "fp8_ds_mla";
  }
  return "?";
}

// What is computed with what is read; queries have this type.
constexpr DType compute_dtype(CacheDType type) {
  return type == CacheDType::kF32 ? DType::kF32 : DType::kBF16;
}

struct CacheFormat {
  CacheDType entries = CacheDType::kF32;
  CacheDType index_keys = CacheDType::kF32;  // never kFp8DsMla
  bool index_hadamard = false;               // index queries and keys go through a Hadamard transform first
  bool index_float_scales = false;           // FP8 index scales are largest / 448, else powers of two

  constexpr CacheFormat() = default;
  // Entries of this type, and index keys of the one that goes with it.
  constexpr CacheFormat(CacheDType type)  // NOLINT(google-explicit-constructor)
      : entries(type), index_keys(type == CacheDType::kFp8DsMla ? CacheDType::kFp8 : type) {}
  constexpr CacheFormat(DType type)  // NOLINT(google-explicit-constructor)
      : CacheFormat(type == DType::kF32 ? CacheDType::kF32 : CacheDType::kBF16) {}

  constexpr DType query_dtype() const { return compute_dtype(entries); }
  constexpr DType index_query_dtype() const { return compute_dtype(index_keys); }
  // What is said of the index keys: "fp8", "bf16, Hadamard", "fp8, Hadamard, float scales".
  std::string index_name() const {
    return std::string(cache_dtype_name(index_keys)) + (index_hadamard ? ", Hadamard" : "") +
           (index_float_scales ? ", float scales" : "");
  }
  friend bool operator==(const CacheFormat&, const CacheFormat&) = default;
};

}  // namespace weft
