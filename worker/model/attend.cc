#include "worker/model/attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numbers>

#include "kernels/attention.h"
#include "worker/model/attend_streamed.h"
#include "worker/model/finish.h"
#include "worker/model/host_entries.h"

namespace weft::worker {
namespace {

// The entries one row reads, by shard, ascending in position.
struct RowEntries {
  std::array<const void* const*, kv::kShards> list{};
  std::array<int64_t, kv::kShards> count{};
  std::array<int64_t, kv::kShards> skipped{};  // before the window
  std::vector<const void*> storage;            // sparse rows
};

// Marks which positions elsewhere were touched, once per span and layer; threads may mark the same one.
class Touched {
 public:
  void reset(int64_t positions) { marks_.assign(static_cast<size_t>(positions), 0); }
  void mark(int64_t position) {
    std::atomic_ref<uint8_t>(marks_[static_cast<size_t>(position)]).store(1, std::memory_order_relaxed);
  }
  // Of positions first … end − 1.
  int64_t count(int64_t first, int64_t end) const {
    return std::count(marks_.begin() + first, marks_.begin() + end, uint8_t{1});
  }

 private:
  std::vector<uint8_t> marks_;
};

// Entries of one span, part and layer by shard, beside the view's positions but for the first `missing`:
// whole groups that lie before every row's window.
struct LayerLists {
  std::array<std::vector<const void*>, kv::kShards> entries;
  std::array<int64_t, kv::kShards> missing{};
};

// What a dense row of this position reads, from position `first` on.
void list_dense(const CacheView& view, const LayerLists& lists, int64_t first, int64_t position,
                RowEntries& out) {
  for (size_t shard = 0; shard < kv::kShards; ++shard) {
    const auto& positions = view.shard_positions[shard];
    const auto end = std::upper_bound(positions.begin(), positions.end(), position);
    const auto begin = first == 0 ? positions.begin() : std::lower_bound(positions.begin(), end, first);
    out.list[shard] = lists.entries[shard].data();
    out.count[shard] = end - positions.begin() - lists.missing[shard];
    out.skipped[shard] = begin - positions.begin() - lists.missing[shard];
  }
}

void list_selected(const StepState& state, const CacheView& span, const CacheView::Part& view, int64_t layer,
                   int64_t home, Touched* touched, RowEntries& out) {
  const int64_t layer_offset = layer * state.geometry.layer_bytes(kv::Stream::kEntries);
  const int64_t P = state.setup.block_tokens;
  const int64_t bytes = state.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const int32_t* selected = state.selected.data() + home * state.config.index_topk;
  const int32_t n = state.selected_count[static_cast<size_t>(home)];
  std::array<int64_t, kv::kShards + 1> begin{};
  auto shard_at = [&](int32_t i) { return static_cast<size_t>(kv::canonical_shard(selected[i] / P)); };
  auto page_at = [&](int32_t i) { return view.page[static_cast<size_t>(selected[i] / P)]; };
  for (int32_t i = 0; i < n; ++i) {
    if (page_at(i) != nullptr) ++begin[shard_at(i) + 1];
  }
  for (size_t shard = 0; shard < kv::kShards; ++shard) {
    out.count[shard] = begin[shard + 1];
    begin[shard + 1] += begin[shard];
  }
  out.skipped.fill(0);
  out.storage.resize(static_cast<size_t>(begin[kv::kShards]));
  for (size_t shard = 0; shard < kv::kShards; ++shard) out.list[shard] = out.storage.data() + begin[shard];
  for (int32_t i = 0; i < n; ++i) {
    const std::byte* page = page_at(i);
    if (page == nullptr) continue;
    const int64_t block = selected[i] / P;
    const bool on_host = block < view.host_blocks;
    const std::byte* entry =
        on_host && span.hot != nullptr ? hot_entry(state, span, layer, selected[i]) : nullptr;
    if (entry == nullptr) {
      entry = page + layer_offset + (selected[i] % P) * bytes;
      if (touched != nullptr && (on_host || view.remote[static_cast<size_t>(block)]))
        touched->mark(selected[i]);
    }
    out.storage[static_cast<size_t>(begin[shard_at(i)]++)] = entry;
  }
}

bool has_remote(const CacheView::Part& view) {
  return std::any_of(view.remote.begin(), view.remote.end(), [](uint8_t r) { return r != 0; });
}

// The jobs of one span and part: its lists are built once, its rows go through in batches so that partials
// stay bounded.
class SpanJobs {
 public:
  SpanJobs(StepState& state, int64_t layer, int span, std::span<const AttendJob> jobs)
      : state_(state),
        span_(span),
        view_(state.views[static_cast<size_t>(span)]),
        part_(view_.entries[static_cast<size_t>(jobs.front().part)]),
        jobs_(jobs),
        words_(kernels::partial_words(state.config.value_width())),
        layer_offset_(layer * state.geometry.layer_bytes(kv::Stream::kEntries)),
        window_(state.config.layers[static_cast<size_t>(layer)].window),
        elsewhere_(has_remote(part_) || part_.host_blocks > 0),
        layer_(layer) {
    int64_t heads_max = 1;
    for (const AttendJob& job : jobs_) {
      heads_max = std::max(heads_max, job.heads);
      if (dense(job)) first_seen_ = std::min(first_seen_, first_seen_of(job));
    }
    shard_words_ = heads_max * words_;
    if (first_seen_ != kNothing) list_layer();
    if (view_.hot != nullptr) fetch_selected(state_, layer, jobs_);
    if (elsewhere_) touched_.reset(state_.layout.spans()[static_cast<size_t>(span_)].end());
  }

