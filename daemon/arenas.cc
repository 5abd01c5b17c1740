#include "daemon/arenas.h"

#include <fcntl.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>

namespace weft::daemon {

Result<Arenas> Arenas::create(const ArenaSizes& sizes) {
  const size_t control_bytes = kv::control_arena_bytes(sizes.control);
  TRY(kv::Descriptor control_fd, kv::create_memory("weft-control", control_bytes));
  TRY(kv::Mapping mapping, kv::Mapping::map(control_fd.get(), control_bytes));
  TRY(kv::ControlArena control, kv::ControlArena::format(std::move(mapping), sizes.control));
  Arenas arenas(sizes, std::move(control));
  arenas.control_fd_ = std::move(control_fd);
  TRY(arenas.weights_, kv::create_memory("weft-weights", static_cast<size_t>(sizes.weight_bytes)));
  arenas.results_ = kv::Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!arenas.results_.valid()) {
    return error(ErrorCode::kIo, std::string("cannot make an eventfd: ") + std::strerror(errno));
  }
  for (size_t rank = 0; rank < sizes.pool_pages.size(); ++rank) {
    const std::string number = std::to_string(rank);
    TRY(kv::Descriptor mailbox,
        kv::create_memory("weft-mailbox-" + number, static_cast<size_t>(sizes.mailbox_bytes)));
    TRY(kv::Descriptor pool,
        kv::create_memory("weft-pool-" + number, kv::pool_bytes(sizes.geometry, sizes.pool_pages[rank])));
    arenas.mailboxes_.push_back(std::move(mailbox));
    arenas.pools_.push_back(std::move(pool));
  }
  if (sizes.host_bytes() > 0) {
    TRY(arenas.host_, kv::create_memory("weft-host-pool", static_cast<size_t>(sizes.host_bytes())));
  }
  return arenas;
}

wire::MapArenas Arenas::message() const {
  wire::MapArenas message;
  message.set_control_bytes(kv::control_arena_bytes(sizes_.control));
  message.set_weight_bytes(static_cast<uint64_t>(sizes_.weight_bytes));
  message.set_mailbox_bytes(static_cast<uint64_t>(sizes_.mailbox_bytes));
  for (const kv::PoolPages& pages : sizes_.pool_pages) {
    message.add_pool_bytes(kv::pool_bytes(sizes_.geometry, pages));
    wire::StreamPages* counts = message.add_pool_pages();
    counts->set_entries(static_cast<uint32_t>(pages.entries));
    counts->set_index_keys(static_cast<uint32_t>(pages.index_keys));
  }
  message.set_host_bytes(static_cast<uint64_t>(sizes_.host_bytes()));
  message.mutable_host_pages()->set_entries(static_cast<uint32_t>(sizes_.host_pages.entries));
  message.mutable_host_pages()->set_index_keys(static_cast<uint32_t>(sizes_.host_pages.index_keys));
  return message;
}

std::vector<int> Arenas::descriptors() const {
  std::vector<int> fds = {control_fd_.get(), weights_.get(), results_.get()};
  for (const kv::Descriptor& mailbox : mailboxes_) fds.push_back(mailbox.get());
  for (const kv::Descriptor& pool : pools_) fds.push_back(pool.get());
  if (host_.valid()) fds.push_back(host_.get());
  return fds;
}

Result<void> Arenas::clear_pool(int rank) {
  const auto at = static_cast<size_t>(rank);
  const auto bytes = static_cast<off_t>(kv::pool_bytes(sizes_.geometry, sizes_.pool_pages[at]));
  if (::fallocate(pools_[at].get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, bytes) == 0) return {};
  return error(ErrorCode::kIo, std::string("cannot clear a pool: ") + std::strerror(errno));
}

}  // namespace weft::daemon
