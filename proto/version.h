// The version of Weft, and that of each conversation (proto/*.proto), for both of its sides.
//
// A conversation's version grows when a message changes its meaning. A peer that speaks another one is
// refused with a typed error.
#pragma once

#include <cstdint>

namespace weft {

extern const char* const kVersion;  // "0.1.0", as the top-level CMakeLists.txt says

inline constexpr uint32_t kClientProtocol = 1;
inline constexpr uint32_t kControlProtocol = 1;
inline constexpr uint32_t kWorkerProtocol = 3;

}  // namespace weft
