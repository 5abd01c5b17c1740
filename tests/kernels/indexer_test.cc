// The indexer against (a) the promised order of additions in plain scalar code, bit for bit, on every
// instruction set of this machine; (b) scores in double, within a derived bound; (c) selection by a full
// sort, exactly, also under many ties.
#include "kernels/indexer.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/cpu/candidate_list.h"
#include "kernels/features.h"
#include "kernels/fp8.h"
#include "kernels/reference/indexer.h"
#include "proto/vocab/cache_format.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"
#include "tests/support/thread_parallel.h"

namespace weft::kernels {
namespace {

using test::each_instruction_set;

constexpr CacheDType kStoredForms[] = {CacheDType::kF32, CacheDType::kBF16, CacheDType::kFp8};

float stored(DType dtype, float value) {
  return dtype == DType::kF32 ? value : bf16_to_f32(f32_to_bf16(value));
}

// Rows of queries and a paged context. Slots without a key hold NaN.
struct Problem {
  DType dtype = DType::kF32;  // of queries
  bool fp8 = false;           // keys
  int64_t heads = 1, width = 2, block_tokens = 8, rows = 1;
  std::vector<std::byte> query;
  std::vector<float> query_values, weights;
  std::vector<int64_t> row_positions;
  std::vector<std::vector<std::byte>> pages;
  std::vector<IndexKeys> blocks;
  std::vector<int32_t> positions;  // of every key, in order
  std::vector<float> key_values;   // [keys][width]; FP8: without the scale
  std::vector<float> key_scales;   // [keys]; 1 unless FP8

  int64_t keys() const { return static_cast<int64_t>(positions.size()); }
  IndexSelect call() const {
    return {.dtype = dtype,
            .fp8_keys = fp8,
            .heads = heads,
            .width = width,
            .block_tokens = block_tokens,
            .rows = rows,
            .query = query.data(),
            .weights = weights.data(),
            .row_positions = row_positions.data(),
            .keys = blocks};
  }

  void set_query(std::vector<float> values) {
    query.resize(values.size() * dtype_bytes(dtype));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = stored(dtype, values[i]);
      const uint16_t half = f32_to_bf16(values[i]);
      dtype == DType::kF32 ? std::memcpy(&query[i * 4], &values[i], 4) : std::memcpy(&query[i * 2], &half, 2);
    }
    query_values = std::move(values);
  }

