#include "proto/version.h"

namespace weft {

const char* const kVersion = WEFT_VERSION;

}  // namespace weft
