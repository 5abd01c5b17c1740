// FP8 entries against (a) bytes written by hand, for every published layout; (b) the nearest E4M3 value found
// by looking at all of them, bit for bit, on every instruction set; (c) attention over a bf16 cache that
// holds the same values, bit for bit.
#include "kernels/entry.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels/attention.h"
#include "kernels/bf16.h"
#include "kernels/fp8_rows.h"
#include "proto/vocab/random.h"
#include "tests/kernels/each_instruction_set.h"

namespace weft::kernels {
namespace {

using test::each_instruction_set;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// ---- one value ----

// The nearest of all E4M3 values, ties to the even code.
uint8_t nearest_e4m3(float value) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  if (!std::isfinite(value)) return sign | 0x7f;
  const double size = std::abs(static_cast<double>(value));
  int best = 0;
  for (int code = 0; code <= 0x7e; ++code) {
    const double distance = std::abs(e4m3_to_f32(static_cast<uint8_t>(code)) - size);
    const double least = std::abs(e4m3_to_f32(static_cast<uint8_t>(best)) - size);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(sign | best);
}

// Values around every E4M3 value and every middle between two, and what no E4M3 value is near.
std::vector<float> telling_values() {
  std::vector<float> values = {0,      -0.0f, kNan, -kNan, kInf,   -kInf,  1e30f,
                               -1e30f, 449,   464,  480,   1e-45f, -1e-39f};
  const auto around = [&](float value) {
    for (float near : {std::nextafter(value, -kInf), value, std::nextafter(value, kInf)}) {
      values.push_back(near);
      values.push_back(-near);
    }
  };
  for (int code = 1; code <= 0x7e; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    around(value);
    around((value + e4m3_to_f32(static_cast<uint8_t>(code - 1))) / 2);
  }
  SplitMix64 random(5);
  for (int i = 0; i < 2000; ++i) {
    values.push_back(
        std::ldexp(static_cast<float>(random.uniform() * 2 - 1), static_cast<int>(random.below(24)) - 14));
  }
  return values;
}

TEST(E4m3, EveryCodeIsItsOwnNearest) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_f32(static_cast<uint8_t>(code));
    EXPECT_EQ(f32_to_e4m3(value) | (std::isnan(value) ? 0x80 : 0), code | (std::isnan(value) ? 0x80 : 0));
  }
  EXPECT_EQ(e4m3_to_f32(0x01), 0x1p-9f);
  EXPECT_EQ(e4m3_to_f32(0x08), 0x1p-6f);
  EXPECT_EQ(e4m3_to_f32(0x38), 1.0f);
  EXPECT_EQ(e4m3_to_f32(0xfe), -448.0f);
}

TEST(E4m3, DecodedRowsAreValuesTimesScale) {
  constexpr uint16_t kUntouched = 0xabcd;
  each_instruction_set([&] {
    for (int exponent = -100; exponent <= 119; ++exponent) {
      const float scale = std::ldexp(1.0f, exponent);
      for (const int64_t count : {0, 1, 31, 32, 33, 63, 64, 65, 130, 256}) {
        std::vector<uint8_t> codes;
        for (int64_t i = 0; i < count; ++i) codes.push_back(static_cast<uint8_t>(i + exponent));
        std::vector<uint16_t> out(static_cast<size_t>(count) + 64, kUntouched);
        decode_e4m3(codes.data(), count, scale, out.data());
        for (size_t i = 0; i < out.size(); ++i) {
          const uint16_t want =
              i < codes.size()
                  ? static_cast<uint16_t>(std::bit_cast<uint32_t>(e4m3_to_f32(codes[i]) * scale) >> 16)
                  : kUntouched;
          ASSERT_EQ(out[i], want) << "2^" << exponent << ", " << i << " of " << count;
        }
      }
    }
  });
}

