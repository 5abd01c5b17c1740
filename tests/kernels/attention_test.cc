// Attention against (a) the promised order of additions, written once more as plain scalar code, bit for
// bit, on every instruction set of this machine; (b) softmax in double, within a bound derived from the
// sizes.
#include "kernels/attention.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/elementwise.h"
#include "kernels/features.h"
#include "kernels/reference/attention.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

// A cache and a query of one dtype. Memory between entries and around them, and what is neither key nor value
// of one, is NaN: reading it would show.
struct Problem {
  DType dtype = DType::kF32;
  int64_t heads = 1;
  EntryShape shape;
  int64_t count = 0;
  float scale_log2 = 1;
  std::vector<std::byte> query, cache;
  int64_t query_stride = 0;
  std::vector<const void*> entries;
  std::vector<float> query_values, entry_values;  // what the bytes mean, [heads][key], [count][width]

  int64_t width() const { return shape.width(); }
  int64_t value() const { return shape.value; }
  int64_t words() const { return partial_words(shape.value); }
  const void* query_of(int64_t head) const {
    return query.data() + static_cast<size_t>(head * query_stride) * dtype_bytes(dtype);
  }
  Attention call(int64_t some_heads, std::span<const AttentionRow> rows) const {
    return {.dtype = dtype,
            .shape = shape,
            .heads = some_heads,
            .query_stride = query_stride,
            .rows = rows,
            .entries = entries.data(),
            .scale_log2 = scale_log2};
  }
};

// Heads [first, first + some) of the problem over entries [begin, end), as one row.
void attend_part(const Problem& p, int64_t first, int64_t some, int64_t begin, int64_t end, float* partials) {
  const AttentionRow row{p.query_of(first), end - begin, partials};
  Attention call = p.call(some, {&row, 1});
  call.entries += begin;
  attend(call);
}

std::vector<float> attend_all(const Problem& p) {
  std::vector<float> partials(static_cast<size_t>(p.heads * p.words()),
                              std::numeric_limits<float>::quiet_NaN());
  attend_part(p, 0, p.heads, 0, p.count, partials.data());
  return partials;
}

// Absorbed MLA; grouped queries with K ‖ V.
constexpr EntryShape mla(int64_t latent, int64_t rope) { return {latent + rope, 0, latent}; }
constexpr EntryShape grouped(int64_t width) { return {width, width, width}; }

float stored(DType dtype, float value) {
  return dtype == DType::kF32 ? value : bf16_to_f32(f32_to_bf16(value));
}

void put(std::vector<std::byte>& bytes, DType dtype, int64_t index, float value) {
  const uint16_t half = f32_to_bf16(value);
  std::byte* at = bytes.data() + static_cast<size_t>(index) * dtype_bytes(dtype);
  dtype == DType::kF32 ? std::memcpy(at, &value, 4) : std::memcpy(at, &half, 2);
}

Problem make_problem(DType dtype, int64_t heads, EntryShape shape, int64_t count, float spread,
                     SplitMix64& random) {
  Problem p;
  p.dtype = dtype, p.heads = heads, p.shape = shape, p.count = count;
  // t = scale · q·key has a standard deviation of about `spread`.
  p.scale_log2 = spread * 3.0f / std::sqrt(static_cast<float>(shape.key));
  p.query_stride = shape.key + static_cast<int64_t>(random.below(5));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto fill = [&](std::vector<std::byte>& bytes, int64_t rows, int64_t width, int64_t stride,
                        std::vector<float>& values, const auto& used) {
    bytes.resize(static_cast<size_t>(rows * stride + 1) * dtype_bytes(dtype));
    for (int64_t i = 0; i <= rows * stride; ++i) put(bytes, dtype, i, nan);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        const float value = stored(dtype, static_cast<float>(random.uniform() * 2 - 1));
        values.push_back(value);
        if (used(i)) put(bytes, dtype, r * stride + i, value);
      }
    }
  };
  fill(p.query, heads, shape.key, p.query_stride, p.query_values, [](int64_t) { return true; });
  const int64_t entry_stride = p.width() + 1 + static_cast<int64_t>(random.below(3));
  fill(p.cache, count, p.width(), entry_stride, p.entry_values, [&](int64_t i) {
    return i < shape.key || (i >= shape.value_offset && i < shape.value_offset + shape.value);
  });
  for (int64_t u = 0; u < count; ++u) {
    p.entries.push_back(p.cache.data() + static_cast<size_t>(u * entry_stride) * dtype_bytes(dtype));
  }
  return p;
}

