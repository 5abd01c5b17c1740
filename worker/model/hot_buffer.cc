#include "worker/model/hot_buffer.h"

#include "proto/vocab/check.h"

namespace weft::worker {

HotBuffer::HotBuffer(int64_t layers, int64_t slots) : slots_(slots), layers_(static_cast<size_t>(layers)) {}

// Layers that are never asked for take no memory.
HotBuffer::Layer& HotBuffer::filled(int64_t number) {
  Layer& layer = layers_.at(static_cast<size_t>(number));
  if (std::ssize(layer.slots) == slots_) return layer;
  layer.slots.resize(static_cast<size_t>(slots_));
  for (int32_t i = 0; i < slots_; ++i) {
    layer.slots[static_cast<size_t>(i)].newer = i - 1;
    layer.slots[static_cast<size_t>(i)].older = i + 1 < slots_ ? i + 1 : -1;
  }
  layer.newest = 0;
  layer.oldest = static_cast<int32_t>(slots_) - 1;
  return layer;
}

void HotBuffer::make_newest(Layer& layer, int32_t slot) {
  if (layer.newest == slot) return;
  const auto at = [&](int32_t i) -> Slot& { return layer.slots[static_cast<size_t>(i)]; };
  Slot& moved = at(slot);
  at(moved.newer).older = moved.older;
  if (moved.older >= 0) {
    at(moved.older).newer = moved.newer;
  } else {
    layer.oldest = moved.newer;
  }
  moved.newer = -1;
  moved.older = layer.newest;
  at(layer.newest).newer = slot;
  layer.newest = slot;
}

int64_t HotBuffer::use(int64_t number, std::span<const int32_t> positions, std::vector<Miss>& misses) {
  misses.clear();
  if (slots_ == 0) return 0;
  Layer& layer = filled(number);
  ++layer.uses;
  int64_t hits = 0;
  const auto take = [&](int32_t slot) {
    layer.slots[static_cast<size_t>(slot)].used = layer.uses;
    make_newest(layer, slot);
  };
  for (const int32_t position : positions) {
    const auto found = layer.slot_of.find(position);
    if (found == layer.slot_of.end()) {
      misses.push_back({position, -1});
      continue;
    }
    take(found->second);
    ++hits;
  }
  size_t placed = 0;
  for (; placed < misses.size(); ++placed) {
    const int32_t slot = layer.oldest;
    Slot& oldest = layer.slots[static_cast<size_t>(slot)];
    if (oldest.used == layer.uses) break;
    if (oldest.position >= 0) layer.slot_of.erase(oldest.position);
    oldest.position = misses[placed].position;
    layer.slot_of.emplace(oldest.position, slot);
    misses[placed].slot = slot;
    take(slot);
  }
  misses.resize(placed);
  return hits;
}

int32_t HotBuffer::slot_of(int64_t number, int32_t position) const {
  const Layer& layer = layers_.at(static_cast<size_t>(number));
  const auto found = layer.slot_of.find(position);
  return found == layer.slot_of.end() ? -1 : found->second;
}

HotBuffer& HotBuffers::of(TableId table, uint32_t version, int64_t layers, int64_t slots) {
  Kept& kept = kept_[table];
  if (kept.buffer == nullptr || kept.version != version) {
    kept.version = version;
    kept.buffer = std::make_unique<HotBuffer>(layers, slots);
  }
  CHECK_EQ(kept.buffer->slots(), slots);
  kept.asked = steps_;
  return *kept.buffer;
}

void HotBuffers::sweep(Epoch epoch) {
  constexpr uint64_t kSteps = 1024;
  if (epoch != epoch_) kept_.clear();
  epoch_ = epoch;
  ++steps_;
  std::erase_if(kept_, [&](const auto& one) { return one.second.asked + kSteps < steps_; });
}

}  // namespace weft::worker
