// Kinds of bytes that cross between ranks, and the counters that count them.
//
// A byte crosses when a rank reads or receives memory that is resident on another rank, also through a view.
// Counters are bumped exactly where the copy or the dereference happens.
#pragma once

#include <array>
#include <cstdint>

namespace weft::kv {

enum class CrossKind : uint8_t {
  kEntries = 0,
  kIndexKeys = 1,
  kQueries = 2,
  kPartials = 3,
  kCandidates = 4,
  kRows = 5,
  kHost = 6,
  kRegroup = 7,
};
inline constexpr int kCrossKinds = 8;
constexpr const char* cross_kind_name(CrossKind kind) {
  constexpr const char* kNames[kCrossKinds] = {"entries",    "index_keys", "queries", "partials",
                                               "candidates", "rows",       "host",    "regroup"};
  return kNames[static_cast<int>(kind)];
}

struct CrossedBytes {
  std::array<int64_t, kCrossKinds> by_kind{};
  int64_t& operator[](CrossKind kind) { return by_kind[static_cast<size_t>(kind)]; }
  int64_t operator[](CrossKind kind) const { return by_kind[static_cast<size_t>(kind)]; }
  CrossedBytes& operator+=(const CrossedBytes& other) {
    for (size_t i = 0; i < by_kind.size(); ++i) by_kind[i] += other.by_kind[i];
    return *this;
  }
  friend bool operator==(const CrossedBytes&, const CrossedBytes&) = default;
};

}  // namespace weft::kv
