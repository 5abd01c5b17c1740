// MLA attention against (a) the promised order of additions, written once more as plain scalar code, bit for
// bit, on every instruction set of this machine; (b) softmax in double, within a bound derived from the
// sizes.
#include "kernels/mla_attention.h"

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
#include "kernels/reference/mla_attention.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

// A cache and a query of one dtype. Memory between entries and around them is NaN: reading it would show.
struct Problem {
  DType dtype = DType::kF32;
  int64_t heads = 1, latent = 16, rope = 0, count = 0;
  float scale_log2 = 1;
  std::vector<std::byte> query, cache;
  int64_t query_stride = 0;
  std::vector<const void*> entries;
  std::vector<float> query_values, entry_values;  // what the bytes mean, [heads][width], [count][width]

  int64_t width() const { return latent + rope; }
  int64_t words() const { return partial_words(latent); }
  MlaAttention call(float* partials) const {
    return {.dtype = dtype,
            .heads = heads,
            .latent = latent,
            .rope = rope,
            .query = query.data(),
            .query_stride = query_stride,
            .entries = entries.data(),
            .entry_count = count,
            .scale_log2 = scale_log2,
            .partials = partials};
  }
};

float stored(DType dtype, float value) {
  return dtype == DType::kF32 ? value : bf16_to_f32(f32_to_bf16(value));
}

void put(std::vector<std::byte>& bytes, DType dtype, int64_t index, float value) {
  const uint16_t half = f32_to_bf16(value);
  std::byte* at = bytes.data() + static_cast<size_t>(index) * dtype_bytes(dtype);
  dtype == DType::kF32 ? std::memcpy(at, &value, 4) : std::memcpy(at, &half, 2);
}

Problem make_problem(DType dtype, int64_t heads, int64_t latent, int64_t rope, int64_t count, float spread,
                     SplitMix64& random) {
  Problem p;
  p.dtype = dtype, p.heads = heads, p.latent = latent, p.rope = rope, p.count = count;
  const int64_t width = p.width();
  // t = scale · q·e has a standard deviation of about `spread`.
  p.scale_log2 = spread * 3.0f / std::sqrt(static_cast<float>(width));
  p.query_stride = width + static_cast<int64_t>(random.below(5));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const auto fill = [&](std::vector<std::byte>& bytes, int64_t rows, int64_t stride,
                        std::vector<float>& values) {
    bytes.resize(static_cast<size_t>(rows * stride + 1) * dtype_bytes(dtype));
    for (int64_t i = 0; i <= rows * stride; ++i) put(bytes, dtype, i, nan);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < width; ++i) {
        const float value = stored(dtype, static_cast<float>(random.uniform() * 2 - 1));
        put(bytes, dtype, r * stride + i, value);
        values.push_back(value);
      }
    }
  };
  fill(p.query, heads, p.query_stride, p.query_values);
  const int64_t entry_stride = width + 1 + static_cast<int64_t>(random.below(3));
  fill(p.cache, count, entry_stride, p.entry_values);
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

std::vector<float> promised_partial(const Problem& p, int64_t head) {
  std::vector<float> o(static_cast<size_t>(p.words()), 0.0f);
  float& l = o[static_cast<size_t>(p.latent)];
  int64_t m = kEmptyPartial;
  for (int64_t begin = 0; begin < p.count; begin += 64) {
    const int64_t end = std::min(begin + 64, p.count);
    std::vector<float> n, f;
    for (int64_t u = begin; u < end; ++u) {
      float t = promised_dot(p.dtype, p.query_values.data() + head * p.width(),
                             p.entry_values.data() + u * p.width(), p.width()) *
                p.scale_log2;
      t = std::clamp(t, -0x1p20f, 0x1p20f);
      n.push_back(std::nearbyint(t));
      f.push_back(t - n.back());
    }
    const int64_t before = m;
    for (float value : n) m = std::max(m, static_cast<int64_t>(value));
    const float factor = before == kEmptyPartial ? 1.0f : power(before - m);
    for (float& value : o) value *= factor;
    for (int64_t u = begin; u < end; ++u) {
      const auto i = static_cast<size_t>(u - begin);
      const float weight = exp2(f[i]) * power(static_cast<int64_t>(n[i]) - m);
      for (int64_t j = 0; j < p.latent; ++j) {
        float& out = o[static_cast<size_t>(j)];
        out = std::fmaf(weight, p.entry_values[static_cast<size_t>(u * p.width() + j)], out);
      }
      l += weight;
    }
  }
  const auto word = static_cast<int32_t>(m);
  std::memcpy(&o[static_cast<size_t>(p.latent + 1)], &word, 4);
  return o;
}