TEST(E4m3, RowsEqualTheNearestValueOnEveryInstructionSet) {
  const std::vector<float> values = telling_values();
  const auto count = std::ssize(values);
  each_instruction_set([&] {
    for (float scale : {1.0f, 0x1p-22f, 0x1p-3f, 0x1p40f, 0.37f}) {
      std::vector<float> scaled;
      for (float value : values) scaled.push_back(value * scale);
      std::vector<uint8_t> codes(values.size() + 1, 0xaa);
      encode_e4m3(scaled.data(), count, scale, codes.data());
      EXPECT_EQ(codes.back(), 0xaa);
      std::vector<uint16_t> back(values.size() + 1, 0xaaaa);
      decode_e4m3(codes.data(), count, std::exp2(std::round(std::log2(scale))), back.data());
      EXPECT_EQ(back.back(), 0xaaaa);
      for (size_t i = 0; i < values.size(); ++i) {
        const float quotient = scaled[i] / scale;
        ASSERT_EQ(codes[i], nearest_e4m3(quotient)) << values[i] << " at scale " << scale;
        const float exact = e4m3_to_f32(codes[i]) * std::exp2(std::round(std::log2(scale)));
        if (std::isnan(exact)) {
          ASSERT_TRUE(std::isnan(bf16_to_f32(back[i])));
        } else {
          ASSERT_EQ(bf16_to_f32(back[i]), exact) << "nothing is rounded";
        }
      }
    }
  });
}

TEST(E4m3, ScalesAreTheSmallestPowersOfTwoThatFit) {
  SplitMix64 random(6);
  for (int i = 0; i < 20'000; ++i) {
    const float largest =
        std::ldexp(1 + static_cast<float>(random.uniform()), static_cast<int>(random.below(40)) - 13);
    const float scale = fp8_scale(largest, true);
    int exponent = 0;
    ASSERT_EQ(std::frexp(scale, &exponent), 0.5f) << largest;
    ASSERT_LE(largest, 448 * scale);
    ASSERT_GT(largest, 448 * (scale / 2));
    ASSERT_EQ(fp8_scale(largest, false), largest / 448);
  }
  EXPECT_EQ(fp8_scale(448, true), 1.0f);
  EXPECT_EQ(fp8_scale(std::nextafter(448.0f, kInf), true), 2.0f);
  for (float tiny : {0.0f, 1e-30f, 1e-4f}) EXPECT_EQ(fp8_scale(tiny, true), 0x1p-22f);
  EXPECT_EQ(fp8_scale(std::numeric_limits<float>::max(), true), 0x1p120f);
}

// ---- bytes ----

constexpr EntryFormat kDsMla = {DType::kBF16, 576, {1, 512, true}};
constexpr EntryFormat kPlainFp8 = {DType::kBF16, 576, {1, 576, false}};
static_assert(kDsMla.bytes() == 656 && kPlainFp8.bytes() == 576);
static_assert(EntryFormat{DType::kBF16, 576, {}}.bytes() == 1152);

// Stores with room around it, which must stay as it was.
std::vector<uint8_t> stored(const EntryFormat& format, const std::vector<float>& values) {
  EXPECT_EQ(std::ssize(values), format.width);
  std::vector<uint8_t> bytes(static_cast<size_t>(format.bytes()) + 2, 0x5a);
  store_entry(format, values.data(), bytes.data() + 1);
  EXPECT_EQ(bytes.front(), 0x5a);
  EXPECT_EQ(bytes.back(), 0x5a);
  return {bytes.begin() + 1, bytes.end() - 1};
}

void expect_bytes(const std::vector<uint8_t>& got, size_t at, const std::vector<uint8_t>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(static_cast<int>(got[at + i]), static_cast<int>(expected[i])) << "byte " << at + i;
  }
}

TEST(Entry, TheBytesOfFp8DsMla) {
  std::vector<float> values(576, 0.0f);
  // Largest 448: scale 1.
  values[0] = 1, values[1] = -1.5f, values[2] = 448, values[3] = 0x1p-9f, values[4] = -0x1p-6f;
  values[5] = 17;       // between 16 and 18: the even code, 16
  values[127] = 0.35f;  // 0.34375 is nearer than 0.375
  // Largest 3.5 = 448 · 2⁻⁷: scale 2⁻⁷.
  values[128] = -3.5f, values[129] = 1, values[255] = 0x1p-16f;
  // Largest a little above 1.75 · 2⁸: scale 2.
  values[256] = 449, values[257] = 2, values[383] = -2;
  // The fourth group is zeros: scale 2⁻²². Rotary part as bf16.
  values[512] = 1, values[513] = -2, values[514] = 1.0078125f, values[575] = 0.1f;
  each_instruction_set([&] {
    const std::vector<uint8_t> bytes = stored(kDsMla, values);
    expect_bytes(bytes, 0, {0x38, 0xbc, 0x7e, 0x01, 0x88, 0x58, 0x00});
    expect_bytes(bytes, 127, {0x2b});
    expect_bytes(bytes, 128, {0xfe, 0x70, 0x00});
    expect_bytes(bytes, 255, {0x01});
    expect_bytes(bytes, 256, {0x76, 0x38, 0x00});  // 224.5 → 224
    expect_bytes(bytes, 383, {0xb8});
    expect_bytes(bytes, 384, std::vector<uint8_t>(128, 0));
    expect_bytes(bytes, 512, {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0x3c});  // 1, 2⁻⁷
    expect_bytes(bytes, 520, {0x00, 0x00, 0x00, 0x40, 0x00, 0x00, 0x80, 0x34});  // 2, 2⁻²²
    expect_bytes(bytes, 528, {0x80, 0x3f, 0x00, 0xc0, 0x81, 0x3f, 0x00, 0x00});
    expect_bytes(bytes, 654, {0xcd, 0x3d});
  });
}