// ---- the promised order, in scalars ----

float promised_dot(DType dtype, const float* q, const float* e, int64_t width) {
  const int64_t per_word = dtype == DType::kF32 ? 1 : 2;
  const int64_t step = 16 * per_word;
  const int64_t padded = (width + step - 1) / step * step;
  const auto at = [width](const float* x, int64_t i) { return i < width ? x[i] : 0.0f; };
  float lanes[16] = {};
  for (int64_t word = 0; word < padded / per_word; ++word) {
    float& lane = lanes[word % 16];
    for (int64_t i = per_word - 1; i >= 0; --i) {  // the odd element of a pair first
      const int64_t element = word * per_word + i;
      lane = std::fmaf(at(q, element), at(e, element), lane);
    }
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

float power(int64_t n) {
  return n < -126 ? 0.0f : std::bit_cast<float>(static_cast<uint32_t>(n + 127) << 23);
}

std::vector<float> promised_partial(const Problem& p, int64_t head, int64_t count, int64_t skipped = 0) {
  std::vector<float> o(static_cast<size_t>(p.words()), 0.0f);
  float& l = o[static_cast<size_t>(p.value())];
  int64_t m = kEmptyPartial;
  for (int64_t border = 0, begin = skipped; begin < count; begin = border) {
    border = begin / 64 * 64 + 64;
    const int64_t end = std::min(border, count);
    std::vector<float> n, f;
    for (int64_t u = begin; u < end; ++u) {
      float t = promised_dot(p.dtype, p.query_values.data() + head * p.shape.key,
                             p.entry_values.data() + u * p.width(), p.shape.key) *
                p.scale_log2;
      t = std::clamp(t, -0x1p20f, 0x1p20f);
      n.push_back(std::nearbyint(t));
      f.push_back(t - n.back());
    }
    const int64_t before = m;
    for (float value : n) m = std::max(m, static_cast<int64_t>(value));
    const float factor = before == kEmptyPartial ? 1.0f : power(before - m);
    for (float& value : o) value *= factor;
    // float32: one entry at a time. bf16: rounded weights, two entries at a time, the second one first; a
    // missing second one is zeros.
    const int64_t step = p.dtype == DType::kF32 ? 1 : 2;
    for (int64_t first = begin; first < end; first += step) {
      for (int64_t u = first + step - 1; u >= first; --u) {
        const auto i = static_cast<size_t>(u - begin);
        const float weight =
            u < end ? stored(p.dtype, exp2(f[i]) * power(static_cast<int64_t>(n[i]) - m)) : 0.0f;
        for (int64_t j = 0; j < p.value(); ++j) {
          const auto at = static_cast<size_t>(u * p.width() + p.shape.value_offset + j);
          float& out = o[static_cast<size_t>(j)];
          out = std::fmaf(weight, u < end ? p.entry_values[at] : 0.0f, out);
        }
        l = std::fmaf(weight, 1.0f, l);
      }
    }
  }
  const auto word = static_cast<int32_t>(m);
  std::memcpy(&o[static_cast<size_t>(p.value() + 1)], &word, 4);
  return o;
}

reference::AttentionInput in_double(const Problem& p) {
  return {.heads = p.heads,
          .shape = p.shape,
          .query = {p.query_values.begin(), p.query_values.end()},
          .entries = {p.entry_values.begin(), p.entry_values.end()},
          .scale_log2 = static_cast<double>(p.scale_log2)};
}

// Index of the first word that differs, −1 if none does.
int64_t first_difference(const float* a, const float* b, int64_t words) {
  for (int64_t i = 0; i < words; ++i) {
    if (std::memcmp(a + i, b + i, 4) != 0) return i;
  }
  return -1;
}

int32_t m_of(const float* partial, int64_t value_width) {
  int32_t m;
  std::memcpy(&m, partial + value_width + 1, 4);
  return m;
}

using test::each_instruction_set;

TEST(Attention, EqualsThePromisedOrderBitForBit) {
  struct Shape {
    int64_t heads;
    EntryShape entry;
  };
  const Shape shapes[] = {{1, mla(1, 0)},     {2, mla(16, 16)}, {3, mla(17, 5)},   {4, mla(32, 8)},
                          {5, mla(48, 1)},    {6, mla(64, 0)},  {7, mla(100, 28)}, {8, mla(33, 31)},
                          {16, mla(128, 32)}, {65, mla(16, 4)}, {3, mla(512, 64)}, {1, mla(63, 2)},
                          {3, grouped(64)},   {5, grouped(24)}, {1, grouped(128)}, {36, grouped(64)},
                          {33, grouped(32)},  {34, mla(24, 8)}, {2, {24, 30, 17}}, {3, {40, 3, 70}}};
  each_instruction_set([&] {
    const bool slow = std::string(instruction_set()) == "portable";
    uint64_t seed = 11;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Shape& shape : shapes) {
        for (int64_t count : {1, 2, 5, 16, 63, 64, 65, 129, 200}) {
          if (slow && (shape.entry.value > 100 || count > 65)) continue;
          for (float spread : {0.5f, 20.0f, 150.0f}) {
            SplitMix64 random(++seed);
            const Problem p = make_problem(dtype, shape.heads, shape.entry, count, spread, random);
            const std::vector<float> got = attend_all(p);
            for (int64_t h = 0; h < p.heads; ++h) {
              const std::vector<float> want = promised_partial(p, h, count);
              ASSERT_EQ(first_difference(got.data() + h * p.words(), want.data(), p.words()), -1)
                  << dtype_name(dtype) << " seed " << seed << " head " << h << " of " << p.heads << ", key "
                  << p.shape.key << ", value " << p.shape.value << " at " << p.shape.value_offset << ", "
                  << count << " entries";
            }
          }
        }
      }
    }
  });
}

