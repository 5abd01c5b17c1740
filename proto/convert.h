// The wire's enums and errors, turned into the words that all code shares, and back.
//
// A peer of another version may send numbers that this one does not know: what comes from the wire is
// checked. Pure.
#pragma once

#include "proto/client.pb.h"
#include "proto/vocab/cache_format.h"
#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"
#include "proto/worker.pb.h"

namespace weft {

// What is told of an error. Text that is not UTF-8 must not get here (proto/utf8.h).
void fill_error(const Error& from, wire::WireError* to);
Error from_wire(const wire::WireError& error);  // kInternal for a code that is unknown here

wire::WireDType to_wire(DType type);
// kInvalidArgument names the field: no dtype is set, or one that is unknown here.
Result<DType> from_wire(wire::WireDType type, const char* field);
wire::WireCacheDType to_wire(CacheDType type);
Result<CacheDType> from_wire(wire::WireCacheDType type, const char* field);

}  // namespace weft
