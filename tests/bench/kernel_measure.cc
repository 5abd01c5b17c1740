#include "tests/bench/kernel_measure.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/attention.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/entry.h"
#include "kernels/gemm.h"
#include "kernels/indexer.h"
#include "proto/vocab/random.h"
#include "tests/bench/figures.h"

namespace weft::bench {
namespace {

// Bytes that begin a cache line.
class Bytes {
 public:
  explicit Bytes(int64_t count) : bytes_(static_cast<size_t>(count) + 64) {}
  std::byte* at(int64_t offset) {
    return bytes_.data() + (64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64) % 64 + offset;
  }

 private:
  std::vector<std::byte> bytes_;
};

std::vector<float> around_zero(int64_t count, SplitMix64& random) {
  std::vector<float> out(static_cast<size_t>(count));
  for (float& v : out) v = static_cast<float>(random.uniform() * 2 - 1);
  return out;
}

// Queries, or whatever else is stored element by element.
Bytes elements(DType dtype, int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  Bytes out(count * static_cast<int64_t>(dtype_bytes(dtype)));
  kernels::convert(around_zero(count, random).data(), count, dtype, out.at(0));
  return out;
}

// `count` entries one after the other, stored as a worker stores them.
Bytes entries(const kernels::EntryFormat& format, int64_t count, uint64_t seed) {
  SplitMix64 random(seed);
  Bytes out(count * format.bytes());
  for (int64_t i = 0; i < count; ++i) {
    kernels::store_entry(format, around_zero(format.width, random).data(), out.at(i * format.bytes()));
  }
  return out;
}

kernels::EntryFormat latent_entries(const AttentionShape& shape, CacheDType cache) {
  kernels::EntryFormat format{compute_dtype(cache), shape.latent + shape.rope, {}};
  if (cache == CacheDType::kFp8DsMla) format.fp8 = {1, shape.latent, true};
  if (cache == CacheDType::kFp8) format.fp8 = {1, shape.latent + shape.rope, false};
  return format;
}
kernels::EntryFormat grouped_entries(const GroupedShape& shape, CacheDType cache) {
  kernels::EntryFormat format{compute_dtype(cache), 2 * shape.width, {}};
  if (cache == CacheDType::kFp8) format.fp8 = {2, shape.width, true};
  return format;
}

// Random keys and queries, and the call that selects among them.
struct IndexProblem {
  static constexpr int64_t kBlock = 64;

  IndexProblem(const IndexShape& shape, CacheDType cache)
      : query(elements(compute_dtype(cache), shape.rows * shape.heads * shape.width, 2)),
        keys(shape.keys * kernels::index_key_bytes(shape.width, compute_dtype(cache), fp8(cache))),
        weights(static_cast<size_t>(shape.rows * shape.heads)),
        out(static_cast<size_t>(shape.rows * shape.top_k)),
        counts(static_cast<size_t>(shape.rows)),
        written(static_cast<size_t>(shape.rows)) {
    SplitMix64 random(3);
    for (float& w : weights) w = static_cast<float>(random.uniform());
    store_keys(shape, cache);
    for (int64_t r = 0; r < shape.rows; ++r) positions.push_back(shape.keys - shape.rows + r);
    call = {.dtype = compute_dtype(cache),
            .fp8_keys = fp8(cache),
            .heads = shape.heads,
            .width = shape.width,
            .block_tokens = kBlock,
            .rows = shape.rows,
            .query = query.at(0),
            .weights = weights.data(),
            .row_positions = positions.data(),
            .keys = blocks,
            .top_k = shape.top_k,
            .out = out.data(),
            .out_count = counts.data()};
    char text[96];
    std::snprintf(text, sizeof text, "indexer %lld x %lld, %lld keys, %lld rows, top %lld, %s",
                  (long long)shape.heads, (long long)shape.width, (long long)shape.keys,
                  (long long)shape.rows, (long long)shape.top_k, cache_dtype_name(cache));
    what = text;
  }
  static bool fp8(CacheDType cache) { return cache == CacheDType::kFp8; }