// The order test above fixes every head's bits; this one adds large head counts, which it cannot afford.
TEST(Attention, AHeadDoesNotDependOnTheOthers) {
  each_instruction_set([&] {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (EntryShape shape : {mla(40, 8), grouped(32)}) {
        for (int64_t heads : {2, 3, 4, 7, 9, 17, 64, 67, 130}) {
          SplitMix64 random(static_cast<uint64_t>(heads));
          const Problem p = make_problem(dtype, heads, shape, 70, 3, random);
          const std::vector<float> together = attend_all(p);
          for (int64_t begin = 0; begin < heads;) {
            const int64_t part = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(heads - begin)));
            std::vector<float> alone(static_cast<size_t>(part * p.words()));
            attend_part(p, begin, part, 0, p.count, alone.data());
            ASSERT_EQ(first_difference(together.data() + begin * p.words(), alone.data(), part * p.words()),
                      -1)
                << heads << " heads, slice at " << begin << " of " << part;
            begin += part;
          }
        }
      }
    }
  });
}

// Rows of one call: any entry counts that ascend, empty ones among them, and values beyond a row's list that
// would spoil it.
TEST(Attention, RowsOfOneCallEqualRowsAlone) {
  each_instruction_set([&] {
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      SplitMix64 random(seed);
      const auto below = [&](uint64_t bound) { return static_cast<int64_t>(random.below(bound)); };
      const DType dtype = seed % 2 == 0 ? DType::kF32 : DType::kBF16;
      const EntryShape shapes[] = {grouped(32), grouped(64), grouped(20), mla(16, 8), {32, 40, 21}};
      const EntryShape shape = shapes[seed % std::size(shapes)];
      const int64_t heads = 1 + below(9), rows = 1 + below(40);
      Problem p = make_problem(dtype, rows * heads, shape, 2 + below(250), 5, random);
      std::vector<int64_t> counts;
      for (int64_t row = 0; row < rows; ++row) {
        counts.push_back(random.below(3) == 0 && row > 0 ? counts.back()
                                                         : below(static_cast<uint64_t>(p.count)));
      }
      std::sort(counts.begin(), counts.end());
      // The last row alone sees the end of the list, where nothing is finite.
      counts.back() = p.count;
      const int64_t seen = rows > 1 ? counts[static_cast<size_t>(rows - 2)] : p.count;
      std::vector<std::byte> spoilt(p.cache.size());
      for (size_t i = 0; i < spoilt.size() / dtype_bytes(dtype); ++i) {
        put(spoilt, dtype, static_cast<int64_t>(i), std::numeric_limits<float>::quiet_NaN());
      }
      for (int64_t u = seen; u < p.count; ++u) p.entries[static_cast<size_t>(u)] = spoilt.data();

      std::vector<float> together(static_cast<size_t>(rows * heads * p.words())), alone = together;
      std::vector<AttentionRow> list;
      for (int64_t row = 0; row < rows; ++row) {
        list.push_back({p.query_of(row * heads), counts[static_cast<size_t>(row)],
                        together.data() + row * heads * p.words()});
        attend_part(p, row * heads, heads, 0, counts[static_cast<size_t>(row)],
                    alone.data() + row * heads * p.words());
      }
      attend(p.call(heads, list));
      const int64_t finite_rows = rows > 1 ? rows - 1 : rows;  // NaNs differ by payload
      ASSERT_EQ(first_difference(together.data(), alone.data(), finite_rows * heads * p.words()), -1)
          << "seed " << seed << ", " << rows << " rows of " << heads << " heads";
      for (int64_t i = 0; i < finite_rows * heads; ++i) {
        if (counts[static_cast<size_t>(i / heads)] == 0) continue;
        ASSERT_TRUE(std::isfinite(together[static_cast<size_t>(i * p.words())])) << "seed " << seed;
      }
    }
  });
}

