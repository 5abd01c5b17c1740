#include "kernels/cuda/devices.h"

namespace weft::kernels::cuda {

const char* presence_name(Presence presence) {
  switch (presence) {
    case Presence::kPresent:
      return "present";
    case Presence::kNotBuilt:
      return "not_built";
    case Presence::kNoDriver:
      return "no_driver";
    case Presence::kDriverTooOld:
      return "driver_too_old";
    case Presence::kNoDevice:
      return "no_device";
    case Presence::kFailed:
      return "failed";
  }
  return "unknown";
}

}  // namespace weft::kernels::cuda
