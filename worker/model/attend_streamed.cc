#include "worker/model/attend_streamed.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kernels/attention.h"
#include "worker/model/finish.h"

namespace weft::worker {
namespace {

class StreamedJobs {
 public:
  StreamedJobs(StepState& state, int64_t layer, std::span<const AttendJob> jobs)
      : state_(state),
        jobs_(jobs),
        view_(state.views[static_cast<size_t>(jobs.front().span)]),
        part_(view_.entries[static_cast<size_t>(jobs.front().part)]),
        entry_bytes_(state.geometry.stream(kv::Stream::kEntries).bytes_per_token),
        layer_offset_(layer * state.geometry.layer_bytes(kv::Stream::kEntries)),
        words_(kernels::partial_words(state.config.value_width())),
        window_(state.config.layers[static_cast<size_t>(layer)].window),
        calls_(attend_calls(state, jobs)) {
    int64_t heads = 1;
    for (const AttendJob& job : jobs_) {
      heads = std::max(heads, job.heads);
      end_ = std::max(end_, job.position + 1);
    }
    job_words_ = heads * words_;
    counts_.resize(jobs_.size());
    skipped_.assign(jobs_.size(), 0);
    lists_.resize(jobs_.size());
  }

  void run() {
    static thread_local std::vector<float> buffer;
    float* const partials = scratch(buffer, kTreeLevels * level_words());
    Staged staged[2];
    plan(kTreeOrder[0], staged[0]);
    state_.parallel.run(std::ssize(staged[0].blocks), [&](int64_t task, int) { copy(staged[0], task); });
    int level = 0;
    for (int i = 0; i < kv::kShards; ++i) {
      const Staged& now = staged[i % 2];
      Staged& next = staged[(i + 1) % 2];
      if (i + 1 < kv::kShards) plan(kTreeOrder[static_cast<size_t>(i + 1)], next);
      const int64_t copies = i + 1 < kv::kShards ? std::ssize(next.blocks) : 0;
      list_shard(kTreeOrder[static_cast<size_t>(i)], now);
      float* out = partials + level * level_words();
      state_.parallel.run(copies + std::ssize(calls_), [&](int64_t task, int) {
        if (task < copies) {
          copy(next, task);
        } else {
          attend_call(calls_[static_cast<size_t>(task - copies)], out);
        }
      });
      for (int merges = std::countr_zero(static_cast<unsigned>(i + 1)); merges > 0; --merges, --level) {
        merge(partials + (level - 1) * level_words(), partials + level * level_words());
      }
      ++level;
    }
    deliver(partials);
    state_.count(jobs_.front().span, kv::CrossKind::kEntries, copied_slots_ * entry_bytes_);
    state_.count(jobs_.front().span, kv::CrossKind::kHost, host_slots() * entry_bytes_);
  }

 private:
  // The remote blocks of a shard, and where their copies lie.
  struct Staged {
    std::vector<int64_t> blocks;
    std::vector<std::byte> bytes;
    std::vector<int64_t> offset;  // by block; −1: not remote, or of another shard
  };

  int64_t slots_of(int64_t block) const {
    return std::min(state_.setup.block_tokens, end_ - block * state_.setup.block_tokens);
  }
  // Entries of the host pool that some row reads, where they lie.
  int64_t host_slots() const {
    const int64_t P = state_.setup.block_tokens, end = std::min(part_.host_blocks * P, end_);
    std::vector<uint8_t> read(static_cast<size_t>(end), 0);
    for (const AttendJob& job : jobs_) {
      if (is_dense(state_, job)) {
        const int64_t first = window_ == 0 ? 0 : std::max<int64_t>(0, job.position + 1 - window_);
        for (int64_t at = first; at < std::min(end, job.position + 1); ++at)
          read[static_cast<size_t>(at)] = 1;
        continue;
      }
      const int32_t* selected = state_.selected.data() + job.home * state_.config.index_topk;
      for (int32_t i = 0; i < state_.selected_count[static_cast<size_t>(job.home)] && selected[i] < end; ++i)
        read[static_cast<size_t>(selected[i])] = 1;
    }
    return std::count(read.begin(), read.end(), uint8_t{1});
  }
  int64_t level_words() const { return std::ssize(jobs_) * job_words_; }

  void plan(int shard, Staged& staged) {
    staged.blocks.clear();
    staged.offset.assign(part_.page.size(), -1);
    int64_t size = 0;
    for (int64_t block = 0; block < std::ssize(part_.page) && slots_of(block) > 0; ++block) {
      if (!part_.remote[static_cast<size_t>(block)] || kv::canonical_shard(block) != shard) continue;
      staged.blocks.push_back(block);
      staged.offset[static_cast<size_t>(block)] = size;
      size += slots_of(block) * entry_bytes_;
      copied_slots_ += slots_of(block);
    }
    scratch(staged.bytes, size);
  }