TEST(Entry, TheBytesOfThe576ByteEntry) {
  std::vector<float> values(576, 0.0f);
  values[0] = 1, values[1] = -1.5f, values[2] = 1000, values[3] = -0x1p-10f, values[511] = 2;
  values[512] = 4, values[575] = -448;
  each_instruction_set([&] {
    const std::vector<uint8_t> bytes = stored(kPlainFp8, values);
    ASSERT_EQ(bytes.size(), 576u);
    expect_bytes(bytes, 0, {0x38, 0xbc, 0x7e, 0x80});  // saturated; a tie between 0 and the first step
    expect_bytes(bytes, 511, {0x40, 0x48});
    expect_bytes(bytes, 575, {0xfe});
  });
}

TEST(Entry, TheBytesOfKAndV) {
  const EntryFormat format = {DType::kBF16, 8, {2, 4, true}};
  each_instruction_set([&] {
    const std::vector<uint8_t> bytes = stored(format, {448, 1, 0, -2, 0.875f, 0, -0.0f, -0.4375f});
    EXPECT_EQ(bytes, (std::vector<uint8_t>{0x7e, 0x38, 0x00, 0xc0,     // K
                                           0x7e, 0x00, 0x80, 0xf6,     // V
                                           0x00, 0x00, 0x80, 0x3f,     // 1
                                           0x00, 0x00, 0x00, 0x3b}));  // 2⁻⁹
  });
  EXPECT_EQ((EntryFormat{DType::kBF16, 256, {2, 128, true}}.bytes()), 264);
}

TEST(Entry, TheLastGroupOfARunMayBeShort) {
  const EntryFormat format = {DType::kBF16, 160, {1, 144, true}};
  EXPECT_EQ(format.bytes(), 144 + 2 * 4 + 16 * 2);
  std::vector<float> values(160, 0.0f);
  values[127] = 448, values[128] = 0.875f, values[144] = 3;
  each_instruction_set([&] {
    const std::vector<uint8_t> bytes = stored(format, values);
    expect_bytes(bytes, 127, {0x7e, 0x7e, 0x00});
    expect_bytes(bytes, 144, {0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0x3b});
    expect_bytes(bytes, 152, {0x40, 0x40});
  });
}

TEST(Entry, WhatIsNotFiniteShowsAndSpoilsNoOther) {
  std::vector<float> values(576, 1.0f);
  values[3] = kNan, values[130] = -kInf, values[514] = kInf;
  each_instruction_set([&] {
    for (const EntryFormat& format : {kDsMla, kPlainFp8}) {
      std::vector<uint16_t> back(576);
      load_fp8_entry(format, stored(format, values).data(), back.data());
      for (size_t i = 0; i < back.size(); ++i) {
        if (std::isfinite(values[i])) {
          EXPECT_EQ(bf16_to_f32(back[i]), 1.0f) << i;
        } else {
          EXPECT_FALSE(std::isfinite(bf16_to_f32(back[i]))) << i;
        }
      }
    }
    // Denormals count as zero, and a row of nothing finite has a scale all the same.
    std::vector<float> tiny(576, 1e-40f), none(576, kNan);
    EXPECT_EQ(stored(kDsMla, tiny)[5], 0);
    expect_bytes(stored(kDsMla, none), 512, {0x00, 0x00, 0x80, 0x34});
  });
}

// ---- attention ----

