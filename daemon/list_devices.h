// `weftd --list-devices`: what the workers of this build could compute on.
//
// The daemon holds no device; it runs the worker binary, which answers in JSON (worker/list_devices.h), in a
// process of its own, so that a driver that crashes or hangs harms nothing. Blocks up to the deadline; before
// the loop only.
#pragma once

#include <string>

#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

struct DeviceQuery {
  std::string worker_binary;
  bool json = false;
  Duration deadline = std::chrono::seconds(60);  // a driver with many devices takes seconds to start
};

// Ready to print. kIo: the worker could not be run or failed; kDeadlineExceeded; kBadMessage: no such answer.
Result<std::string> list_devices(const DeviceQuery& query);

// The worker's JSON as a table for people. kBadMessage if it is not what a worker says.
Result<std::string> devices_table(const std::string& json);

}  // namespace weft::daemon