  void add_block(int64_t first_position, const std::vector<std::vector<float>>& keys_of_block) {
    auto& page = pages.emplace_back(static_cast<size_t>(block_tokens * index_key_bytes(width, dtype, fp8)),
                                    std::byte{0xff});
    const std::vector<float> nan(static_cast<size_t>(width), std::numeric_limits<float>::quiet_NaN());
    for (int64_t slot = 0; slot < block_tokens; ++slot) {
      const bool used = slot < static_cast<int64_t>(keys_of_block.size());
      const float* key = used ? keys_of_block[static_cast<size_t>(slot)].data() : nan.data();
      if (fp8 && used) store_fp8_index_key(key, width, slot % 2 == 0, block_tokens, slot, page.data());
      if (!fp8) store_index_key(key, width, dtype, block_tokens, slot, page.data());
      if (!used) continue;
      positions.push_back(static_cast<int32_t>(first_position + slot));
      float largest = 0;
      for (int64_t i = 0; i < width; ++i) largest = std::max(largest, std::abs(key[i]));
      key_scales.push_back(fp8 ? fp8_scale(largest, slot % 2 == 0) : 1);
      for (int64_t i = 0; i < width; ++i) {
        key_values.push_back(fp8 ? e4m3_to_f32(f32_to_e4m3(key[i] / key_scales.back()))
                                 : stored(dtype, key[i]));
      }
    }
    blocks.push_back({page.data(), first_position, static_cast<int64_t>(keys_of_block.size())});
  }
};

// Values in [−1, 1]; with `levels` > 0 multiples of 1 / levels, so that many scores are equal.
float draw(SplitMix64& random, int levels) {
  if (levels == 0) return static_cast<float>(random.uniform() * 2 - 1);
  return static_cast<float>(static_cast<int>(random.below(static_cast<uint64_t>(2 * levels + 1))) - levels) /
         static_cast<float>(levels);
}

struct Shape {
  int64_t heads, width, block_tokens, rows, blocks;
  int levels = 0;
  int64_t stride = 1;  // every stride-th block of the context is listed, as where the index is split
};

// The rows are the last ones of the context, which ends in mid block.
Problem make_problem(CacheFormat format, const Shape& shape, SplitMix64& random) {
  Problem p;
  p.dtype = format.index_query_dtype();
  p.fp8 = format.index_keys == CacheDType::kFp8;
  p.heads = shape.heads, p.width = shape.width, p.block_tokens = shape.block_tokens, p.rows = shape.rows;
  const auto values = [&](int64_t count) {
    std::vector<float> out(static_cast<size_t>(count));
    for (float& value : out) value = draw(random, shape.levels);
    return out;
  };
  p.set_query(values(shape.rows * shape.heads * shape.width));
  p.weights = values(shape.rows * shape.heads);
  int64_t end = 0;
  for (int64_t b = 0; b < shape.blocks; ++b) {
    const bool last = b == shape.blocks - 1;
    const auto valid = last
                           ? 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(shape.block_tokens)))
                           : shape.block_tokens;
    std::vector<std::vector<float>> keys;
    for (int64_t i = 0; i < valid; ++i) keys.push_back(values(shape.width));
    const int64_t first = b * shape.stride * shape.block_tokens;
    p.add_block(first, keys);
    end = first + valid;
  }
  for (int64_t r = 0; r < shape.rows; ++r)
    p.row_positions.push_back(std::max<int64_t>(0, end - shape.rows + r));
  return p;
}

float promised_score(const Problem& p, int64_t row, int64_t key) {
  float score = 0;
  for (int64_t h = 0; h < p.heads; ++h) {
    const float* q = p.query_values.data() + (row * p.heads + h) * p.width;
    const float* k = p.key_values.data() + key * p.width;
    float dot = 0;
    const int64_t per_word = p.dtype == DType::kF32 ? 1 : 2;
    for (int64_t i = 0; i < p.width; i += per_word) {
      for (int64_t j = per_word - 1; j >= 0; --j) dot = std::fmaf(q[i + j], k[i + j], dot);
    }
    score = std::fmaf(p.weights[static_cast<size_t>(row * p.heads + h)], std::max(0.0f, dot), score);
  }
  return score * p.key_scales[static_cast<size_t>(key)] + 0.0f;
}

std::vector<float> scores_of(const Problem& p, int64_t row) {
  std::vector<float> scores(static_cast<size_t>(p.keys()), -1e30f);
  index_scores(p.call(), row, row + 1, scores.data());
  return scores;
}

std::vector<std::vector<Candidate>> selected(const Problem& p, int64_t top_k, Parallel& parallel) {
  std::vector<Candidate> out(static_cast<size_t>(p.rows * top_k), Candidate{-1, -1});
  std::vector<int32_t> counts(static_cast<size_t>(p.rows), -1);
  IndexSelect call = p.call();
  call.top_k = top_k, call.out = out.data(), call.out_count = counts.data();
  index_select(call, parallel);
  std::vector<std::vector<Candidate>> lists;
  for (int64_t r = 0; r < p.rows; ++r) {
    const auto begin = out.begin() + r * top_k;
    lists.emplace_back(begin, begin + counts[static_cast<size_t>(r)]);
  }
  return lists;
}