// Sliding windows: every row skips some of its list, and what it skips would spoil it.
TEST(Attention, SkippedEntriesAreNotThere) {
  each_instruction_set([&] {
    for (uint64_t seed = 1; seed <= 40; ++seed) {
      SplitMix64 random(seed);
      const auto below = [&](int64_t bound) {
        return static_cast<int64_t>(random.below(static_cast<uint64_t>(bound)));
      };
      const DType dtype = seed % 2 == 0 ? DType::kF32 : DType::kBF16;
      const EntryShape shapes[] = {grouped(32), grouped(64), grouped(20)};
      const EntryShape shape = shapes[seed % std::size(shapes)];
      const int64_t heads = 1 + below(5), rows = 1 + below(30), window = 1 + below(150);
      const Problem p = make_problem(dtype, rows * heads, shape, 300, 5, random);
      std::vector<int64_t> counts;
      for (int64_t row = 0; row < rows; ++row) counts.push_back(below(p.count + 1));
      std::sort(counts.begin(), counts.end());
      std::vector<float> together(static_cast<size_t>(rows * heads * p.words())), alone = together;
      std::vector<AttentionRow> list;
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t count = counts[static_cast<size_t>(row)];
        // Some rows see nothing: their window ends where the list begins.
        const int64_t skipped = std::max(seed % 5 == 0 ? count : std::max<int64_t>(0, count - window),
                                         row > 0 ? list.back().skipped : 0);
        const int64_t first = row * heads;
        list.push_back({p.query_of(first), count, together.data() + first * p.words(), skipped});
        AttentionRow one = list.back();
        one.partials = alone.data() + first * p.words();
        Attention call = p.call(heads, {&one, 1});
        std::vector<const void*> entries(p.entries);
        const std::vector<std::byte> spoilt(p.cache.size(), std::byte{0xFF});  // NaN in either dtype
        for (int64_t u = 0; u < skipped; ++u) entries[static_cast<size_t>(u)] = spoilt.data();
        call.entries = entries.data();
        attend(call);
      }
      attend(p.call(heads, list));
      ASSERT_EQ(first_difference(together.data(), alone.data(), rows * heads * p.words()), -1)
          << "seed " << seed;
      for (int64_t query = 0; query < rows * heads; ++query) {
        const AttentionRow& row = list[static_cast<size_t>(query / heads)];
        const std::vector<float> want = promised_partial(p, query, row.entry_count, row.skipped);
        ASSERT_EQ(first_difference(together.data() + query * p.words(), want.data(), p.words()), -1)
            << "seed " << seed << ", entries " << row.skipped << " to " << row.entry_count;
      }
    }
  });
}

