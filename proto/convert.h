// The wire's enums, turned into the words that all code shares, and back.
//
// A peer of another version may send numbers that this one does not know: what comes from the wire is
// checked. Pure.
#pragma once

#include "proto/client.pb.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"

namespace weft {

wire::WireDType to_wire(DType type);
// kInvalidArgument names the field: no dtype is set, or one that is unknown here.
Result<DType> from_wire(wire::WireDType type, const char* field);

}  // namespace weft