  void store_keys(const IndexShape& shape, CacheDType cache) {
    const DType dtype = compute_dtype(cache);
    const int64_t bytes = kBlock * kernels::index_key_bytes(shape.width, dtype, fp8(cache));
    SplitMix64 random(1);
    for (int64_t b = 0; b < shape.keys / kBlock; ++b) {
      std::byte* page = keys.at(b * bytes);
      for (int64_t slot = 0; slot < kBlock; ++slot) {
        const std::vector<float> key = around_zero(shape.width, random);
        fp8(cache) ? kernels::store_fp8_index_key(key.data(), shape.width, true, kBlock, slot, page)
                   : kernels::store_index_key(key.data(), shape.width, dtype, kBlock, slot, page);
      }
      blocks.push_back({page, b * kBlock, kBlock});
    }
  }

  Bytes query, keys;
  std::vector<float> weights;
  std::vector<kernels::IndexKeys> blocks;
  std::vector<int64_t> positions;
  std::vector<kernels::Candidate> out;
  std::vector<int32_t> counts;
  std::vector<int64_t> written;
  kernels::IndexSelect call;
  std::string what;
};

}  // namespace

Contender indexer(const IndexShape& shape, CacheDType cache, kernels::Parallel& parallel) {
  auto problem = std::make_shared<IndexProblem>(shape, cache);  // shared: a std::function is copied
  double pairs = 0;
  for (const int64_t position : problem->positions) pairs += static_cast<double>(position + 1);
  return {problem->what, pairs * 2.0 * static_cast<double>(shape.heads * shape.width),
          [problem, &parallel] { kernels::index_select(problem->call, parallel); }};
}

Rivals measure_rivals(const IndexShape& shape, CacheDType cache, int rounds) {
  using kernels::Candidate;
  IndexProblem problem(shape, cache);
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
  const Contender contenders[] = {{"streaming", 1, streaming},
                                  {"scores", 1, score_all},
                                  {"two passes", 1, two_passes},
                                  {"plain", 1, plain}};
  const auto rates = take_turns(contenders, rounds, 1, 0.0);
  const auto seconds = [&](size_t i) { return 1e-9 / summarize(rates[i]).median; };
  problem.call.written = problem.written.data();
  streaming();
  double written = 0;
  for (const int64_t count : problem.written) written += static_cast<double>(count);
  return {problem.what, seconds(0), seconds(1),
          seconds(2),   seconds(3), written / static_cast<double>(shape.rows)};
}

namespace {

struct AttentionProblem {
  static constexpr int64_t kRows = 16;

  AttentionProblem(const AttentionShape& shape, CacheDType cache)
      : shape(shape),
        format(latent_entries(shape, cache)),
        pool(entries(format, shape.context, 1)),
        query(elements(format.dtype, shape.heads * format.width, 2)),
        row_words(shape.heads * kernels::partial_words(shape.latent)),
        partials(static_cast<size_t>(kRows * row_words)) {
    SplitMix64 random(4);
    const int64_t stride = shape.context / shape.entries;
    for (int64_t r = 0; r < kRows; ++r) {
      auto& list = lists.emplace_back();
      for (int64_t u = 0; u < shape.entries; ++u) {
        const auto at = u * stride + static_cast<int64_t>(random.below(static_cast<uint64_t>(stride)));
        list.push_back(pool.at(at * format.bytes()));
      }
    }
  }
  double operations() const {
    return 2.0 * static_cast<double>(kRows * shape.heads * shape.entries * (format.width + shape.latent));
  }
  void run(kernels::Parallel& parallel) {
    parallel.run(kRows, [&](int64_t row, int) {
      const kernels::AttentionRow one{query.at(0), shape.entries, partials.data() + row * row_words};
      kernels::attend({.dtype = format.dtype,
                       .shape = {format.width, 0, shape.latent},
                       .fp8 = format.fp8,
                       .heads = shape.heads,
                       .query_stride = format.width,
                       .rows = {&one, 1},
                       .entries = lists[static_cast<size_t>(row)].data(),
                       .scale_log2 = 0.1f});
    });
  }