// What the row may choose from.
std::vector<Candidate> seen_by(const Problem& p, int64_t row) {
  const std::vector<float> scores = scores_of(p, row);
  std::vector<Candidate> seen;
  for (size_t i = 0; i < scores.size(); ++i) {
    if (p.positions[i] <= p.row_positions[static_cast<size_t>(row)])
      seen.push_back({scores[i], p.positions[i]});
  }
  return seen;
}

TEST(IndexKeys, LieWhereTheHeaderSays) {
  for (int64_t block_tokens : {8, 16, 64, 256}) {
    const int64_t lanes = std::min<int64_t>(16, block_tokens);
    constexpr int64_t kWidth = 6;
    std::vector<float> page(static_cast<size_t>(block_tokens * kWidth));
    std::vector<uint16_t> half(page.size());
    for (int64_t slot = 0; slot < block_tokens; ++slot) {
      float key[kWidth], back[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) key[i] = static_cast<float>(slot) + static_cast<float>(i) / 8;
      store_index_key(key, kWidth, DType::kF32, block_tokens, slot, page.data());
      store_index_key(key, kWidth, DType::kBF16, block_tokens, slot, half.data());
      load_index_key(page.data(), kWidth, DType::kF32, block_tokens, slot, back);
      EXPECT_EQ(std::memcmp(key, back, sizeof key), 0);
      load_index_key(half.data(), kWidth, DType::kBF16, block_tokens, slot, back);
      for (int64_t i = 0; i < kWidth; ++i) EXPECT_EQ(back[i], bf16_to_f32(f32_to_bf16(key[i])));
    }
    for (int64_t slot = 0; slot < block_tokens; ++slot) {
      for (int64_t i = 0; i < kWidth; ++i) {
        const float value = static_cast<float>(slot) + static_cast<float>(i) / 8;
        const int64_t panel = slot / lanes, lane = slot % lanes;
        EXPECT_EQ(page[static_cast<size_t>((panel * kWidth + i) * lanes + lane)], value);
        EXPECT_EQ(half[static_cast<size_t>(((panel * kWidth / 2 + i / 2) * lanes + lane) * 2 + i % 2)],
                  f32_to_bf16(value));
      }
    }
  }
}

// The published page of 64 keys of 128 dimensions: all keys, then all scales.
TEST(IndexKeys, TheBytesOfFp8Keys) {
  each_instruction_set([] {
    std::vector<uint8_t> page(64 * 132, 0x5a);
    std::vector<float> key(128, 0.0f);
    key[0] = 448, key[1] = 1, key[2] = -1.5f, key[127] = 0x1p-9f;
    store_fp8_index_key(key.data(), 128, true, 64, 0, page.data());
    key[0] = -3.5f, key[127] = 0x1p-16f;  // largest 3.5: scale 2⁻⁷
    store_fp8_index_key(key.data(), 128, true, 64, 63, page.data());
    key[0] = 224;  // scale 0.5 in either form
    store_fp8_index_key(key.data(), 128, false, 64, 5, page.data());
    const auto expect = [&](size_t at, const std::vector<uint8_t>& bytes) {
      for (size_t i = 0; i < bytes.size(); ++i) EXPECT_EQ(page[at + i], bytes[i]) << "byte " << at + i;
    };
    expect(0, {0x7e, 0x38, 0xbc, 0x00});
    expect(127, {0x01, 0x5a});
    expect(5 * 128, {0x7e, 0x40, 0xc4, 0x00});
    expect(63 * 128, {0xfe, 0x70, 0xf4, 0x00});
    expect(63 * 128 + 127, {0x01});
    expect(64 * 128, {0x00, 0x00, 0x80, 0x3f, 0x5a});
    expect(64 * 128 + 5 * 4, {0x00, 0x00, 0x00, 0x3f, 0x5a});
    expect(64 * 128 + 63 * 4, {0x00, 0x00, 0x00, 0x3c});
  });
  EXPECT_EQ(index_key_bytes(128, DType::kBF16, true), 132);
}