TEST(Attention, EqualsSoftmaxInDoubleWithinTheDerivedBound) {
  constexpr double kUnit = 0x1p-24;
  each_instruction_set([&] {
    uint64_t seed = 500;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t count : {1, 64, 333}) {
        for (float spread : {0.5f, 4.0f, 40.0f}) {
          const EntryShape shape = spread == 4.0f ? grouped(96) : mla(96, 32);
          SplitMix64 random(++seed);
          const Problem p = make_problem(dtype, 5, shape, count, spread, random);
          const std::vector<float> partials = attend_all(p);
          const reference::AttentionInput in = in_double(p);
          const std::vector<double> want = reference::attention(in);
          const std::vector<double> want_sum = reference::log2_sum(in);
          for (int64_t h = 0; h < p.heads; ++h) {
            // Error of an exponent: a lane of width/16 multiply-adds (2 a pair), 4 levels of the tree, the
            // scale.
            double products = 0;
            for (int64_t u = 0; u < count; ++u) {
              double sum = 0;
              for (int64_t i = 0; i < p.shape.key; ++i) {
                sum += std::abs(in.query[static_cast<size_t>(h * p.shape.key + i)] *
                                in.entries[static_cast<size_t>(u * p.width() + i)]);
              }
              products = std::max(products, sum);
            }
            const double exponent =
                (static_cast<double>(p.shape.key) / 16 + 6) * kUnit * products * in.scale_log2;
            // exp2 is within 2 ulp = 4 units; bf16 rounds weights to 8 bits.
            const double weight =
                std::log(2.0) * exponent + 5 * kUnit + (dtype == DType::kBF16 ? 0x1p-9 : 0.0);
            // Numerator and denominator both carry the weights' error and a chain of `count` additions. |c|
            // ≤ 1.
            const double bound = 2 * weight + (2 * static_cast<double>(count) + 4) * kUnit;
            ASSERT_LT(bound, dtype == DType::kF32 ? 2e-3 : 6e-3);  // else this test would say nothing
            std::vector<float> out(static_cast<size_t>(p.value()));
            const float* partial = partials.data() + h * p.words();
            finish_partial(partial, p.value(), out.data());
            double worst = 0;
            for (int64_t i = 0; i < p.value(); ++i) {
              worst = std::max(worst, std::abs(static_cast<double>(out[static_cast<size_t>(i)]) -
                                               want[static_cast<size_t>(h * p.value() + i)]));
            }
            EXPECT_LE(worst, bound) << "seed " << seed << " head " << h;
            const double sum = std::log2(static_cast<double>(partial[p.value()])) + m_of(partial, p.value());
            EXPECT_NEAR(sum, want_sum[static_cast<size_t>(h)], bound / std::log(2.0)) << "seed " << seed;
          }
        }
      }
    }
  });
}

// Shard v of a context holds the entries u with (u / 3) mod 8 == v. Whoever reads residue classes mod c
// merges its own shards first; then the classes are merged. All must equal the merge of all eight.
TEST(Attention, ResidueClassesMergeToTheBitsOfTheWholeTree) {
  each_instruction_set([&] {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SplitMix64 random(seed);
      const DType dtype = seed % 2 == 0 ? DType::kF32 : DType::kBF16;
      const int64_t count = static_cast<int64_t>(random.below(200));  // few: some shards stay empty
      const Problem whole = make_problem(dtype, 3, mla(20, 4), count, 25, random);
      const int64_t words = whole.heads * whole.words();
      std::vector<float> shards(static_cast<size_t>(8 * words));
      for (int64_t v = 0; v < 8; ++v) {
        std::vector<const void*> list;
        for (int64_t u = 0; u < count; ++u) {
          if (u / 3 % 8 == v) list.push_back(whole.entries[static_cast<size_t>(u)]);
        }
        const AttentionRow row{whole.query.data(), std::ssize(list), shards.data() + v * words};
        Attention call = whole.call(whole.heads, {&row, 1});
        call.entries = list.data();
        attend(call);
      }
      const auto merged = [&](int64_t classes) {
        std::vector<float> result(static_cast<size_t>(words));
        for (int64_t h = 0; h < whole.heads; ++h) {
          std::vector<float> of_class(static_cast<size_t>(classes * whole.words()));
          for (int64_t r = 0; r < classes; ++r) {
            std::vector<float> own;
            for (int64_t v = r; v < 8; v += classes) {
              const float* from = shards.data() + v * words + h * whole.words();
              own.insert(own.end(), from, from + whole.words());
            }
            merge_partials(own.data(), 8 / classes, whole.words(), whole.value());
            std::copy_n(own.begin(), whole.words(), of_class.begin() + r * whole.words());
          }
          merge_partials(of_class.data(), classes, whole.words(), whole.value());
          std::copy_n(of_class.begin(), whole.words(), result.begin() + h * whole.words());
        }
        return result;
      };
      const std::vector<float> tree = merged(1);
      for (int64_t classes : {2, 4, 8}) {
        ASSERT_EQ(first_difference(tree.data(), merged(classes).data(), words), -1)
            << "seed " << seed << ", " << classes << " classes";
      }
      if (count == 0) continue;
      // The tree is also right, not only consistent.
      const std::vector<double> want = reference::attention(in_double(whole));
      std::vector<float> out(static_cast<size_t>(whole.value()));
      for (int64_t h = 0; h < whole.heads; ++h) {
        finish_partial(tree.data() + h * whole.words(), whole.value(), out.data());
        for (int64_t i = 0; i < whole.value(); ++i) {
          ASSERT_NEAR(out[static_cast<size_t>(i)], want[static_cast<size_t>(h * whole.value() + i)],
                      dtype == DType::kF32 ? 2e-4 : 4e-3);
        }
      }
    }
  });
}

