#include "kv/shared_memory.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include <fcntl.h>

#include "proto/vocab/check.h"
#include "proto/vocab/units.h"

namespace weft::kv {
namespace {

Error system_error(const std::string& what) {
  return error(ErrorCode::kIo, what + ": " + std::strerror(errno));
}

}  // namespace

void Descriptor::reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

Result<Descriptor> create_memory(const std::string& label, size_t bytes) {
  Descriptor memory(::memfd_create(label.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.valid()) return system_error("memfd_create " + label);
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0) {
    return system_error(label + ": cannot size to " + human_bytes(static_cast<int64_t>(bytes)));
  }
  if (::fcntl(memory.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return system_error(label + ": cannot seal the size");
  }
  return memory;
}

Mapping::~Mapping() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}
Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
Mapping& Mapping::operator=(Mapping&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    data_ = std::exchange(other.data_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

Result<Mapping> Mapping::map(int fd, size_t bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return system_error("fstat of a shared memory descriptor");
  if (status.st_size < 0 || static_cast<size_t>(status.st_size) < bytes) {
    return error(ErrorCode::kInvalidArgument, "shared memory of " + human_bytes(status.st_size) +
                                                  " cannot be mapped as " +
                                                  human_bytes(static_cast<int64_t>(bytes)));
  }
  Mapping mapping;
  if (bytes == 0) return mapping;
  void* data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return system_error("mmap of " + human_bytes(static_cast<int64_t>(bytes)));
  mapping.data_ = static_cast<std::byte*>(data);
  mapping.bytes_ = bytes;
  return mapping;
}

Result<void> touch_pages(std::byte* data, size_t bytes) {
  if (bytes == 0) return {};
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  CHECK_EQ(reinterpret_cast<uintptr_t>(data) % page, 0u);
#ifdef MADV_POPULATE_WRITE
  int failed = 0;
  do {
    failed = ::madvise(data, bytes, MADV_POPULATE_WRITE);
  } while (failed != 0 && (errno == EINTR || errno == EAGAIN));
  if (failed == 0) return {};
  if (errno != EINVAL && errno != ENOSYS) {  // those two: a kernel older than 5.14
    return error(ErrorCode::kResourceExhausted,
                 "no memory for " + human_bytes(static_cast<int64_t>(bytes)) + ": " + std::strerror(errno));
  }
#endif
  // An atomic addition of nothing: a write fault that cannot lose another process's write.
  for (size_t at = 0; at < bytes; at += page) {
    std::atomic_ref<unsigned char>(reinterpret_cast<unsigned char&>(data[at]))
        .fetch_add(0, std::memory_order_relaxed);
  }
  return {};
}

void futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, Duration timeout) {
  if (timeout <= Duration::zero()) return;
  static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);
  timespec relative{};
  relative.tv_sec = static_cast<time_t>(timeout.count() / 1'000'000'000);
  relative.tv_nsec = static_cast<long>(timeout.count() % 1'000'000'000);
  // Any return is allowed: the caller looks at the word again.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, expected, &relative, nullptr, 0);
}

void futex_wake(const std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace weft::kv