TEST(IndexScores, EqualThePromisedOrderBitForBit) {
  const Shape shapes[] = {{1, 2, 8, 1, 3},     {2, 64, 64, 7, 5},   {3, 10, 16, 9, 4},
                          {5, 32, 32, 5, 2},   {12, 16, 8, 2, 40},  {13, 8, 64, 3, 6},
                          {32, 128, 64, 2, 3}, {64, 16, 256, 2, 2}, {6, 24, 8, 11, 33}};
  each_instruction_set([&] {
    uint64_t seed = 20;
    for (CacheDType stored : kStoredForms) {
      for (const Shape& shape : shapes) {
        SplitMix64 random(++seed);
        const Problem p = make_problem(stored, shape, random);
        for (int64_t row = 0; row < p.rows; ++row) {
          const std::vector<float> scores = scores_of(p, row);
          for (int64_t key = 0; key < p.keys(); ++key) {
            const float want = promised_score(p, row, key);
            ASSERT_EQ(std::bit_cast<uint32_t>(scores[static_cast<size_t>(key)]),
                      std::bit_cast<uint32_t>(want))
                << cache_dtype_name(stored) << " seed " << seed << " row " << row << " key " << key;
          }
        }
        std::vector<float> whole(static_cast<size_t>(p.rows * p.keys()));
        index_scores(p.call(), 0, p.rows, whole.data());
        for (int64_t row = 0; row < p.rows; ++row) {
          const auto begin = whole.begin() + row * p.keys();
          ASSERT_EQ(std::vector(begin, begin + p.keys()), scores_of(p, row));
        }
        // Selecting everything shows the same scores for tiles of many rows.
        const int64_t row = p.rows - 1;
        const std::vector<Candidate> list = selected(p, p.keys(), serial()).back();
        ASSERT_EQ(static_cast<int64_t>(list.size()), p.keys());
        for (int64_t key = 0; key < p.keys(); ++key) {
          const Candidate want{promised_score(p, row, key), p.positions[static_cast<size_t>(key)]};
          ASSERT_EQ(list[static_cast<size_t>(key)], want);
        }
      }
    }
  });
}

TEST(IndexScores, EqualTheDefinitionInDoubleWithinTheDerivedBound) {
  constexpr double kUnit = 0x1p-24;
  each_instruction_set([&] {
    for (CacheDType stored : kStoredForms) {
      SplitMix64 random(77);
      const Problem p = make_problem(stored, {16, 128, 64, 4, 4}, random);
      double worst = 0;
      for (int64_t row = 0; row < p.rows; ++row) {
        const auto first = p.query_values.begin() + row * p.heads * p.width;
        const std::vector<double> query(first, first + p.heads * p.width);
        const std::vector<double> weights(p.weights.begin() + row * p.heads,
                                          p.weights.begin() + (row + 1) * p.heads);
        const std::vector<float> scores = scores_of(p, row);
        for (int64_t key = 0; key < p.keys(); ++key) {
          const auto k = p.key_values.begin() + key * p.width;
          std::vector<double> values(k, k + p.width);
          for (double& value : values) value *= p.key_scales[static_cast<size_t>(key)];
          // A dot product errs by width units of Σ|q k|, the sum over heads by heads units of Σ|w| times
          // that.
          double magnitude = 0;
          for (int64_t h = 0; h < p.heads; ++h) {
            double products = 0;
            for (int64_t i = 0; i < p.width; ++i) {
              products +=
                  std::abs(query[static_cast<size_t>(h * p.width + i)] * values[static_cast<size_t>(i)]);
            }
            magnitude += std::abs(weights[static_cast<size_t>(h)]) * products;
          }
          const double bound = static_cast<double>(p.width + p.heads + 1) * kUnit * magnitude;
          const double error = std::abs(reference::index_score(query, weights, values) -
                                        static_cast<double>(scores[static_cast<size_t>(key)]));
          ASSERT_LT(bound, 0.01);
          worst = std::max(worst, error / bound);
        }
      }
      EXPECT_LE(worst, 1.0);
    }
  });
}