// The operands of a merge are not interchangeable by contract (the left is the lower shard), but the tree is:
// another association changes bits. If this stopped holding, the test above could not see a wrong tree.
TEST(Attention, AnotherTreeGivesOtherBits) {
  set_flush_to_zero();
  int differing = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SplitMix64 random(seed);
    const Problem p = make_problem(DType::kF32, 1, mla(32, 0), 64, 2, random);
    std::vector<float> tree, chain;
    for (int64_t v = 0; v < 8; ++v) {
      std::vector<float> partial(static_cast<size_t>(p.words()));
      attend_part(p, 0, 1, v * 8, v * 8 + 8, partial.data());
      tree.insert(tree.end(), partial.begin(), partial.end());
    }
    chain = tree;
    merge_partials(tree.data(), 8, p.words(), p.value());
    for (int64_t v = 1; v < 8; ++v) merge_partial(chain.data(), chain.data() + v * p.words(), p.value());
    differing += first_difference(tree.data(), chain.data(), p.words()) >= 0 ? 1 : 0;
  }
  EXPECT_GT(differing, 10);
}

TEST(Attention, CountsThatAreNoPowerOfTwoMergeAscending) {
  set_flush_to_zero();
  SplitMix64 random(3);
  const Problem p = make_problem(DType::kF32, 1, mla(24, 8), 30, 5, random);
  for (int64_t count : {1, 3, 5, 6, 7}) {
    std::vector<float> partials(static_cast<size_t>(count * p.words()));
    for (int64_t i = 0; i < count; ++i) {
      attend_part(p, 0, 1, i * 4, i * 4 + 4, partials.data() + i * p.words());
    }
    std::vector<float> chain = partials;
    for (int64_t i = 1; i < count; ++i) merge_partial(chain.data(), chain.data() + i * p.words(), p.value());
    merge_partials(partials.data(), count, p.words(), p.value());
    EXPECT_EQ(first_difference(partials.data(), chain.data(), p.words()), -1) << count;
  }
}