// The value that an element of an entry has after it was stored, by the scalars alone.
std::vector<float> stored_values(const EntryFormat& format, const float* in) {
  std::vector<float> out(in, in + format.width);
  for (int64_t run = 0; run < format.fp8.runs; ++run) {
    const int64_t group = format.fp8.scaled ? 128 : format.fp8.run;
    for (int64_t begin = 0; begin < format.fp8.run; begin += group) {
      float largest = 0;
      const int64_t at = run * format.fp8.run + begin, end = at + std::min(group, format.fp8.run - begin);
      for (int64_t i = at; i < end; ++i) largest = std::max(largest, std::abs(in[i]));
      const float scale = format.fp8.scaled ? fp8_scale(largest, true) : 1;
      for (int64_t i = at; i < end; ++i)
        out[static_cast<size_t>(i)] = e4m3_to_f32(nearest_e4m3(in[i] / scale)) * scale;
    }
  }
  for (auto i = static_cast<size_t>(format.fp8.elements()); i < out.size(); ++i)
    out[i] = bf16_to_f32(f32_to_bf16(out[i]));
  return out;
}

TEST(Fp8Attention, HasTheBitsOfABf16CacheOfTheSameValues) {
  struct Case {
    Fp8Part fp8;
    EntryShape shape;
    int64_t heads, rows, entries;
  };
  const Case cases[] = {
      {{1, 512, true}, {576, 0, 512}, 64, 1, 200},  {{1, 576, false}, {576, 0, 512}, 16, 2, 130},
      {{1, 40, true}, {56, 0, 40}, 8, 5, 70},       {{1, 144, true}, {160, 0, 144}, 16, 4, 65},
      {{1, 33, false}, {33, 0, 25}, 3, 1, 64},      {{2, 64, true}, {64, 64, 64}, 3, 30, 190},
      {{2, 160, true}, {160, 160, 160}, 5, 13, 67}, {{2, 24, true}, {24, 24, 24}, 1, 1, 1},
  };
  uint64_t seed = 70;
  for (const Case& one : cases) {
    SplitMix64 random(++seed);
    SCOPED_TRACE("seed " + std::to_string(seed));
    const EntryFormat format = {DType::kBF16, one.shape.width(), one.fp8};
    const auto draw = [&](float size) { return static_cast<float>(random.uniform() * 2 - 1) * size; };
    const int64_t stride = format.bytes() + 3;
    std::vector<uint8_t> cache(static_cast<size_t>(stride * one.entries));
    std::vector<uint16_t> plain, query;
    std::vector<const void*> entries, plain_entries;
    for (int64_t u = 0; u < one.entries; ++u) {
      std::vector<float> values;
      const float size = std::ldexp(1.0f, static_cast<int>(random.below(6)) - 3);
      for (int64_t i = 0; i < format.width; ++i) values.push_back(draw(size));
      store_entry(format, values.data(), cache.data() + u * stride);
      for (float value : stored_values(format, values.data())) plain.push_back(f32_to_bf16(value));
    }
    for (int64_t u = 0; u < one.entries; ++u) {
      entries.push_back(cache.data() + u * stride);
      plain_entries.push_back(plain.data() + u * format.width);
    }
    for (int64_t i = 0; i < one.rows * one.heads * one.shape.key; ++i) query.push_back(f32_to_bf16(draw(1)));
    const int64_t words = partial_words(one.shape.value);
    each_instruction_set([&] {
      std::vector<float> a(static_cast<size_t>(one.rows * one.heads * words)), b(a.size(), 1.0f);
      const auto run = [&](const void* const* from, Fp8Part fp8, std::vector<float>& out) {
        std::vector<AttentionRow> rows;
        for (int64_t r = 0; r < one.rows; ++r) {
          const int64_t count = std::max<int64_t>(0, one.entries - 3 * (one.rows - 1 - r));
          rows.push_back({query.data() + r * one.heads * one.shape.key, count,
                          out.data() + r * one.heads * words, std::min(count, 5 * r)});
        }
        attend({.dtype = DType::kBF16,
                .shape = one.shape,
                .fp8 = fp8,
                .heads = one.heads,
                .query_stride = one.shape.key,
                .rows = rows,
                .entries = from,
                .scale_log2 = 0.3f});
      };
      run(entries.data(), one.fp8, a);
      run(plain_entries.data(), {}, b);
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0);
    });
  }
}

}  // namespace
}  // namespace weft::kernels
