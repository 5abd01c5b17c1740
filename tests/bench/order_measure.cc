#include "tests/bench/order_measure.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numbers>

#include "kernels/attention.h"
#include "kernels/gemm.h"
#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"

namespace weft::bench {
namespace {

constexpr int64_t kBlock = 64;
constexpr int64_t kRows = 8;  // with selections of their own

using Entries = std::vector<const void*>;

// A cache of random entries, and what each row reads of it on a rank of residue class 0.
class Problem {
 public:
  Problem(const LayerShape& shape, const CacheFormat& cache, int c, int64_t heads)
      : members_(c), heads_(heads), latent_(shape.latent), words_(kernels::partial_words(shape.latent)) {
    worker::ModelConfig config;
    config.latent = shape.latent, config.rope = shape.rope;
    const kernels::EntryFormat format = config.entry_format(cache.entries);
    call_.dtype = format.dtype;
    call_.shape = config.entry_shape();
    call_.fp8 = format.fp8;
    call_.heads = heads;
    call_.query_stride = config.key_width();
    call_.scale_log2 = std::numbers::log2e_v<float> / std::sqrt(static_cast<float>(shape.nope + shape.rope));
    SplitMix64 random(3);
    const auto centred = [&] { return static_cast<float>(2 * random.uniform() - 1); };
    entries_.resize(static_cast<size_t>(shape.context * format.bytes()));
    std::vector<float> values(static_cast<size_t>(std::max(heads * config.key_width(), format.width)));
    for (int64_t i = 0; i < shape.context; ++i) {
      for (int64_t j = 0; j < format.width; ++j) values[static_cast<size_t>(j)] = centred();
      kernels::store_entry(format, values.data(), entries_.data() + i * format.bytes());
    }
    for (float& value : values) value = centred();
    query_.resize(values.size() * dtype_bytes(format.dtype));
    kernels::convert(values.data(), heads * config.key_width(), format.dtype, query_.data());
    partials_.resize(static_cast<size_t>(kv::kShards * heads * words_));
    for (auto* out : {&canonical_out_, &free_out_}) out->resize(static_cast<size_t>(heads * latent_));
    for (int64_t row = 0; row < kRows; ++row) {
      auto& lists = rows_.emplace_back();
      for (const int64_t position : selection(shape, random)) {
        if (kv::residue_class(position / kBlock, c) != 0) continue;
        lists[static_cast<size_t>(kv::canonical_shard(position / kBlock))].push_back(
            entries_.data() + position * format.bytes());
      }
      auto& together = all_.emplace_back();
      for (const Entries& list : lists) together.insert(together.end(), list.begin(), list.end());
    }
  }

  void canonical(size_t row) {
    for (int member = 0; member < members_; ++member) {
      for (size_t shard = 0; shard < kv::kShards; ++shard) {
        attend(rows_[row][shard], after(row, member, shard),
               partials_.data() + static_cast<int64_t>(shard) * heads_ * words_);
      }
      for (int64_t head = 0; head < heads_; ++head) {
        kernels::merge_partials(partials_.data() + head * words_, kv::kShards, heads_ * words_, latent_);
      }
      finish(canonical_out_);
    }
  }
  void free(size_t row) {
    for (int member = 0; member < members_; ++member) {
      attend(all_[row], all_[member + 1 == members_ ? (row + 1) % kRows : row], partials_.data());
      finish(free_out_);
    }
  }
  // Equal but for rounding, else one of them did other work.
  void check() {
    for (size_t row = 0; row < rows_.size(); ++row) {
      canonical(row);
      free(row);
      for (size_t i = 0; i < free_out_.size(); ++i) CHECK(std::abs(canonical_out_[i] - free_out_[i]) < 0.02f);
    }
  }
  double mean_entries() const {
    double sum = 0;
    for (const Entries& list : all_) sum += static_cast<double>(list.size());
    return sum / static_cast<double>(all_.size());
  }

 private:
  static std::vector<int64_t> selection(const LayerShape& shape, SplitMix64& random) {
    std::vector<int64_t> chosen;
    for (int64_t left = shape.context, wanted = shape.top_k; left > 0; --left) {
      if (static_cast<int64_t>(random.below(static_cast<uint64_t>(left))) >= wanted) continue;
      chosen.push_back(shape.context - left);
      --wanted;
    }
    return chosen;
  }
  // What the call after a shard's reads: the next shard that is not empty.
  const Entries& after(size_t row, int member, size_t shard) const {
    for (++shard; shard < kv::kShards; ++shard) {
      if (!rows_[row][shard].empty()) return rows_[row][shard];
    }
    return rows_[member + 1 == members_ ? (row + 1) % kRows : row][0];
  }
  void attend(const Entries& list, const Entries& next, float* partials) {
    const kernels::AttentionRow row{query_.data(), std::ssize(list), partials};
    call_.rows = {&row, 1};
    call_.entries = list.data();
    call_.next = next;
    kernels::attend(call_);
  }
  void finish(std::vector<float>& out) {
    for (int64_t head = 0; head < heads_; ++head) {
      kernels::finish_partial(partials_.data() + head * words_, latent_, out.data() + head * latent_);
    }
  }

  const int members_;
  const int64_t heads_, latent_, words_;
  kernels::Attention call_;
  std::vector<std::byte> entries_, query_;
  std::vector<std::array<Entries, kv::kShards>> rows_;
  std::vector<Entries> all_;
  std::vector<float> partials_, canonical_out_, free_out_;
};

}  // namespace

OrderTime measure_order(const LayerShape& shape, const CacheFormat& cache, int c, int64_t heads, int rounds,
                        int repeats) {
  Problem problem(shape, cache, c, heads);
  problem.check();
  const auto seconds_of = [&](void (Problem::*work)(size_t)) {
    const double before = thread_seconds();
    for (int repeat = 0; repeat < repeats; ++repeat) {
      for (size_t row = 0; row < kRows; ++row) (problem.*work)(row);
    }
    return (thread_seconds() - before) / static_cast<double>(repeats * kRows);
  };
  OrderTime time;
  char what[96];
  std::snprintf(what, sizeof what, "%lld heads, %.0f entries in %d shards, %s", (long long)(heads * c),
                problem.mean_entries(), kv::kShards / c, cache_dtype_name(cache.entries));
  time.what = what;
  for (int round = 0; round < rounds; ++round) {
    time.canonical.push_back(seconds_of(&Problem::canonical));
    time.free.push_back(seconds_of(&Problem::free));
  }
  return time;
}

}  // namespace weft::bench
