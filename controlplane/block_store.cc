#include "controlplane/block_store.h"

namespace weft::controlplane {

BlockStore::BlockStore(const kv::CacheGeometry& geometry) {
  for (int part = 0; part < geometry.parts(); ++part) empty_parts_.emplace_back(geometry.stream_of(part));
}

Block& BlockStore::create(int64_t index, int origin) {
  BlockId id{static_cast<uint32_t>(blocks_.size())};
  if (unused_.empty()) {
    blocks_.emplace_back();
  } else {
    id = unused_.back();
    unused_.pop_back();
  }
  Block& block = blocks_[number(id)];
  block = Block{};
  block.id = id;
  block.serial = ++serials_;
  block.index = index;
  block.origin = origin;
  block.parts = empty_parts_;
  return block;
}

void BlockStore::erase(BlockId id) {
  at(id).serial = 0;
  unused_.push_back(id);
}

}  // namespace weft::controlplane
