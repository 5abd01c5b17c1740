// Memory shared between processes: memfds without names, and the futex words inside them.
//
// A memfd has no name, so nothing can leak when everybody dies. The daemon creates and keeps the
// descriptors; workers receive them over the inherited socket pair and map them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"

namespace weft::kv {

// An owned file descriptor.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(other.release()) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = other.release();
    }
    return *this;
  }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void reset();

 private:
  int fd_ = -1;
};

// A sealed-size memfd (F_SEAL_SHRINK | F_SEAL_GROW), so that no holder of the descriptor can take pages away
// from under another. Pages are zero and take no memory until touched. 0 bytes is allowed.
Result<Descriptor> create_memory(const std::string& label, size_t bytes);

// A shared mapping of a memfd; unmapped by the destructor. map() refuses (kInvalidArgument) a descriptor that
// is smaller than `bytes`. 0 bytes: an empty mapping.
class Mapping {
 public:
  Mapping() = default;
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  static Result<Mapping> map(int fd, size_t bytes);
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Pre-faults every page of a mapping's part, for writing; changes no value. `data` is page-aligned.
// kResourceExhausted: there is not that much memory (found out here, at start, instead of by SIGBUS later).
Result<void> touch_pages(std::byte* data, size_t bytes);

// Waits until *word != expected, or a wake, or the timeout; spurious returns are allowed. Works across
// processes. Wakes: all waiters.
void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout);
void futex_wake(const std::atomic<uint32_t>& word);

}  // namespace weft::kv