  AttentionShape shape;
  kernels::EntryFormat format;
  Bytes pool, query;
  std::vector<std::vector<const void*>> lists;
  int64_t row_words;
  std::vector<float> partials;
};

struct GroupedProblem {
  static constexpr int64_t kLists = 8, kBlock = 64;

  GroupedProblem(const GroupedShape& shape, CacheDType cache)
      : shape(shape),
        format(grouped_entries(shape, cache)),
        pool(entries(format, shape.context, 1)),
        query(elements(format.dtype, shape.rows * shape.heads * shape.width, 2)),
        lists(kLists),
        rows(kLists) {
    for (int64_t position = 0; position < shape.context; ++position) {
      lists[static_cast<size_t>(position / kBlock % kLists)].push_back(pool.at(position * format.bytes()));
    }
    const int64_t row_words = shape.heads * kernels::partial_words(shape.width);
    const int64_t query_bytes = shape.heads * shape.width * static_cast<int64_t>(dtype_bytes(format.dtype));
    partials.resize(static_cast<size_t>(kLists * shape.rows * row_words));
    for (int64_t list = 0; list < kLists; ++list) {
      const auto have = std::ssize(lists[static_cast<size_t>(list)]);
      for (int64_t row = 0; row < shape.rows; ++row) {
        // Of the last rows' own blocks each list has about an eighth.
        const int64_t count = have - (shape.rows - 1 - row) / kLists;
        rows[static_cast<size_t>(list)].push_back(
            {query.at(row * query_bytes), count, partials.data() + (list * shape.rows + row) * row_words});
        pairs += static_cast<double>(count);
      }
    }
  }
  double operations() const { return pairs * 4.0 * static_cast<double>(shape.heads * shape.width); }
  void run(kernels::Parallel& parallel) {
    parallel.run(kLists, [&](int64_t list, int) {
      kernels::attend({.dtype = format.dtype,
                       .shape = {shape.width, shape.width, shape.width},
                       .fp8 = format.fp8,
                       .heads = shape.heads,
                       .query_stride = shape.width,
                       .rows = rows[static_cast<size_t>(list)],
                       .entries = lists[static_cast<size_t>(list)].data(),
                       .scale_log2 = 0.1f});
    });
  }

  GroupedShape shape;
  kernels::EntryFormat format;
  Bytes pool, query;
  std::vector<std::vector<const void*>> lists;
  std::vector<std::vector<kernels::AttentionRow>> rows;
  std::vector<float> partials;
  double pairs = 0;
};

}  // namespace

Contender attention(const AttentionShape& shape, CacheDType cache, kernels::Parallel& parallel) {
  auto problem = std::make_shared<AttentionProblem>(shape, cache);
  char what[96];
  std::snprintf(what, sizeof what, "attention %lld heads, %lld + %lld, %lld of %lld entries, %lld rows, %s",
                (long long)shape.heads, (long long)shape.latent, (long long)shape.rope,
                (long long)shape.entries, (long long)shape.context, (long long)AttentionProblem::kRows,
                cache_dtype_name(cache));
  return {what, problem->operations(), [problem, &parallel] { problem->run(parallel); }};
}

Contender grouped(const GroupedShape& shape, CacheDType cache, kernels::Parallel& parallel) {
  auto problem = std::make_shared<GroupedProblem>(shape, cache);
  char what[96];
  std::snprintf(what, sizeof what, "grouped %lld heads of %lld, %lld entries, %lld row%s, %s",
                (long long)shape.heads, (long long)shape.width, (long long)shape.context,
                (long long)shape.rows, shape.rows == 1 ? "" : "s", cache_dtype_name(cache));
  return {what, problem->operations(), [problem, &parallel] { problem->run(parallel); }};
}

}  // namespace weft::bench
