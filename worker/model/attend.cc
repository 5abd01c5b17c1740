#include "worker/model/attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "kernels/mla_attention.h"

namespace weft::worker {
namespace {

// The entries one row reads, by shard, ascending in position.
struct RowEntries {
  std::array<const void* const*, kv::kShards> list{};
  std::array<int64_t, kv::kShards> count{};
  std::vector<const void*> storage;  // sparse rows
};

// Marks which remote positions were touched, once per span and layer; threads may mark the same one.
class Touched {
 public:
  void reset(int64_t positions) { marks_.assign(static_cast<size_t>(positions), 0); }
  void mark(int64_t position) {
    std::atomic_ref<uint8_t>(marks_[static_cast<size_t>(position)]).store(1, std::memory_order_relaxed);
  }
  int64_t count() const { return std::count(marks_.begin(), marks_.end(), uint8_t{1}); }

 private:
  std::vector<uint8_t> marks_;
};

// Dense lists of one span for one layer: the view's lists moved to the layer.
using LayerLists = std::array<std::vector<const void*>, kv::kShards>;

void list_dense(const CacheView& view, const LayerLists& lists, int64_t position, RowEntries& out) {
  for (size_t shard = 0; shard < kv::kShards; ++shard) {
    const auto& positions = view.shard_positions[shard];
    out.list[shard] = lists[shard].data();
    out.count[shard] = std::upper_bound(positions.begin(), positions.end(), position) - positions.begin();
  }
}

void list_selected(const StepState& state, const CacheView& view, int64_t layer_offset, int64_t home,
                   Touched* touched, RowEntries& out) {
  const int64_t P = state.setup.block_tokens;
  const int64_t bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const int32_t* selected = state.selected.data() + home * state.config.index_topk;
  const int32_t n = state.selected_count[static_cast<size_t>(home)];
  std::array<int64_t, kv::kShards + 1> begin{};
  auto shard_at = [&](int32_t i) { return static_cast<size_t>(kv::canonical_shard(selected[i] / P)); };
  auto page_at = [&](int32_t i) { return view.entry_page[static_cast<size_t>(selected[i] / P)]; };
  for (int32_t i = 0; i < n; ++i) {
    if (page_at(i) != nullptr) ++begin[shard_at(i) + 1];
  }
  for (size_t shard = 0; shard < kv::kShards; ++shard) {
    out.count[shard] = begin[shard + 1];
    begin[shard + 1] += begin[shard];
  }
  out.storage.resize(static_cast<size_t>(begin[kv::kShards]));
  for (size_t shard = 0; shard < kv::kShards; ++shard) out.list[shard] = out.storage.data() + begin[shard];
  for (int32_t i = 0; i < n; ++i) {
    const std::byte* page = page_at(i);
    if (page == nullptr) continue;
    out.storage[static_cast<size_t>(begin[shard_at(i)]++)] = page + layer_offset + (selected[i] % P) * bytes;
    if (touched != nullptr && view.entry_remote[static_cast<size_t>(selected[i] / P)])
      touched->mark(selected[i]);
  }
}

// Dense rows read everything up to the last of them.
void mark_dense(const StepState& state, const CacheView& view, int64_t last_position, Touched& touched) {
  const int64_t P = state.setup.block_tokens;
  for (int64_t position = 0; position <= last_position; ++position) {
    if (view.entry_remote[static_cast<size_t>(position / P)]) touched.mark(position);
  }
}

bool has_remote(const CacheView& view) {
  return std::any_of(view.entry_remote.begin(), view.entry_remote.end(), [](uint8_t r) { return r != 0; });
}

}  // namespace

// Jobs of one span at a time (its lists are built once), rows in batches so that partials stay bounded.
void attend(StepState& state, int64_t layer, std::span<const AttendJob> jobs) {
  const ModelConfig& config = state.config;
  const int64_t words = kernels::partial_words(config.latent);
  const int64_t layer_offset = layer * state.geometry.layer_bytes(kv::Stream::kEntries);
  constexpr int64_t kBatchWords = int64_t{8} << 20;
  static thread_local std::vector<float> shard_partials;
  static thread_local std::vector<RowEntries> rows;

  for (size_t span_begin = 0; span_begin < jobs.size();) {
    const int span_index = state.home()[static_cast<size_t>(jobs[span_begin].home)].span;
    size_t span_end = span_begin;
    int64_t heads_max = 1;
    while (span_end < jobs.size() &&
           state.home()[static_cast<size_t>(jobs[span_end].home)].span == span_index) {
      heads_max = std::max(heads_max, jobs[span_end++].heads);
    }
    const CacheView& view = state.views[static_cast<size_t>(span_index)];

    auto dense = [&](const AttendJob& job) {
      return state.selected_count[static_cast<size_t>(job.home)] < 0;
    };
    LayerLists lists;
    int64_t dense_position = -1;
    for (size_t i = span_begin; i < span_end; ++i) {
      if (dense(jobs[i])) {
        dense_position = std::max(dense_position, state.home()[static_cast<size_t>(jobs[i].home)].position);
      }
    }
    if (dense_position >= 0) {
      for (size_t shard = 0; shard < kv::kShards; ++shard) {
        lists[shard].reserve(view.shard_entries[shard].size());
        for (const std::byte* entry : view.shard_entries[shard]) lists[shard].push_back(entry + layer_offset);
      }
    }
    Touched touched;
    const bool remote = has_remote(view);
    if (remote) touched.reset(state.layout.spans()[static_cast<size_t>(span_index)].end());

    const int64_t shard_words = heads_max * words;
    const auto batch = static_cast<size_t>(std::max<int64_t>(1, kBatchWords / (kv::kShards * shard_words)));
    for (size_t begin = span_begin; begin < span_end; begin += batch) {
      const auto count = static_cast<int64_t>(std::min(batch, span_end - begin));
      float* const partials = scratch(shard_partials, count * kv::kShards * shard_words);
      if (std::ssize(rows) < count) rows.resize(static_cast<size_t>(count));
      RowEntries* const row_entries = rows.data();
      const AttendJob* const batch_jobs = jobs.data() + begin;
      for_rows(state.parallel, count, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          const AttendJob& job = batch_jobs[i];
          if (dense(job)) {
            list_dense(view, lists, state.home()[static_cast<size_t>(job.home)].position, row_entries[i]);
          } else {
            list_selected(state, view, layer_offset, job.home, remote ? &touched : nullptr, row_entries[i]);
          }
        }
      });
      state.parallel.run(count * kv::kShards, [&](int64_t task, int) {
        const AttendJob& job = batch_jobs[task / kv::kShards];
        const auto shard = static_cast<size_t>(task % kv::kShards);
        kernels::MlaAttention p;
        p.dtype = state.setup.cache_dtype;
        p.heads = job.heads;
        p.latent = config.latent;
        p.rope = config.rope;
        p.query = job.query;
        p.query_stride = config.entry_width();
        p.entries = row_entries[task / kv::kShards].list[shard];
        p.entry_count = row_entries[task / kv::kShards].count[shard];
        p.scale_log2 = config.scale * 1.44269504088896340736f;
        p.partials = partials + task * shard_words;
        kernels::mla_attend(p);
      });
      for_rows(state.parallel, count, 4, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          float* row = partials + i * kv::kShards * shard_words;
          const AttendJob& job = batch_jobs[i];
          for (int64_t head = 0; head < job.heads; ++head) {
            float* partial = row + head * words;
            kernels::merge_partials(partial, kv::kShards, shard_words, config.latent);
            if (job.finished != nullptr) {
              kernels::finish_partial(partial, config.latent, job.finished + head * config.latent);
            }
          }
          if (job.partials != nullptr) {
            std::memcpy(job.partials, row, static_cast<size_t>(job.heads * words) * sizeof(float));
          }
        }
      });
    }

    if (remote) {
      mark_dense(state, view, dense_position, touched);
      state.count(span_index, kv::CrossKind::kEntries,
                  touched.count() * state.geometry.stream(kv::Stream::kEntries).bytes_per_token);
    }
    span_begin = span_end;
  }
}

}  // namespace weft::worker
