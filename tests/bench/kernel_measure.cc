#include "tests/bench/kernel_measure.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/indexer.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"
#include "worker/thread_pool.h"

namespace weft::bench {
namespace {

// Storage of either dtype filled with values around zero.
class Elements {
 public:
  Elements(DType dtype, int64_t count, uint64_t seed)
      : bytes_(static_cast<size_t>(count) * dtype_bytes(dtype) + 64) {
    SplitMix64 random(seed);
    for (int64_t i = 0; i < count; ++i) {
      const auto value = static_cast<float>(random.uniform() * 2 - 1);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      const auto at = static_cast<size_t>(i) * dtype_bytes(dtype);
      const auto half = static_cast<uint16_t>(bits >> 16);
      dtype == DType::kF32 ? std::memcpy(data() + at, &value, 4) : std::memcpy(data() + at, &half, 2);
    }
  }
  std::byte* data() { return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64; }

 private:
  std::vector<std::byte> bytes_;
};

// Random keys and queries, and the call that selects among them.
struct IndexProblem {
  IndexProblem(const IndexShape& shape, DType dtype)
      : keys(dtype, shape.keys * shape.width, 1),
        query(dtype, shape.rows * shape.heads * shape.width, 2),
        weights(static_cast<size_t>(shape.rows * shape.heads)),
        out(static_cast<size_t>(shape.rows * shape.top_k)),
        counts(static_cast<size_t>(shape.rows)),
        written(static_cast<size_t>(shape.rows)) {
    constexpr int64_t kBlock = 64;
    SplitMix64 random(3);
    for (float& w : weights) w = static_cast<float>(random.uniform());
    for (int64_t b = 0; b < shape.keys / kBlock; ++b) {
      const auto offset = static_cast<size_t>(b * kBlock * shape.width) * dtype_bytes(dtype);
      blocks.push_back({keys.data() + offset, b * kBlock, kBlock});
    }
    for (int64_t r = 0; r < shape.rows; ++r) positions.push_back(shape.keys - shape.rows + r);
    call = {.dtype = dtype,
            .heads = shape.heads,
            .width = shape.width,
            .block_tokens = kBlock,
            .rows = shape.rows,
            .query = query.data(),
            .weights = weights.data(),
            .row_positions = positions.data(),
            .keys = blocks,
            .top_k = shape.top_k,
            .out = out.data(),
            .out_count = counts.data()};
    char text[96];
    std::snprintf(text, sizeof text, "indexer %lld x %lld, %lld keys, %lld rows, top %lld",
                  (long long)shape.heads, (long long)shape.width, (long long)shape.keys,
                  (long long)shape.rows, (long long)shape.top_k);
    what = text;
  }
  Elements keys, query;
  std::vector<float> weights;
  std::vector<kernels::IndexKeys> blocks;
  std::vector<int64_t> positions;
  std::vector<kernels::Candidate> out;
  std::vector<int32_t> counts;
  std::vector<int64_t> written;
  kernels::IndexSelect call;
  std::string what;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + std::ssize(values) / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

KernelTime measure_indexer(const IndexShape& shape, DType dtype, int threads, double seconds) {
  IndexProblem problem(shape, dtype);
  double pairs = 0;
  for (const int64_t position : problem.positions) pairs += static_cast<double>(position + 1);
  worker::ThreadPool parallel(threads);
  const double best = best_seconds(
      seconds, [&] { kernels::index_select(problem.call, parallel); }, threads);
  return {problem.what, best, pairs * 2.0 * static_cast<double>(shape.heads * shape.width)};
}

Rivals measure_rivals(const IndexShape& shape, DType dtype, int rounds) {
  using kernels::Candidate;
  IndexProblem problem(shape, dtype);
  std::vector<float> scores(static_cast<size_t>(shape.rows * shape.keys));
  const auto score_all = [&] { kernels::index_scores(problem.call, 0, shape.rows, scores.data()); };
  kernels::CandidateList list;
  const auto two_passes = [&] {
    score_all();
    for (int64_t row = 0; row < shape.rows; ++row) {
      list.reset(shape.top_k);
      list.offer(scores.data() + row * shape.keys, problem.positions[static_cast<size_t>(row)] + 1, 0);
      list.take(problem.out.data() + row * shape.top_k);
    }
  };
  std::vector<Candidate> all;
  const auto plain = [&] {
    score_all();
    for (int64_t row = 0; row < shape.rows; ++row) {
      all.clear();
      for (int64_t i = 0; i <= problem.positions[static_cast<size_t>(row)]; ++i) {
        all.push_back({scores[static_cast<size_t>(row * shape.keys + i)], static_cast<int32_t>(i)});
      }
      const auto end = all.begin() + std::min(shape.top_k, std::ssize(all));
      std::nth_element(all.begin(), end - 1, all.end(), kernels::ranks_before);
      std::sort(all.begin(), end, [](const auto& a, const auto& b) { return a.position < b.position; });
      std::copy(all.begin(), end, problem.out.begin() + row * shape.top_k);
    }
  };
  const auto streaming = [&] { kernels::index_select(problem.call, kernels::serial()); };
  const auto seconds_of = [](const auto& work) {
    const double before = thread_seconds();
    work();
    return thread_seconds() - before;
  };
  std::vector<double> times[3];
  for (int round = 0; round < rounds; ++round) {
    times[0].push_back(seconds_of(streaming));
    times[1].push_back(seconds_of(two_passes));
    times[2].push_back(seconds_of(plain));
  }
  problem.call.written = problem.written.data();
  streaming();
  double written = 0;
  for (const int64_t count : problem.written) written += static_cast<double>(count);
  return {problem.what, median(times[0]), median(times[1]), median(times[2]),
          written / static_cast<double>(shape.rows)};
}

KernelTime measure_attention(const AttentionShape& shape, DType dtype, int threads, double seconds) {
  constexpr int64_t kRows = 16;
  const int64_t width = shape.latent + shape.rope;
  Elements cache(dtype, shape.context * width, 1);
  Elements query(dtype, shape.heads * width, 2);
  std::vector<std::vector<const void*>> lists;
  SplitMix64 random(4);
  for (int64_t r = 0; r < kRows; ++r) {
    auto& list = lists.emplace_back();
    const int64_t stride = shape.context / shape.entries;
    for (int64_t u = 0; u < shape.entries; ++u) {
      const auto at = u * stride + static_cast<int64_t>(random.below(static_cast<uint64_t>(stride)));
      list.push_back(cache.data() + static_cast<size_t>(at * width) * dtype_bytes(dtype));
    }
  }
  const int64_t partial = shape.heads * kernels::partial_words(shape.latent);
  std::vector<float> partials(static_cast<size_t>(kRows * partial));
  worker::ThreadPool parallel(threads);
  const auto attend = [&] {
    parallel.run(kRows, [&](int64_t row, int) {
      const kernels::AttentionRow one{query.data(), shape.entries, partials.data() + row * partial};
      kernels::attend({.dtype = dtype,
                       .shape = {width, 0, shape.latent},
                       .heads = shape.heads,
                       .query_stride = width,
                       .rows = {&one, 1},
                       .entries = lists[static_cast<size_t>(row)].data(),
                       .scale_log2 = 0.1f});
    });
  };
  const double best = best_seconds(seconds, attend, threads);
  char what[96];
  std::snprintf(what, sizeof what, "attention %lld heads, %lld + %lld, %lld of %lld entries, %lld rows",
                (long long)shape.heads, (long long)shape.latent, (long long)shape.rope,
                (long long)shape.entries, (long long)shape.context, (long long)kRows);
  return {what, best,
          2.0 * static_cast<double>(kRows * shape.heads * shape.entries * (width + shape.latent))};
}

KernelTime measure_grouped(const GroupedShape& shape, DType dtype, int threads, double seconds) {
  constexpr int64_t kLists = 8, kBlock = 64;
  const int64_t width = shape.width;
  Elements cache(dtype, shape.context * 2 * width, 1);
  Elements query(dtype, shape.rows * shape.heads * width, 2);
  std::vector<std::vector<const void*>> lists(kLists);
  for (int64_t position = 0; position < shape.context; ++position) {
    lists[static_cast<size_t>(position / kBlock % kLists)].push_back(
        cache.data() + static_cast<size_t>(position * 2 * width) * dtype_bytes(dtype));
  }
  const int64_t row_words = shape.heads * kernels::partial_words(width);
  std::vector<float> partials(static_cast<size_t>(kLists * shape.rows * row_words));
  std::vector<std::vector<kernels::AttentionRow>> rows(kLists);
  double pairs = 0;
  for (int64_t list = 0; list < kLists; ++list) {
    const auto have = std::ssize(lists[static_cast<size_t>(list)]);
    for (int64_t row = 0; row < shape.rows; ++row) {
      // Of the last rows' own blocks each list has about an eighth.
      const int64_t count = have - (shape.rows - 1 - row) / kLists;
      rows[static_cast<size_t>(list)].push_back(
          {query.data() + static_cast<size_t>(row * shape.heads * width) * dtype_bytes(dtype), count,
           partials.data() + (list * shape.rows + row) * row_words});
      pairs += static_cast<double>(count);
    }
  }
  worker::ThreadPool parallel(threads);
  const auto attend = [&] {
    parallel.run(kLists, [&](int64_t list, int) {
      kernels::attend({.dtype = dtype,
                       .shape = {width, width, width},
                       .heads = shape.heads,
                       .query_stride = width,
                       .rows = rows[static_cast<size_t>(list)],
                       .entries = lists[static_cast<size_t>(list)].data(),
                       .scale_log2 = 0.1f});
    });
  };
  const double best = best_seconds(seconds, attend, threads);
  char what[96];
  std::snprintf(what, sizeof what, "grouped %lld heads of %lld, %lld entries, %lld row%s",
                (long long)shape.heads, (long long)width, (long long)shape.context, (long long)shape.rows,
                shape.rows == 1 ? "" : "s");
  return {what, best, pairs * 4.0 * static_cast<double>(shape.heads * width)};
}

}  // namespace weft::bench