std::vector<float> attend(const Problem& p) {
  std::vector<float> partials(static_cast<size_t>(p.heads * p.words()),
                              std::numeric_limits<float>::quiet_NaN());
  mla_attend(p.call(partials.data()));
  return partials;
}

reference::AttentionInput in_double(const Problem& p) {
  return {.heads = p.heads,
          .latent = p.latent,
          .rope = p.rope,
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

int32_t m_of(const float* partial, int64_t latent) {
  int32_t m;
  std::memcpy(&m, partial + latent + 1, 4);
  return m;
}

using test::each_instruction_set;

TEST(MlaAttention, EqualsThePromisedOrderBitForBit) {
  struct Shape {
    int64_t heads, latent, rope;
  };
  const Shape shapes[] = {{1, 1, 0},    {2, 16, 16}, {3, 17, 5},    {4, 32, 8},  {5, 48, 1},   {6, 64, 0},
                          {7, 100, 28}, {8, 33, 31}, {16, 128, 32}, {65, 16, 4}, {3, 512, 64}, {1, 63, 2}};
  each_instruction_set([&] {
    const bool slow = std::string(instruction_set()) == "portable";
    uint64_t seed = 11;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (const Shape& shape : shapes) {
        for (int64_t count : {1, 2, 5, 16, 63, 64, 65, 129, 200}) {
          if (slow && (shape.latent > 100 || count > 65)) continue;
          for (float spread : {0.5f, 20.0f, 150.0f}) {
            SplitMix64 random(++seed);
            const Problem p =
                make_problem(dtype, shape.heads, shape.latent, shape.rope, count, spread, random);
            const std::vector<float> got = attend(p);
            for (int64_t h = 0; h < p.heads; ++h) {
              const std::vector<float> want = promised_partial(p, h);
              ASSERT_EQ(first_difference(got.data() + h * p.words(), want.data(), p.words()), -1)
                  << dtype_name(dtype) << " seed " << seed << " head " << h << " of " << p.heads << ", "
                  << p.latent << " + " << p.rope << ", " << count << " entries";
            }
          }
        }
      }
    }
  });
}

// The order test above fixes every head's bits; this one adds large head counts, which it cannot afford.
TEST(MlaAttention, AHeadDoesNotDependOnTheOthers) {
  each_instruction_set([&] {
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t heads : {2, 3, 4, 7, 9, 17, 64, 67, 130}) {
        SplitMix64 random(static_cast<uint64_t>(heads));
        const Problem p = make_problem(dtype, heads, 40, 8, 70, 3, random);
        const std::vector<float> together = attend(p);
        for (int64_t begin = 0; begin < heads;) {
          const int64_t part = 1 + static_cast<int64_t>(random.below(static_cast<uint64_t>(heads - begin)));
          std::vector<float> alone(static_cast<size_t>(part * p.words()));
          MlaAttention call = p.call(alone.data());
          call.heads = part;
          call.query = p.query.data() + static_cast<size_t>(begin * p.query_stride) * dtype_bytes(dtype);
          mla_attend(call);
          ASSERT_EQ(first_difference(together.data() + begin * p.words(), alone.data(), part * p.words()), -1)
              << heads << " heads, slice at " << begin << " of " << part;
          begin += part;
        }
      }
    }
  });
}

