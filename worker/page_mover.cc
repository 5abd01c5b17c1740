#include "worker/page_mover.h"

#include <sched.h>
#include <sys/prctl.h>

#include <algorithm>
#include <string>
#include <utility>

#include "proto/vocab/units.h"

namespace weft::worker {
namespace {

constexpr int64_t kPieceBytes = 64 * kKiB;  // a piece is at least so long, where the page is
constexpr size_t kPiecesAtOnce = 64;        // between two looks at the abort word

}  // namespace

int64_t layers_at_once(const kv::CacheGeometry& geometry, kv::Stream stream) {
  return std::max<int64_t>(1, ceil_div(kPieceBytes, std::max<int64_t>(1, geometry.layer_bytes(stream))));
}

PageMover::PageMover(MoverSetup setup) : setup_(std::move(setup)), thread_([this] { serve(); }) {}

PageMover::~PageMover() {
  stop();
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
  }
  work_.notify_one();
  thread_.join();
}

void PageMover::start(std::vector<HostMove> loads, std::vector<HostMove> spills,
                      std::function<bool()> aborted) {
  {
    const std::lock_guard lock(mutex_);
    CHECK(!busy_, "a job runs");
    loads_ = std::move(loads);
    spills_ = std::move(spills);
    aborted_ = std::move(aborted);
    busy_ = !loads_.empty() || !spills_.empty();
    complete_ = !busy_;
    layers_done_ = loads_.empty() ? std::ssize(setup_.keeps_index) : 0;
    stop_.store(false, std::memory_order_relaxed);
    if (!busy_) return;
  }
  work_.notify_one();
}

Result<void> PageMover::wait(Duration deadline, const std::function<bool()>& there) {
  std::unique_lock lock(mutex_);
  const bool ended = progress_.wait_for(lock, deadline, [&] { return there() || !busy_; });
  if (there()) return {};
  if (ended) return error(ErrorCode::kCancelled, "the copies to and from the host pool were aborted");
  return error(ErrorCode::kDeadlineExceeded,
               std::to_string(loads_.size()) + " loads from and " + std::to_string(spills_.size()) +
                   " spills to the host pool stand at layer " + std::to_string(layers_done_));
}

Result<void> PageMover::wait_layer(int64_t layer, Duration deadline) {
  return wait(deadline, [&] { return layers_done_ > layer; });
}

Result<void> PageMover::finish(Duration deadline) {
  return wait(deadline, [&] { return !busy_ && complete_; });
}

void PageMover::stop() {
  stop_.store(true, std::memory_order_relaxed);
  std::unique_lock lock(mutex_);
  progress_.wait(lock, [&] { return !busy_; });
}

void PageMover::serve() {
  ::prctl(PR_SET_NAME, "weft-mover");
  if (!setup_.cores.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (const int core : setup_.cores) CPU_SET(static_cast<size_t>(core), &set);
    ::sched_setaffinity(0, sizeof set, &set);  // a wish: elsewhere it copies too
  }
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [&] { return busy_ || ending_; });
    if (ending_) return;
    lock.unlock();
    run_job();
    lock.lock();
    busy_ = false;
    progress_.notify_all();
  }
}

bool PageMover::leaves() const { return stop_.load(std::memory_order_relaxed) || aborted_(); }

// The layers of one stream of all moves of that stream. False: left in the middle.
bool PageMover::copy(std::span<const HostMove> moves, bool load, kv::Stream stream, kv::Range layers,
                     size_t whole) {
  const auto bytes = static_cast<size_t>(layers.size() * setup_.host.geometry().layer_bytes(stream));
  const auto flush = [&] {
    if (leaves()) return false;
    kv::copy_pieces(pieces_, whole);
    pieces_.clear();
    return true;
  };
  pieces_.clear();
  for (const HostMove& move : moves) {
    if (move.stream != stream) continue;
    std::byte* own = setup_.pools[static_cast<size_t>(move.rank)].layer(stream, move.page, layers.begin);
    std::byte* host = setup_.host.layer(stream, move.host_page, layers.begin);
    pieces_.push_back({load ? own : host, load ? host : own, bytes});
    if (pieces_.size() == kPiecesAtOnce && !flush()) return false;
  }
  return flush();
}

void PageMover::run_job() {
  const kv::CacheGeometry& geometry = setup_.host.geometry();
  const auto whole_of = [&](const std::vector<HostMove>& moves) {
    int64_t bytes = 0;
    for (const HostMove& move : moves) bytes += geometry.page_bytes(move.stream);
    return static_cast<size_t>(bytes);
  };
  const size_t loads = whole_of(loads_), spills = whole_of(spills_);
  const auto load_from = [&](kv::Stream stream, int64_t layer) {
    const int64_t at_once = layers_at_once(geometry, stream), layers = geometry.stream(stream).layers;
    return layer % at_once != 0 ||
           copy(loads_, true, stream, {layer, std::min(layer + at_once, layers)}, loads);
  };
  int64_t index_layer = 0;
  for (int64_t layer = 0; layer < std::ssize(setup_.keeps_index) && !loads_.empty(); ++layer) {
    if (!load_from(kv::Stream::kEntries, layer)) return;
    if (setup_.keeps_index[static_cast<size_t>(layer)] != 0 &&
        !load_from(kv::Stream::kIndexKeys, index_layer++)) {
      return;
    }
    const std::lock_guard lock(mutex_);
    layers_done_ = layer + 1;
    progress_.notify_all();
  }
  for (const kv::Stream stream : kv::kAllStreams) {
    if (!copy(spills_, false, stream, {0, geometry.stream(stream).layers}, spills)) return;
  }
  const std::lock_guard lock(mutex_);
  complete_ = true;
}

}  // namespace weft::worker