TEST(IndexScores, NegativeZeroIsNeverSeen) {
  each_instruction_set([&] {
    Problem p;
    p.width = 2;
    p.set_query({1e-20f, 0});
    p.weights = {-1e-20f};  // the product −1e-40 is flushed, to −0
    p.row_positions = {7};
    p.add_block(0, {{1, 0}, {0, 0}, {-1, 0}, {1, 0}, {0, 0}, {1, 0}});
    for (float score : scores_of(p, 0)) EXPECT_EQ(std::bit_cast<uint32_t>(score), 0u);
    const auto lists = selected(p, 3, serial());
    EXPECT_EQ(lists[0], (std::vector<Candidate>{{0, 0}, {0, 1}, {0, 2}}));
  });
}

TEST(IndexSelect, EqualsAFullSortUnderManyTies) {
  each_instruction_set([&] {
    const bool slow = std::string(instruction_set()) == "portable";
    for (uint64_t seed = 1; seed <= (slow ? 10u : 60u); ++seed) {
      SplitMix64 random(seed);
      Shape shape{};
      shape.heads = 1 + static_cast<int64_t>(random.below(4));
      shape.width = 2 * (1 + static_cast<int64_t>(random.below(4)));
      shape.block_tokens = random.below(2) == 0 ? 8 : 64;
      shape.rows = 1 + static_cast<int64_t>(random.below(40));
      shape.blocks = 1 + static_cast<int64_t>(random.below(shape.block_tokens == 8 ? 200 : 40));
      shape.levels = static_cast<int>(random.below(4));  // 0: none
      shape.stride = 1 + static_cast<int64_t>(random.below(3));
      const CacheDType stored = kStoredForms[random.below(3)];
      const Problem p = make_problem(stored, shape, random);
      std::vector<std::vector<Candidate>> seen;
      for (int64_t row = 0; row < p.rows; ++row) seen.push_back(seen_by(p, row));
      for (int64_t top_k : {int64_t{1}, int64_t{5}, int64_t{64}, int64_t{300}, p.keys(), p.keys() + 10}) {
        const auto lists = selected(p, top_k, serial());
        for (int64_t row = 0; row < p.rows; ++row) {
          ASSERT_EQ(lists[static_cast<size_t>(row)], reference::select(seen[static_cast<size_t>(row)], top_k))
              << "seed " << seed << " row " << row << " top " << top_k;
        }
      }
    }
  });
}

// A row's limit falls in every place of a block, and rows need not be neighbours (the two pieces of a zigzag
// split).
TEST(IndexSelect, RowsSeeKeysUpToTheirOwnPosition) {
  for (int64_t block_tokens : {8, 64}) {
    SplitMix64 random(4);
    Problem p = make_problem(DType::kF32, {2, 4, block_tokens, 70, 40, 2, 2}, random);
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t end = p.positions.back();
      p.row_positions[static_cast<size_t>(r)] = r < 35 ? r * 2 : end - 69 + r;
    }
    for (int64_t top_k : {3, 64}) {
      const auto lists = selected(p, top_k, serial());
      for (int64_t row = 0; row < p.rows; ++row) {
        ASSERT_EQ(lists[static_cast<size_t>(row)], reference::select(seen_by(p, row), top_k))
            << "row " << row;
        for (const Candidate& c : lists[static_cast<size_t>(row)]) {
          ASSERT_LE(c.position, p.row_positions[static_cast<size_t>(row)]);
          ASSERT_FALSE(std::isnan(c.score));
        }
      }
    }
  }
}