  void copy(Staged& staged, int64_t i) const {
    const int64_t block = staged.blocks[static_cast<size_t>(i)];
    std::memcpy(staged.bytes.data() + staged.offset[static_cast<size_t>(block)],
                part_.page[static_cast<size_t>(block)] + layer_offset_,
                static_cast<size_t>(slots_of(block) * entry_bytes_));
  }

  const std::byte* entries_of(int64_t block, const Staged& staged) const {
    const int64_t offset = staged.offset[static_cast<size_t>(block)];
    return offset >= 0 ? staged.bytes.data() + offset
                       : part_.page[static_cast<size_t>(block)] + layer_offset_;
  }

  // What each row reads of one shard: a beginning of the list that dense rows share, or the entries it
  // selected.
  void list_shard(int shard, const Staged& staged) {
    const int64_t P = state_.setup.block_tokens;
    const auto& positions = view_.shard_positions[static_cast<size_t>(shard)];
    dense_list_.clear();
    for (const int64_t position : positions) {
      if (position >= end_) break;
      dense_list_.push_back(entries_of(position / P, staged) + position % P * entry_bytes_);
    }
    for_rows(state_.parallel, std::ssize(jobs_), 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const AttendJob& job = jobs_[static_cast<size_t>(i)];
        if (is_dense(state_, job)) {
          const int64_t first_seen = window_ == 0 ? 0 : std::max<int64_t>(0, job.position + 1 - window_);
          const auto end = std::upper_bound(positions.begin(), positions.end(), job.position);
          counts_[static_cast<size_t>(i)] = end - positions.begin();
          skipped_[static_cast<size_t>(i)] =
              std::lower_bound(positions.begin(), end, first_seen) - positions.begin();
          continue;
        }
        std::vector<const void*>& list = lists_[static_cast<size_t>(i)];
        list.clear();
        const int32_t* selected = state_.selected.data() + job.home * state_.config.index_topk;
        for (int32_t s = 0; s < state_.selected_count[static_cast<size_t>(job.home)]; ++s) {
          if (kv::canonical_shard(selected[s] / P) != shard) continue;
          list.push_back(entries_of(selected[s] / P, staged) + selected[s] % P * entry_bytes_);
        }
        counts_[static_cast<size_t>(i)] = std::ssize(list);
      }
    });
  }

  void attend_call(std::span<const AttendJob> call, float* out) const {
    static thread_local std::vector<kernels::AttentionRow> rows;
    rows.clear();
    const auto first = static_cast<size_t>(call.data() - jobs_.data());
    for (size_t i = 0; i < call.size(); ++i) {
      rows.push_back({call[i].query, counts_[first + i], out + static_cast<int64_t>(first + i) * job_words_,
                      skipped_[first + i]});
    }
    const bool dense = is_dense(state_, call.front());
    attend_rows(state_, call.front().heads, rows, dense ? dense_list_.data() : lists_[first].data());
  }

  void merge(float* left, const float* right) const {
    const int64_t width = state_.config.value_width();
    for_rows(state_.parallel, std::ssize(jobs_), 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        for (int64_t head = 0; head < jobs_[static_cast<size_t>(i)].heads; ++head) {
          const int64_t at = i * job_words_ + head * words_;
          kernels::merge_partial(left + at, right + at, width);
        }
      }
    });
  }

  void deliver(const float* partials) const {
    const int64_t width = state_.config.value_width();
    for_rows(state_.parallel, std::ssize(jobs_), 4, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) {
        const AttendJob& job = jobs_[static_cast<size_t>(i)];
        const float* row = partials + i * job_words_;
        for (int64_t head = 0; head < job.heads && job.finished != nullptr; ++head) {
          finish_head(state_.config, row + head * words_, job.finished + head * width);
        }
        if (job.partials != nullptr) {
          std::memcpy(job.partials, row, static_cast<size_t>(job.heads * words_) * sizeof(float));
        }
      }
    });
  }

  StepState& state_;
  const std::span<const AttendJob> jobs_;
  const CacheView& view_;
  const CacheView::Part& part_;
  const int64_t entry_bytes_, layer_offset_, words_;
  const int64_t window_;  // 0: all
  const std::vector<std::span<const AttendJob>> calls_;
  int64_t end_ = 0;  // positions that some row may read
  int64_t job_words_ = 0;
  int64_t copied_slots_ = 0;
  std::vector<int64_t> skipped_;                 // by job: the first ones of a dense list, before its window
  std::vector<int64_t> counts_;                  // by job, of the present shard
  std::vector<const void*> dense_list_;          // of the present shard
  std::vector<std::vector<const void*>> lists_;  // the same of jobs that select
};

}  // namespace

void attend_streamed(StepState& state, int64_t layer, std::span<const AttendJob> jobs) {
  StreamedJobs(state, layer, jobs).run();
}

}  // namespace weft::worker