TEST(MlaAttention, EqualsSoftmaxInDoubleWithinTheDerivedBound) {
  constexpr double kUnit = 0x1p-24;
  each_instruction_set([&] {
    uint64_t seed = 500;
    for (DType dtype : {DType::kF32, DType::kBF16}) {
      for (int64_t count : {1, 64, 333}) {
        for (float spread : {0.5f, 4.0f, 40.0f}) {
          SplitMix64 random(++seed);
          const Problem p = make_problem(dtype, 5, 96, 32, count, spread, random);
          const std::vector<float> partials = attend(p);
          const reference::AttentionInput in = in_double(p);
          const std::vector<double> want = reference::mla_attention(in);
          const std::vector<double> want_sum = reference::log2_sum(in);
          for (int64_t h = 0; h < p.heads; ++h) {
            // Error of an exponent: a lane of width/16 multiply-adds (2 a pair), 4 levels of the tree, the
            // scale.
            double products = 0;
            for (int64_t u = 0; u < count; ++u) {
              double sum = 0;
              for (int64_t i = 0; i < p.width(); ++i) {
                sum += std::abs(in.query[static_cast<size_t>(h * p.width() + i)] *
                                in.entries[static_cast<size_t>(u * p.width() + i)]);
              }
              products = std::max(products, sum);
            }
            const double exponent =
                (static_cast<double>(p.width()) / 16 + 6) * kUnit * products * in.scale_log2;
            const double weight = std::log(2.0) * exponent + 5 * kUnit;  // exp2 is within 2 ulp = 4 units
            // Numerator and denominator both carry the weights' error and a chain of `count` additions. |c|
            // ≤ 1.
            const double bound = 2 * weight + (2 * static_cast<double>(count) + 4) * kUnit;
            ASSERT_LT(bound, 2e-3);  // else this test would say nothing
            std::vector<float> out(static_cast<size_t>(p.latent));
            const float* partial = partials.data() + h * p.words();
            finish_partial(partial, p.latent, out.data());
            double worst = 0;
            for (int64_t i = 0; i < p.latent; ++i) {
              worst = std::max(worst, std::abs(static_cast<double>(out[static_cast<size_t>(i)]) -
                                               want[static_cast<size_t>(h * p.latent + i)]));
            }
            EXPECT_LE(worst, bound) << "seed " << seed << " head " << h;
            const double sum = std::log2(static_cast<double>(partial[p.latent])) + m_of(partial, p.latent);
            EXPECT_NEAR(sum, want_sum[static_cast<size_t>(h)], bound / std::log(2.0)) << "seed " << seed;
          }
        }
      }
    }
  });
}

// Shard v of a context holds the entries u with (u / 3) mod 8 == v. Whoever reads residue classes mod c
// merges its own shards first; then the classes are merged. All must equal the merge of all eight.
TEST(MlaAttention, ResidueClassesMergeToTheBitsOfTheWholeTree) {
  each_instruction_set([&] {
    for (uint64_t seed = 1; seed <= 60; ++seed) {
      SplitMix64 random(seed);
      const DType dtype = seed % 2 == 0 ? DType::kF32 : DType::kBF16;
      const int64_t count = static_cast<int64_t>(random.below(200));  // few: some shards stay empty
      const Problem whole = make_problem(dtype, 3, 20, 4, count, 25, random);
      const int64_t words = whole.heads * whole.words();
      std::vector<float> shards(static_cast<size_t>(8 * words));
      for (int64_t v = 0; v < 8; ++v) {
        std::vector<const void*> list;
        for (int64_t u = 0; u < count; ++u) {
          if (u / 3 % 8 == v) list.push_back(whole.entries[static_cast<size_t>(u)]);
        }
        MlaAttention call = whole.call(shards.data() + v * words);
        call.entries = list.data();
        call.entry_count = static_cast<int64_t>(list.size());
        mla_attend(call);
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
            merge_partials(own.data(), 8 / classes, whole.words(), whole.latent);
            std::copy_n(own.begin(), whole.words(), of_class.begin() + r * whole.words());
          }
          merge_partials(of_class.data(), classes, whole.words(), whole.latent);
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
      const std::vector<double> want = reference::mla_attention(in_double(whole));
      std::vector<float> out(static_cast<size_t>(whole.latent));
      for (int64_t h = 0; h < whole.heads; ++h) {
        finish_partial(tree.data() + h * whole.words(), whole.latent, out.data());
        for (int64_t i = 0; i < whole.latent; ++i) {
          ASSERT_NEAR(out[static_cast<size_t>(i)], want[static_cast<size_t>(h * whole.latent + i)], 2e-4);
        }
      }
    }
  });
}

// The operands of a merge are not interchangeable by contract (the left is the lower shard), but the tree is:
// another association changes bits. If this stopped holding, the test above could not see a wrong tree.
TEST(MlaAttention, AnotherTreeGivesOtherBits) {
  set_flush_to_zero();
  int differing = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SplitMix64 random(seed);
    const Problem p = make_problem(DType::kF32, 1, 32, 0, 64, 2, random);
    std::vector<float> tree, chain;
    for (int64_t v = 0; v < 8; ++v) {
      std::vector<float> partial(static_cast<size_t>(p.words()));
      MlaAttention call = p.call(partial.data());
      call.entries += v * 8;
      call.entry_count = 8;
      mla_attend(call);
      tree.insert(tree.end(), partial.begin(), partial.end());
    }
    chain = tree;
    merge_partials(tree.data(), 8, p.words(), p.latent);
    for (int64_t v = 1; v < 8; ++v) merge_partial(chain.data(), chain.data() + v * p.words(), p.latent);
    differing += first_difference(tree.data(), chain.data(), p.words()) >= 0 ? 1 : 0;
  }
  EXPECT_GT(differing, 10);
}

