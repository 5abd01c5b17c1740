#include "tests/simulation/pin_book.h"

#include <algorithm>

namespace weft::simulation {

int64_t PinBook::shared_blocks(const Truth& a, const Truth& b) const {
  if (a.salt != b.salt) return 0;
  const auto differ = std::mismatch(a.tokens.begin(), a.tokens.end(), b.tokens.begin(), b.tokens.end());
  return (differ.first - a.tokens.begin()) / core_.setup.limits.geometry.block_tokens;
}

void PinBook::look() {
  follow_pins();
  take_failures();
  for (const auto& [number, pin] : pins_)
    core_.verdict.expect(Checker::kPins, pin.blocks >= pin.least, "pin ", number, " of ", pin.least,
                         " blocks has ", pin.blocks);
  if (pins_.empty()) return;
  for (const auto& [id, live] : core_.ledger.live()) {
    if (live.arrival.use_prefix_cache && !seen_.contains(id)) check_admitted(id);
  }
}

void PinBook::follow_pins() {
  const std::vector<PinSnapshot> now = core_.plane.pins();
  std::erase_if(pins_, [&](const auto& known) {
    return std::none_of(now.begin(), now.end(), [&](const auto& one) { return one.pin == known.first; });
  });
  for (const PinSnapshot& one : now) {
    const auto [pin, fresh] = pins_.try_emplace(one.pin);
    if (fresh) pin->second = {&core_.workers.truth(one.request), one.blocks, 0, one.blocks, one.since};
    pin->second.blocks = one.blocks;
    // Where memory was lost since the last look, its copies may be what lay behind blocks that are gone.
    if (fresh && one.blocks == 0 && core_.plane.counters().lost_blocks == lost_blocks_) {
      pin->second.host = one.host_blocks;
      ++core_.coverage.mark(Mark::kHostPinned);
    }
  }
}

void PinBook::take_failures() {
  const int64_t block_tokens = core_.setup.limits.geometry.block_tokens;
  for (const auto& failed : core_.ledger.take_failures()) {
    for (auto& [number, pin] : pins_) {
      const int64_t trusted = failed.cached_tokens / block_tokens;
      if (shared_blocks(core_.workers.truth(failed.request), *pin.truth) <= trusted) continue;
      pin.least = std::min(pin.least, trusted);
      // Whoever has locked a copy keeps it, and nobody else finds it.
      pin.host = std::min(pin.host, trusted);
    }
  }
  const int64_t lost = core_.plane.counters().lost_blocks;
  if (std::exchange(lost_blocks_, lost) == lost) return;
  for (auto& [number, pin] : pins_) pin.least = 0;
  seen_.clear();  // some come in again
}

void PinBook::check_admitted(RequestId id) {
  const auto snapshot = core_.plane.request(id);
  if (!snapshot || snapshot->state == RequestState::kWaiting) return;
  seen_.insert(id);
  const Truth& truth = core_.workers.truth(id);
  const int64_t block_tokens = core_.setup.limits.geometry.block_tokens;
  int64_t blocks = 0;
  for (const auto& [number, pin] : pins_) {
    if (pin.since >= snapshot->admitted) continue;
    const int64_t pinned = snapshot->host_context ? pin.host : pin.blocks;
    blocks = std::max(blocks, std::min(pinned, shared_blocks(truth, *pin.truth)));
  }
  blocks = std::min(blocks, truth.prompt / block_tokens);
  const int64_t wanted = std::min(blocks * block_tokens, truth.prompt - 1);
  if (wanted <= 0 || (snapshot->cached_tokens == 0 && came_in_alone(*snapshot))) return;
  core_.verdict.expect(Checker::kPins, snapshot->cached_tokens >= wanted, "request ", weft::number(id),
                       " found ", snapshot->cached_tokens, " tokens, of which ", wanted, " are pinned");
  ++core_.coverage.mark(snapshot->host_context ? Mark::kHostPinsHit : Mark::kPinsHit);
}

bool PinBook::came_in_alone(const RequestSnapshot& snapshot) const {
  return std::none_of(core_.ledger.live().begin(), core_.ledger.live().end(), [&](const auto& other) {
    const auto one = core_.plane.request(other.first);
    return one && one->state != RequestState::kWaiting && one->admitted < snapshot.admitted;
  });
}

}  // namespace weft::simulation