  void run() {
    constexpr int64_t kBatchWords = int64_t{8} << 20;
    static thread_local std::vector<float> partials;
    static thread_local std::vector<RowEntries> rows;
    const auto batch = static_cast<size_t>(std::max<int64_t>(1, kBatchWords / (kv::kShards * shard_words_)));
    for (size_t begin = 0; begin < jobs_.size(); begin += batch) {
      const auto jobs = jobs_.subspan(begin, std::min(batch, jobs_.size() - begin));
      if (rows.size() < jobs.size()) rows.resize(jobs.size());
      list_entries(jobs, rows.data());
      attend_shards(jobs, rows.data(), scratch(partials, std::ssize(jobs) * kv::kShards * shard_words_));
      merge_shards(jobs, partials.data());
    }
    if (!elsewhere_) return;
    mark_dense();
    const int64_t bytes = state_.geometry.stream(kv::Stream::kEntries).bytes_per_token;
    const int64_t host = part_.host_blocks * state_.setup.block_tokens;
    const int64_t end = state_.layout.spans()[static_cast<size_t>(span_)].end();
    state_.count(span_, kv::CrossKind::kHost, touched_.count(0, std::min(host, end)) * bytes);
    if (host < end) state_.count(span_, kv::CrossKind::kEntries, touched_.count(host, end) * bytes);
  }

 private:
  bool dense(const AttendJob& job) const { return is_dense(state_, job); }

  // The first position that a dense row sees.
  int64_t first_seen_of(const AttendJob& job) const {
    return window_ == 0 ? 0 : std::max<int64_t>(0, job.position + 1 - window_);
  }

  // A block's positions lie together in a shard's.
  void list_layer() {
    const int64_t bytes = state_.geometry.stream(kv::Stream::kEntries).bytes_per_token;
    const int64_t P = state_.setup.block_tokens;
    for (size_t shard = 0; shard < kv::kShards; ++shard) {
      const auto& positions = view_.shard_positions[shard];
      const int64_t before =
          std::lower_bound(positions.begin(), positions.end(), first_seen_) - positions.begin();
      lists_.missing[shard] = before / kernels::kGroupEntries * kernels::kGroupEntries;
      auto& list = lists_.entries[shard];
      list.reserve(positions.size() - static_cast<size_t>(lists_.missing[shard]));
      for (int64_t i = lists_.missing[shard]; i < std::ssize(positions);) {
        const int64_t position = positions[static_cast<size_t>(i)];
        const std::byte* entry = part_.page[static_cast<size_t>(position / P)] + layer_offset_;
        const int64_t end = std::min(i + P - position % P, std::ssize(positions));
        for (int64_t slot = position % P; i < end; ++i, ++slot) list.push_back(entry + slot * bytes);
      }
    }
  }

  // What dense rows, ascending in position, read elsewhere.
  void mark_dense() {
    const int64_t P = state_.setup.block_tokens;
    int64_t marked = 0;  // up to here, if seen at all
    for (const AttendJob& job : jobs_) {
      if (!dense(job)) continue;
      for (int64_t at = std::max(marked, first_seen_of(job)); at <= job.position; ++at) {
        if (at / P < part_.host_blocks || part_.remote[static_cast<size_t>(at / P)]) touched_.mark(at);
      }
      marked = std::max(marked, job.position + 1);
    }
  }

  void list_entries(std::span<const AttendJob> jobs, RowEntries* rows) {
    for_rows(state_.parallel, std::ssize(jobs), 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const AttendJob& job = jobs[static_cast<size_t>(i)];
        if (dense(job)) {
          list_dense(view_, lists_, first_seen_of(job), job.position, rows[i]);
        } else {
          list_selected(state_, view_, part_, layer_, job.home, elsewhere_ ? &touched_ : nullptr, rows[i]);
        }
      }
    });
  }