TEST(IndexSelect, DoesNotDependOnRowSetOrThreads) {
  each_instruction_set([&] {
    for (CacheDType stored : kStoredForms) {
      SplitMix64 random(6);
      // Few rows and many keys: with threads the keys are split too.
      for (const Shape& shape :
           {Shape{2, 8, 64, 100, 20}, Shape{3, 8, 64, 3, 160}, Shape{1, 4, 64, 1, 300, 1}}) {
        const Problem p = make_problem(stored, shape, random);
        for (int64_t top_k : {40, 700}) {
          const auto together = selected(p, top_k, serial());
          for (int threads : {2, 3, 5}) {
            test::ThreadParallel parallel(threads);
            ASSERT_EQ(selected(p, top_k, parallel), together) << threads << " threads";
          }
          for (int64_t begin = 0; begin < p.rows;) {
            const int64_t count =
                1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(p.rows - begin)));
            Problem part = p;
            part.rows = count;
            part.query.erase(
                part.query.begin(),
                part.query.begin() + begin * p.heads * p.width * static_cast<int64_t>(dtype_bytes(p.dtype)));
            part.weights.erase(part.weights.begin(), part.weights.begin() + begin * p.heads);
            part.row_positions.erase(part.row_positions.begin(), part.row_positions.begin() + begin);
            const auto lists = selected(part, top_k, serial());
            for (int64_t r = 0; r < count; ++r) {
              ASSERT_EQ(lists[static_cast<size_t>(r)], together[static_cast<size_t>(begin + r)]);
            }
            begin += count;
          }
        }
      }
    }
  });
}

TEST(IndexSelect, NoKeysAndNoRows) {
  SplitMix64 random(1);
  Problem p = make_problem(DType::kF32, {1, 2, 8, 2, 1}, random);
  p.blocks.clear();
  for (const auto& list : selected(p, 4, serial())) EXPECT_TRUE(list.empty());
  p.rows = 0;
  EXPECT_TRUE(selected(p, 4, serial()).empty());
}

// Streams that a real score distribution seldom shows: sorted either way, all equal, infinities, NaN.
TEST(CandidateList, KeepsTheBestOfAnyStream) {
  each_instruction_set([&] {
    const float infinity = std::numeric_limits<float>::infinity();
    const float nan = std::numeric_limits<float>::quiet_NaN();
    CandidateList list;
    for (uint64_t seed = 1; seed <= 400; ++seed) {
      SplitMix64 random(seed);
      const auto count = static_cast<int64_t>(random.below(5000));
      const auto top_k = static_cast<int64_t>(1 + random.below(random.below(2) == 0 ? 20 : 1500));
      std::vector<float> scores;
      std::vector<Candidate> all;
      const uint64_t kind = seed % 8;
      for (int64_t i = 0; i < count; ++i) {
        const auto x = static_cast<float>(i);
        const auto noise = static_cast<float>(random.uniform() * 2 - 1);
        const float special[] = {infinity, -infinity, nan, 0.0f, -0.0f, 1e-38f, -1e-38f, 1.0f};
        const float kinds[] = {x,
                               -x,
                               3.0f,
                               noise,
                               std::exp(noise * 80),
                               special[random.below(8)],
                               static_cast<float>(random.below(3)),
                               random.below(1000) == 0 ? 1e30f : -1e-30f * noise};
        const float score = kinds[kind];
        scores.push_back(score);
        all.push_back({std::isnan(score) ? -infinity : score + 0.0f, static_cast<int32_t>(1000 + i)});
      }
      list.reset(top_k);
      for (int64_t end = count; end > 0;) {
        const int64_t n = std::min(end, 1 + static_cast<int64_t>(random.below(300)));
        end -= n;
        if (random.below(4) > 0) {
          list.offer(scores.data() + end, n, 1000 + end);
        } else {
          list.offer(all.data() + end, n);
        }
      }
      std::vector<Candidate> out(static_cast<size_t>(top_k));
      out.resize(static_cast<size_t>(list.take(out.data())));
      ASSERT_EQ(out, reference::select(all, top_k)) << "seed " << seed << " kind " << kind;
    }
  });
}

