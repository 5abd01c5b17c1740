// What processes of this user have open and mapped, read from /proc, to show that nothing was made or moved.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::bench {

struct ProcessState {
  std::vector<std::string> maps;         // of memory that has a descriptor: address, rights, file; sorted
  std::vector<std::string> descriptors;  // what each one is, without numbers of sockets; sorted
  friend bool operator==(const ProcessState&, const ProcessState&) = default;
};
// kIo if the process is gone.
Result<ProcessState> process_state(pid_t process);

// Hash of all bytes of the memfd with this name that a process holds. kNotFound: it holds none.
Result<uint64_t> hash_of_memory(pid_t process, const std::string& name);

}  // namespace weft::bench
