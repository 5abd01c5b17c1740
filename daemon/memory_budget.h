// Whether the arenas fit the machine, asked before they are made.
//
// Arenas are shared memory that the daemon keeps: killing a worker does not give them back, so a daemon that
// asks for too much takes every other process of the machine down before itself. Bytes. Any thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "daemon/arenas.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

// Bytes that processes could still take without others losing theirs: the kernel's MemAvailable, and no more
// than the limit of the control group. INT64_MAX where neither can be read.
int64_t available_memory();
// "MemAvailable:    1234 kB" among other lines; empty: not there.
std::optional<int64_t> parse_available(const std::string& meminfo);

// One part in so many of what is available is left to what the processes take for themselves, which nobody
// counts beforehand: what a step computes with, the daemon's tables, journals.
inline constexpr int64_t kMemoryShareKept = 16;
inline int64_t usable_memory(int64_t available) { return available - available / kMemoryShareKept; }

// kResourceExhausted says what is needed for what, and how much there is. `pool_option`: the one that set the
// pools' size.
Result<void> check_fits_memory(const ArenaSizes& sizes, const char* pool_option, int64_t available);

// Of these, what one more rank will touch: all share the host pool and the weights.
ArenaSizes sizes_of_one_more(const ArenaSizes& sizes);

}  // namespace weft::daemon