  // partials[job][shard], shard_words_ apart.
  void attend_shards(std::span<const AttendJob> jobs, const RowEntries* rows, float* partials) {
    const auto calls = attend_calls(state_, jobs);
    const int64_t tasks = std::ssize(calls) * kv::kShards;
    const auto last_row = [&](int64_t task) -> const RowEntries& {
      return rows[&calls[static_cast<size_t>(task / kv::kShards)].back() - jobs.data()];
    };
    // Tasks are handed out one by one, so this thread's next one is about that many further.
    const auto next_of = [&](int64_t task) -> std::span<const void* const> {
      for (task += state_.parallel.thread_count(); task < tasks; ++task) {
        const auto shard = static_cast<size_t>(task % kv::kShards);
        const RowEntries& row = last_row(task);
        const int64_t count = row.count[shard] - row.skipped[shard];
        if (count > 0) return {row.list[shard] + row.skipped[shard], static_cast<size_t>(count)};
      }
      return {};
    };
    state_.parallel.run(tasks, [&](int64_t task, int) {
      const std::span<const AttendJob> call = calls[static_cast<size_t>(task / kv::kShards)];
      const auto shard = static_cast<size_t>(task % kv::kShards);
      const int64_t first = call.data() - jobs.data();
      static thread_local std::vector<kernels::AttentionRow> list;
      list.clear();
      for (int64_t i = 0; i < std::ssize(call); ++i) {
        list.push_back({call[static_cast<size_t>(i)].query, rows[first + i].count[shard],
                        partials + ((first + i) * kv::kShards + static_cast<int64_t>(shard)) * shard_words_,
                        rows[first + i].skipped[shard]});
      }
      attend_rows(state_, call.front().heads, list, last_row(task).list[shard], next_of(task));
    });
  }

  // The shards of each job down the tree, to where the job wants the result.
  void merge_shards(std::span<const AttendJob> jobs, float* partials) {
    const int64_t width = state_.config.value_width();
    for_rows(state_.parallel, std::ssize(jobs), 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const AttendJob& job = jobs[static_cast<size_t>(i)];
        float* row = partials + i * kv::kShards * shard_words_;
        for (int64_t head = 0; head < job.heads; ++head) {
          float* partial = row + head * words_;
          kernels::merge_partials(partial, kv::kShards, shard_words_, width);
          if (job.finished != nullptr) finish_head(state_.config, partial, job.finished + head * width);
        }
        if (job.partials != nullptr) {
          std::memcpy(job.partials, row, static_cast<size_t>(job.heads * words_) * sizeof(float));
        }
      }
    });
  }

  StepState& state_;
  const int span_;
  const CacheView& view_;
  const CacheView::Part& part_;
  const std::span<const AttendJob> jobs_;
  const int64_t words_;  // of a partial
  const int64_t layer_offset_;
  const int64_t window_;  // 0: none
  const bool elsewhere_;  // it reads other ranks' pages, or the host pool's
  const int64_t layer_;
  int64_t shard_words_ = 0;
  static constexpr int64_t kNothing = INT64_MAX;
  int64_t first_seen_ = kNothing;  // by any dense row
  LayerLists lists_;
  Touched touched_;
};

}  // namespace

bool is_dense(const StepState& state, const AttendJob& job) {
  return job.home < 0 || state.selected_count[static_cast<size_t>(job.home)] < 0;
}

std::vector<std::span<const AttendJob>> attend_calls(const StepState& state,
                                                     std::span<const AttendJob> jobs) {
  constexpr int64_t kHeadsTogether = 64;
  std::vector<std::span<const AttendJob>> calls;
  for (size_t begin = 0, end = 0; begin < jobs.size(); begin = end) {
    const auto most = static_cast<size_t>(std::max<int64_t>(1, kHeadsTogether / jobs[begin].heads));
    for (end = begin + 1; end < jobs.size() && end - begin < most; ++end) {
      const AttendJob &last = jobs[end - 1], &next = jobs[end];
      if (!is_dense(state, last) || !is_dense(state, next)) break;
      if (next.heads != last.heads || next.position < last.position) break;
    }
    calls.push_back(jobs.subspan(begin, end - begin));
  }
  return calls;
}

void attend_rows(const StepState& state, int64_t heads, std::span<const kernels::AttentionRow> rows,
                 const void* const* entries, std::span<const void* const> next) {
  const ModelConfig& config = state.config;
  const kernels::EntryFormat format = config.entry_format(state.setup.cache.entries);
  kernels::attend({.dtype = format.dtype,
                   .shape = config.entry_shape(),
                   .fp8 = format.fp8,
                   .heads = heads,
                   .query_stride = config.key_width(),
                   .rows = rows,
                   .entries = entries,
                   .next = next,
                   .scale_log2 = config.scale * std::numbers::log2e_v<float>});
}

void attend(StepState& state, int64_t layer, std::span<const AttendJob> jobs) {
  while (!jobs.empty()) {
    const int span = jobs.front().span;
    const auto same = [&](const AttendJob& job) { return job.span == span && job.part == jobs.front().part; };
    size_t count = 1;
    while (count < jobs.size() && same(jobs[count])) ++count;
    const auto& entries = state.views[static_cast<size_t>(span)].entries;
    if (state.layout.spans()[static_cast<size_t>(span)].copy_context &&
        has_remote(entries[static_cast<size_t>(jobs.front().part)])) {
      attend_streamed(state, layer, jobs.first(count));
    } else {
      SpanJobs(state, layer, span, jobs.first(count)).run();
    }
    jobs = jobs.subspan(count);
  }
}

}  // namespace weft::worker
