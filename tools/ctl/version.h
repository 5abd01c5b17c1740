// The version of this build, as the top-level CMakeLists.txt says it.
#pragma once

namespace weft::ctl {

inline constexpr char kVersion[] = WEFT_VERSION;

}  // namespace weft::ctl
