// Stands in for devices.cc in a build without CUDA.
#include "kernels/cuda/devices.h"

namespace weft::kernels::cuda {

DeviceList list_devices() {
  DeviceList list;
  list.presence = Presence::kNotBuilt;
  list.reason = "this program was built without CUDA";
  return list;
}

}  // namespace weft::kernels::cuda
