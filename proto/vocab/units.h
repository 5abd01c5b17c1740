// Units and small integer arithmetic.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/check.h"

namespace weft {

inline constexpr int64_t kKiB = int64_t{1} << 10;
inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t quantum) { return ceil_div(a, quantum) * quantum; }

// "1.5 MiB", "812 B": for people. Powers of 1024.
std::string human_bytes(int64_t bytes);
// "1,048,576": for people.
std::string human_count(int64_t count);

}  // namespace weft