// What merges where the partials lie gives the bits of copying, merging and dividing, for any number of them,
// any width, and with empty ones anywhere.
TEST(Attention, FinishingPartialsWhereTheyLie) {
  each_instruction_set([&] {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SplitMix64 random(seed);
      const auto count = static_cast<int64_t>(random.below(9)) + 1;
      const auto width = static_cast<int64_t>(random.below(seed % 2 == 0 ? 40 : 600)) + 1;
      const int64_t words = partial_words(width);
      const bool empties = random.below(2) == 0;
      std::vector<float> partials(static_cast<size_t>(count * words));
      std::vector<const float*> sources;
      for (int64_t i = 0; i < count; ++i) {
        float* partial = partials.data() + i * words;
        sources.push_back(partial);
        int32_t m = kEmptyPartial;
        if (!empties || random.below(3) != 0) {
          // Near enough to each other, or so far apart that the smaller one vanishes, or is flushed in part.
          m = static_cast<int32_t>(random.below(8)) - (random.below(4) == 0 ? 130 : 4);
          for (int64_t j = 0; j <= width; ++j)
            partial[j] = std::ldexp(static_cast<float>(random.below(20001)) - 10000,
                                    static_cast<int>(random.below(12)) - 24);
          partial[width] = std::abs(partial[width]) + 0.5f;
          if (random.below(20) == 0) partial[0] = -0.0f;
        }
        std::memcpy(partial + width + 1, &m, sizeof m);
      }
      const std::vector<float> before = partials;
      std::vector<float> out(static_cast<size_t>(width + 1), 7.0f), expected(static_cast<size_t>(width));
      finish_partials(sources, width, out.data());
      EXPECT_EQ(std::memcmp(partials.data(), before.data(), partials.size() * 4), 0) << "seed " << seed;
      merge_partials(partials.data(), count, words, width);
      finish_partial(partials.data(), width, expected.data());
      EXPECT_EQ(first_difference(out.data(), expected.data(), width), -1)
          << "seed " << seed << " count " << count << " width " << width;
      EXPECT_EQ(out.back(), 7.0f);
    }
  });
}

TEST(Attention, EmptyListsAndEmptyPartials) {
  each_instruction_set([&] {
    SplitMix64 random(9);
    const Problem none = make_problem(DType::kF32, 3, mla(20, 4), 0, 1, random);
    const std::vector<float> empty = attend_all(none);
    for (int64_t h = 0; h < 3; ++h) {
      const float* partial = empty.data() + h * none.words();
      EXPECT_EQ(m_of(partial, none.value()), kEmptyPartial);
      for (int64_t i = 0; i <= none.value(); ++i) EXPECT_EQ(std::bit_cast<uint32_t>(partial[i]), 0u);
    }
    std::vector<float> out(20, 7.0f);
    finish_partial(empty.data(), none.value(), out.data());
    EXPECT_EQ(out, std::vector<float>(20, 0.0f));

    const Problem some = make_problem(DType::kF32, 1, mla(20, 4), 10, 1, random);
    const std::vector<float> full = attend_all(some);
    std::vector<float> a = full, b(empty.begin(), empty.begin() + none.words());
    merge_partial(a.data(), b.data(), some.value());
    EXPECT_EQ(first_difference(a.data(), full.data(), some.words()), -1);
    merge_partial(b.data(), full.data(), some.value());
    EXPECT_EQ(first_difference(b.data(), full.data(), some.words()), -1);
    std::vector<float> nothing(empty.begin(), empty.begin() + 2 * none.words());
    merge_partials(nothing.data(), 2, none.words(), none.value());
    EXPECT_EQ(m_of(nothing.data(), none.value()), kEmptyPartial);
  });
}

TEST(Attention, HugeExponentsAreClampedAndNaNIsShown) {
  each_instruction_set([&] {
    SplitMix64 random(5);
    Problem p = make_problem(DType::kF32, 2, mla(16, 0), 80, 1, random);
    p.scale_log2 = 3e38f;  // exponents up to infinity
    const std::vector<float> huge = attend_all(p);
    for (int64_t h = 0; h < p.heads; ++h) {
      const float* partial = huge.data() + h * p.words();
      EXPECT_EQ(m_of(partial, p.value()), 1 << 20);
      for (int64_t i = 0; i <= p.value(); ++i) EXPECT_TRUE(std::isfinite(partial[i]));
      EXPECT_GE(partial[p.value()], 1.0f);  // every entry with a positive product weighs 1
    }
    p.scale_log2 = 1;
    put(p.query, p.dtype, 0, std::numeric_limits<float>::quiet_NaN());  // head 0 only
    const std::vector<float> poisoned = attend_all(p);
    EXPECT_TRUE(std::isnan(poisoned[0]));
    EXPECT_TRUE(std::isnan(poisoned[static_cast<size_t>(p.value())]));
    for (int64_t i = 0; i <= p.value(); ++i)
      EXPECT_TRUE(std::isfinite(poisoned[static_cast<size_t>(p.words() + i)]));
  });
}

}  // namespace
}  // namespace weft::kernels
