#include "worker/model/step_state.h"

#include <algorithm>

namespace weft::worker {
namespace {

std::unique_ptr<PageMover> make_mover(const RunnerSetup& setup) {
  if (setup.host.pages().entries == 0) return nullptr;
  MoverSetup mover{setup.pools, setup.host, {}, setup.cores};
  for (const LayerConfig& layer : setup.config->layers) {
    mover.keeps_index.push_back(layer.indexer == Indexer::kFull ? 1 : 0);
  }
  return std::make_unique<PageMover>(std::move(mover));
}

}  // namespace

StepState::StepState(RunnerSetup given)
    : setup(std::move(given)),
      config(*setup.config),
      weights(*setup.weights),
      parallel(*setup.parallel),
      exchange(*setup.exchange),
      topology(setup.topology.count() > 0 ? setup.topology
                                          : kv::Topology::of_all(static_cast<int>(setup.pools.size()))),
      rank(topology.place(setup.rank)),
      rank_count(topology.count()),
      geometry(config.cache_geometry(setup.cache, setup.block_tokens)),
      mover(make_mover(setup)) {}

std::vector<kv::Range> StepState::attended() const {
  std::vector<kv::Range> ranges;
  const auto add = [&](kv::Range rows) {
    if (rows.empty()) return;
    if (!ranges.empty() && ranges.back().end == rows.begin) {
      ranges.back().end = rows.end;
    } else {
      ranges.push_back(rows);
    }
  };
  for (const WideGroup& group : layout.wide_groups()) {
    if (group.ranks.contains(rank)) add({group.first, group.first + group.rows});
  }
  add({layout.wide_count(), home_count()});
  return ranges;
}

std::vector<StepState::WholeRun> StepState::whole_runs() const {
  std::vector<WholeRun> runs;
  for (int64_t i = layout.wide_count(); i < home_count(); ++i) {
    const bool expand = expands(span_of(home()[static_cast<size_t>(i)]));
    if (runs.empty() || runs.back().expands != expand) runs.push_back({{i, i}, expand});
    runs.back().home.end = i + 1;
  }
  return runs;
}

float* StepState::outbox() {
  if (rank_count > 1) return reinterpret_cast<float*>(exchange.outbox().data());
  return scratch(lone_outbox, layout.row_count() * config.hidden);
}

const float* StepState::inbox(int from) const {
  if (rank_count > 1) return reinterpret_cast<const float*>(exchange.inbox(from).data());
  return lone_outbox.data();
}

size_t StepState::query_offset(const SpanRoute& span, int from) {
  query_offsets.resize(static_cast<size_t>(rank_count));
  std::vector<size_t>& offsets = query_offsets[static_cast<size_t>(from)];
  if (offsets.empty()) offsets = queries_offsets(layout, config, setup.cache.query_dtype(), from);
  return offsets[static_cast<size_t>(span.index)];
}

void for_rows(kernels::Parallel& parallel, int64_t rows, int64_t at_once,
              const std::function<void(int64_t begin, int64_t end)>& body) {
  if (rows == 0) return;
  parallel.run(ceil_div(rows, at_once),
               [&](int64_t task, int) { body(task * at_once, std::min(rows, (task + 1) * at_once)); });
}

const void* Operand::of(kernels::Parallel& parallel, DType dtype, const float* x, int64_t count) {
  if (dtype == DType::kF32) return x;
  std::byte* out = scratch(buffer_, count * static_cast<int64_t>(dtype_bytes(dtype)));
  for_rows(parallel, count, 1 << 16, [&](int64_t begin, int64_t end) {
    kernels::convert(x + begin, end - begin, dtype, out + begin * static_cast<int64_t>(dtype_bytes(dtype)));
  });
  return out;
}

}  // namespace weft::worker