// How many candidates enter the list of a stream of n scores, score(i) at position i.
template <typename Score>
int64_t written(int64_t n, int64_t top_k, const Score& score) {
  std::vector<float> scores(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) scores[static_cast<size_t>(i)] = score(i);
  CandidateList list;
  list.reset(top_k);
  for (int64_t end = n; end > 0; end -= 256) list.offer(scores.data() + end - 256, 256, end - 256);
  return list.written();
}

TEST(CandidateList, WritesFewOfScoresInRandomOrder) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    for (const int64_t top_k : {512, 2048}) {
      for (const int64_t n : {8192, 32768, 262144}) {
        SplitMix64 random(seed);
        const auto count = written(n, top_k, [&](int64_t) { return static_cast<float>(random.uniform()); });
        const auto k = static_cast<double>(top_k);
        EXPECT_LE(static_cast<double>(count), 1.5 * k * (1 + std::log(static_cast<double>(n) / k)))
            << "seed " << seed << ", top " << top_k << " of " << n;
      }
    }
  }
}

TEST(CandidateList, RecentKeysThatScoreHighKeepTheOthersOut) {
  constexpr int64_t kTop = 512, kKeys = 65536;
  // One list full, and what came with the chunk that filled it.
  EXPECT_LE(written(kKeys, kTop, [](int64_t i) { return static_cast<float>(i); }), kTop + kTop / 2 + 2 * 256);
  // The worst orders write everything.
  EXPECT_EQ(written(kKeys, kTop, [](int64_t i) { return static_cast<float>(-i); }), kKeys);
  EXPECT_EQ(written(kKeys, kTop, [](int64_t) { return 0.0f; }), kKeys);
}

TEST(CandidateList, KthLargestIsWhatSortingFinds) {
  each_instruction_set([] {
    const float infinity = std::numeric_limits<float>::infinity();
    for (uint64_t seed = 1; seed <= 300; ++seed) {
      SplitMix64 random(seed);
      const float special[] = {infinity, -infinity, 0.0f, -1.0f, 1.0f, 3e38f, -3e38f};
      std::vector<float> scores(1 + random.below(500));
      for (float& score : scores) {
        score = seed % 2 == 0 ? special[random.below(7)] : static_cast<float>(random.uniform() - 0.5);
      }
      const auto k = static_cast<int64_t>(1 + random.below(scores.size()));
      const Kth kth = kth_largest(scores.data(), std::ssize(scores), k);
      std::sort(scores.begin(), scores.end(), std::greater<>());
      const float want = scores[static_cast<size_t>(k - 1)];
      ASSERT_EQ(kth.score, want) << "seed " << seed;
      ASSERT_EQ(kth.above, std::find(scores.begin(), scores.end(), want) - scores.begin()) << "seed " << seed;
    }
  });
}

TEST(IndexSelect, CountsWhatItWrites) {
  SplitMix64 random(9);
  const Problem p = make_problem(DType::kF32, {16, 4, 64, 3, 400}, random);
  std::vector<Candidate> out(static_cast<size_t>(p.rows * 100));
  std::vector<int32_t> counts(static_cast<size_t>(p.rows));
  std::vector<int64_t> few(static_cast<size_t>(p.rows)), many(few);
  IndexSelect call = p.call();
  call.top_k = 100, call.out = out.data(), call.out_count = counts.data();
  call.written = few.data();
  index_select(call, serial());
  test::ThreadParallel parallel(3);
  call.written = many.data();
  index_select(call, parallel);
  for (size_t row = 0; row < few.size(); ++row) {
    EXPECT_GE(few[row], 100);
    EXPECT_LT(few[row], p.keys() / 4);
    EXPECT_GT(many[row], few[row]);  // ranges of keys begin with a list of their own
  }
}

}  // namespace
}  // namespace weft::kernels