TEST(MlaAttention, CountsThatAreNoPowerOfTwoMergeAscending) {
  set_flush_to_zero();
  SplitMix64 random(3);
  const Problem p = make_problem(DType::kF32, 1, 24, 8, 30, 5, random);
  for (int64_t count : {1, 3, 5, 6, 7}) {
    std::vector<float> partials(static_cast<size_t>(count * p.words()));
    for (int64_t i = 0; i < count; ++i) {
      MlaAttention call = p.call(partials.data() + i * p.words());
      call.entries += i * 4;
      call.entry_count = 4;
      mla_attend(call);
    }
    std::vector<float> chain = partials;
    for (int64_t i = 1; i < count; ++i) merge_partial(chain.data(), chain.data() + i * p.words(), p.latent);
    merge_partials(partials.data(), count, p.words(), p.latent);
    EXPECT_EQ(first_difference(partials.data(), chain.data(), p.words()), -1) << count;
  }
}

TEST(MlaAttention, EmptyListsAndEmptyPartials) {
  each_instruction_set([&] {
    SplitMix64 random(9);
    const Problem none = make_problem(DType::kF32, 3, 20, 4, 0, 1, random);
    const std::vector<float> empty = attend(none);
    for (int64_t h = 0; h < 3; ++h) {
      const float* partial = empty.data() + h * none.words();
      EXPECT_EQ(m_of(partial, none.latent), kEmptyPartial);
      for (int64_t i = 0; i <= none.latent; ++i) EXPECT_EQ(std::bit_cast<uint32_t>(partial[i]), 0u);
    }
    std::vector<float> out(20, 7.0f);
    finish_partial(empty.data(), none.latent, out.data());
    EXPECT_EQ(out, std::vector<float>(20, 0.0f));

    const Problem some = make_problem(DType::kF32, 1, 20, 4, 10, 1, random);
    const std::vector<float> full = attend(some);
    std::vector<float> a = full, b(empty.begin(), empty.begin() + none.words());
    merge_partial(a.data(), b.data(), some.latent);
    EXPECT_EQ(first_difference(a.data(), full.data(), some.words()), -1);
    merge_partial(b.data(), full.data(), some.latent);
    EXPECT_EQ(first_difference(b.data(), full.data(), some.words()), -1);
    std::vector<float> nothing(empty.begin(), empty.begin() + 2 * none.words());
    merge_partials(nothing.data(), 2, none.words(), none.latent);
    EXPECT_EQ(m_of(nothing.data(), none.latent), kEmptyPartial);
  });
}

TEST(MlaAttention, HugeExponentsAreClampedAndNaNIsShown) {
  each_instruction_set([&] {
    SplitMix64 random(5);
    Problem p = make_problem(DType::kF32, 2, 16, 0, 80, 1, random);
    p.scale_log2 = 3e38f;  // exponents up to infinity
    const std::vector<float> huge = attend(p);
    for (int64_t h = 0; h < p.heads; ++h) {
      const float* partial = huge.data() + h * p.words();
      EXPECT_EQ(m_of(partial, p.latent), 1 << 20);
      for (int64_t i = 0; i <= p.latent; ++i) EXPECT_TRUE(std::isfinite(partial[i]));
      EXPECT_GE(partial[p.latent], 1.0f);  // every entry with a positive product weighs 1
    }
    p.scale_log2 = 1;
    put(p.query, p.dtype, 0, std::numeric_limits<float>::quiet_NaN());  // head 0 only
    const std::vector<float> poisoned = attend(p);
    EXPECT_TRUE(std::isnan(poisoned[0]));
    EXPECT_TRUE(std::isnan(poisoned[static_cast<size_t>(p.latent)]));
    for (int64_t i = 0; i <= p.latent; ++i)
      EXPECT_TRUE(std::isfinite(poisoned[static_cast<size_t>(p.words() + i)]));
  });
}

}  // namespace
}  // namespace weft::kernels
