// Goal: the test of equal bits notices each of the mistakes it exists for.
// Method: this program is linked with some functions wrapped (ld --wrap; see CMakeLists.txt); production code
// is untouched. A planted deviation changes what the wrapper does: the harness that finds no difference
// without one must find some with it. Wrappers run in the threads of the ranks, one thread per rank.
#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "kernels/attention.h"
#include "kernels/elementwise.h"
#include "kernels/gemm.h"
#include "kernels/split_top_k.h"
#include "tests/support/bits.h"
#include "worker/model/tree_sum.h"

namespace weft::test {
namespace {

enum class Plant {
  kNone,
  kOperandsSwapped,   // merges of ranks: the right subtree first
  kMergeInRankOrder,  // merges of ranks: a chain instead of the tree
  kTileAcrossShards,  // softmax over the blocks a rank reads, whatever their shard, with a float maximum
  kBf16Partials,      // what ranks send each other is rounded to bf16
  kOwnRowOtherwiseRounded,  // a PCP row reads its own entry in another rounding than the stored one
  kGemvOrder,               // one row: two accumulators
  kTiesToHigher,            // equal scores: the later position wins
  kSharedPerRank,           // the shared expert is added once per rank, outside the leaves
};
std::atomic<Plant> planted{Plant::kNone};
bool is(Plant plant) { return planted.load(std::memory_order_relaxed) == plant; }

float to_bf16(float x) {
  uint16_t bits;
  kernels::convert(&x, 1, DType::kBF16, &bits);
  float out;
  kernels::convert_to_f32(&bits, DType::kBF16, 1, &out);
  return out;
}

}  // namespace
}  // namespace weft::test

using weft::test::is;
using weft::test::Plant;
namespace kernels = weft::kernels;
namespace kv = weft::kv;

// NOLINTBEGIN: names are the linker's
#define GEMM _ZN4weft7kernels4gemmESt4spanIKNS0_4GemmELm18446744073709551615EERNS0_8ParallelE
#define FINISH_PARTIALS _ZN4weft7kernels15finish_partialsESt4spanIKPKfLm18446744073709551615EElPf
#define FIND_SPLIT_TOP_K \
  _ZN4weft7kernels16find_split_top_kESt4spanIKNS0_5OfferELm18446744073709551615EElRNS0_9SplitTopKE
#define ADD _ZN4weft7kernels3addEPfPKfl
#define CONVERT _ZN4weft7kernels7convertEPKflNS_5DTypeEPv
#define ATTEND _ZN4weft7kernels6attendERKNS0_9AttentionE
#define CANONICAL_SHARD _ZN4weft2kv15canonical_shardEl
#define SUM_SEGMENTS \
  _ZN4weft6worker12sum_segmentsENS_2kv5RangeERKSt5arrayIbLm8EEllRNS_7kernels8ParallelERKSt8functionIFvllSt4spanIKPfLm18446744073709551615EEEERKSA_IFSC_mlEE
#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define REAL(name) JOIN(__real_, name)
#define WRAP(name) JOIN(__wrap_, name)

extern "C" {

void REAL(GEMM)(std::span<const kernels::Gemm> products, kernels::Parallel& parallel);
void WRAP(GEMM)(std::span<const kernels::Gemm> products, kernels::Parallel& parallel) {
  if (!is(Plant::kGemvOrder)) return REAL(GEMM)(products, parallel);
  for (const kernels::Gemm& p : products) {
    const int64_t k_end = p.k_end < 0 ? p.weights.k : p.k_end;
    const int64_t half = (k_end - p.k_begin) / 4 * 2;  // even, for bf16 pairs
    if (p.rows != 1 || half == 0) {
      REAL(GEMM)({&p, 1}, parallel);
      continue;
    }
    const int64_t outputs = (p.output_end < 0 ? p.weights.group_outputs : p.output_end) - p.output_begin;
    const int64_t count = outputs * (p.group_end - p.group_begin);
    std::vector<float> second(static_cast<size_t>(count));
    kernels::Gemm a = p, b = p;
    a.k_end = b.k_begin = p.k_begin + half;
    b.k_end = k_end;
    b.x =
        static_cast<const std::byte*>(p.x) + half * static_cast<int64_t>(weft::dtype_bytes(p.weights.dtype));
    b.y = second.data();
    b.y_stride = count;
    REAL(GEMM)({&a, 1}, parallel);
    REAL(GEMM)({&b, 1}, parallel);
    for (int64_t i = 0; i < count; ++i) p.y[i] += second[static_cast<size_t>(i)];
  }
}

// Of what ranks sent each other.
void REAL(FINISH_PARTIALS)(std::span<const float* const> partials, int64_t width, float* out);
void WRAP(FINISH_PARTIALS)(std::span<const float* const> partials, int64_t width, float* out) {
  const auto count = std::ssize(partials);
  const int64_t words = kernels::partial_words(width);
  std::vector<float> copies(static_cast<size_t>(count * words));
  const auto copy = [&](int64_t i) { return copies.data() + i * words; };
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(copy(i), partials[static_cast<size_t>(i)], static_cast<size_t>(words) * sizeof(float));
  if (is(Plant::kBf16Partials)) {
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t j = 0; j < width; ++j) copy(i)[j] = weft::test::to_bf16(copy(i)[j]);
    }
    kernels::merge_partials(copies.data(), count, words, width);
  } else if (is(Plant::kMergeInRankOrder)) {
    for (int64_t i = 1; i < count; ++i) kernels::merge_partial(copy(0), copy(i), width);
  } else if (is(Plant::kOperandsSwapped)) {
    for (int64_t half = count / 2; half >= 1; half /= 2) {
      for (int64_t i = 0; i < half; ++i) {
        kernels::merge_partial(copy(i + half), copy(i), width);
        std::memcpy(copy(i), copy(i + half), static_cast<size_t>(words) * sizeof(float));
      }
    }
  } else {
    return REAL(FINISH_PARTIALS)(partials, width, out);
  }
  kernels::finish_partial(copies.data(), width, out);
}

void REAL(FIND_SPLIT_TOP_K)(std::span<const kernels::Offer> offers, int64_t top_k, kernels::SplitTopK& out);
void WRAP(FIND_SPLIT_TOP_K)(std::span<const kernels::Offer> offers, int64_t top_k, kernels::SplitTopK& out) {
  REAL(FIND_SPLIT_TOP_K)(offers, top_k, out);
  if (!is(Plant::kTiesToHigher) || !out.by_position) return;
  const size_t wanted = out.ties.size();
  out.ties.clear();
  for (size_t i = 0; i < offers.size(); ++i) {
    for (int32_t j = 0; j < offers[i].head->count; ++j) {
      if (offers[i].scores[j] != out.last_score) continue;
      out.ties.push_back({offers[i].positions[j], static_cast<int32_t>(i)});
    }
  }
  std::sort(out.ties.begin(), out.ties.end(),
            [](const auto& a, const auto& b) { return a.position > b.position; });
  out.ties.resize(wanted);
}

int REAL(CANONICAL_SHARD)(int64_t block);
int WRAP(CANONICAL_SHARD)(int64_t block) {
  return is(Plant::kTileAcrossShards) ? 0 : REAL(CANONICAL_SHARD)(block);
}

}  // extern "C"

namespace {

// Slot → what was rounded into it, for the rank that wrote it.
thread_local std::map<const void*, std::vector<float>> unrounded;
// Sums that kSharedPerRank keeps out of the leaves.
thread_local bool in_leaf = false;
thread_local int64_t leaf_row = 0, leaf_width = 0;
thread_local std::vector<float> shared_sum;

// One head's partial over a tile of entries in the ordinary way: exponentials against the float maximum.
void float_maximum_tiles(const kernels::Attention& p, const kernels::AttentionRow& row, int64_t head) {
  constexpr int64_t kTile = 16;  // two blocks of 8
  const int64_t value_width = p.shape.value, words = kernels::partial_words(value_width);
  float* out = row.partials + head * words;
  std::fill(out, out + words, 0.0f);
  const int32_t empty = kernels::kEmptyPartial;
  std::memcpy(out + value_width + 1, &empty, sizeof empty);
  const auto* query = static_cast<const float*>(row.query) + head * p.query_stride;
  float maximum = -INFINITY, sum = 0;
  std::vector<float> o(static_cast<size_t>(value_width), 0.0f);
  for (int64_t first = 0; first < row.entry_count; first += kTile) {
    const int64_t last = std::min(row.entry_count, first + kTile);
    std::vector<float> t;
    float next = maximum;
    for (int64_t i = first; i < last; ++i) {
      const auto* entry = static_cast<const float*>(p.entries[i]);
      float dot = 0;
      for (int64_t j = 0; j < p.shape.key; ++j) dot += query[j] * entry[j];
      t.push_back(dot * p.scale_log2);
      next = std::max(next, t.back());
    }
    const float rescale = maximum == -INFINITY ? 0.0f : std::exp2(maximum - next);
    sum *= rescale;
    for (float& value : o) value *= rescale;
    for (int64_t i = first; i < last; ++i) {
      const auto* value = static_cast<const float*>(p.entries[i]) + p.shape.value_offset;
      const float weight = std::exp2(t[static_cast<size_t>(i - first)] - next);
      sum += weight;
      for (int64_t j = 0; j < value_width; ++j) o[static_cast<size_t>(j)] += weight * value[j];
    }
    maximum = next;
  }
  if (row.entry_count == 0) return;
  const auto m = static_cast<int32_t>(std::ceil(maximum));
  const float factor = std::exp2(maximum - static_cast<float>(m));
  for (int64_t j = 0; j < value_width; ++j) out[j] = o[static_cast<size_t>(j)] * factor;
  out[value_width] = sum * factor;
  std::memcpy(out + value_width + 1, &m, sizeof m);
}

}  // namespace

extern "C" {

void REAL(CONVERT)(const float* in, int64_t count, weft::DType dtype, void* out);
void WRAP(CONVERT)(const float* in, int64_t count, weft::DType dtype, void* out) {
  REAL(CONVERT)(in, count, dtype, out);
  if (is(Plant::kOwnRowOtherwiseRounded) && dtype == weft::DType::kBF16)
    unrounded[out].assign(in, in + count);
}

void REAL(ATTEND)(const kernels::Attention& p);
void WRAP(ATTEND)(const kernels::Attention& p) {
  for (const kernels::AttentionRow& row : p.rows) {
    if (is(Plant::kTileAcrossShards)) {
      for (int64_t head = 0; head < p.heads; ++head) float_maximum_tiles(p, row, head);
      continue;
    }
    kernels::Attention one = p;
    one.rows = {&row, 1};
    std::vector<const void*> entries(p.entries, p.entries + row.entry_count);
    one.entries = entries.data();
    std::vector<uint16_t> truncated;
    if (is(Plant::kOwnRowOtherwiseRounded) && p.dtype == weft::DType::kBF16 && !entries.empty()) {
      const auto found = unrounded.find(entries.back());
      if (found != unrounded.end() && std::ssize(found->second) == p.shape.width()) {
        for (const float value : found->second) {
          uint32_t bits;
          std::memcpy(&bits, &value, sizeof bits);
          truncated.push_back(static_cast<uint16_t>(bits >> 16));
        }
        entries.back() = truncated.data();
      }
    }
    REAL(ATTEND)(one);
  }
}

void REAL(ADD)(float* a, const float* b, int64_t count);
void WRAP(ADD)(float* a, const float* b, int64_t count) {
  if (!is(Plant::kSharedPerRank) || !in_leaf) return REAL(ADD)(a, b, count);
  REAL(ADD)(shared_sum.data() + leaf_row * leaf_width, b, count);
}

using Compute = std::function<void(int64_t, int64_t, std::span<float* const>)>;
using Place = std::function<float*(size_t, int64_t)>;
void REAL(SUM_SEGMENTS)(kv::Range segments, const weft::worker::SegmentPresence& presence, int64_t rows,
                        int64_t width, kernels::Parallel& parallel, const Compute& compute,
                        const Place& place);
void WRAP(SUM_SEGMENTS)(kv::Range segments, const weft::worker::SegmentPresence& presence, int64_t rows,
                        int64_t width, kernels::Parallel& parallel, const Compute& compute,
                        const Place& place) {
  if (!is(Plant::kSharedPerRank)) {
    return REAL(SUM_SEGMENTS)(segments, presence, rows, width, parallel, compute, place);
  }
  shared_sum.assign(static_cast<size_t>(rows * width), 0.0f);
  leaf_width = width;
  const Compute outside = [&](int64_t row_begin, int64_t row_count, std::span<float* const> sums) {
    in_leaf = true;
    leaf_row = row_begin;
    compute(row_begin, row_count, sums);
    in_leaf = false;
  };
  REAL(SUM_SEGMENTS)(segments, presence, rows, width, parallel, outside, place);
  for (int64_t row = 0; row < rows; ++row) REAL(ADD)(place(0, row), shared_sum.data() + row * width, width);
}

}  // extern "C"
// NOLINTEND

namespace weft::test {
namespace {

// A copy of a checkpoint whose index keys are all alike: every score of a row is a tie. Removed at the end.
const std::string& checkpoint_of_ties() {
  namespace fs = std::filesystem;
  static const struct Copy {
    fs::path path = fs::path(::testing::TempDir()) / ("weft_ties_" + std::to_string(::getpid()));
    std::string name = path.string();
    ~Copy() { fs::remove_all(path); }
  } copy;
  const fs::path& out = copy.path;
  if (fs::exists(out)) return copy.name;
  fs::copy(std::string(WEFT_GOLDEN_FOLDER) + "/glm_moe_dsa", out);
  for (const auto& file : fs::directory_iterator(out)) {
    if (!file.path().filename().string().starts_with("model") || file.path().extension() != ".safetensors")
      continue;
    std::fstream stream(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    uint64_t header_bytes = 0;
    stream.read(reinterpret_cast<char*>(&header_bytes), sizeof header_bytes);
    std::string header(header_bytes, ' ');
    stream.read(header.data(), static_cast<std::streamsize>(header_bytes));
    const nlohmann::json tensors = nlohmann::json::parse(header);
    for (const auto& [name, tensor] : tensors.items()) {
      if (name.find("indexer.k_norm.") == std::string::npos) continue;
      const auto begin = tensor["data_offsets"][0].get<uint64_t>(),
                 end = tensor["data_offsets"][1].get<uint64_t>();
      // The weight vanishes; the bias only where positions rotate it.
      const uint64_t bytes = name.ends_with(".weight") ? end - begin : (end - begin) / 2;
      stream.seekp(static_cast<std::streamoff>(8 + header_bytes + begin));
      const std::string zeros(bytes, '\0');
      stream.write(zeros.data(), static_cast<std::streamsize>(bytes));
    }
  }
  return copy.name;
}

class Planted : public ::testing::Test {
 protected:
  // Rows that differ over a handful of ways to run, with and without the deviation.
  int64_t differences(Plant plant, DType dtype,
                      const std::string& folder = std::string(WEFT_GOLDEN_FOLDER) + "/glm_moe_dsa") {
    planted = Plant::kNone;
    BitsModel model;
    model.folder = folder;
    model.weight_dtype = dtype;
    model.cache = dtype;
    planted = plant;  // the reference run has it too, as a wrong engine would
    BitsHarness harness(model);
    int64_t bad = 0;
    const BitsCase cases[] = {
        {8, kv::Split::kZigzag, {kv::DecodeKind::kDcp, 4}, kv::IndexKind::kSplit, 64, false},
        {4, kv::Split::kShared, {kv::DecodeKind::kDcp, 4}, kv::IndexKind::kCopied, 200, false},
        {4, kv::Split::kInterleave, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kSplit, 0, false},
        {2, kv::Split::kZigzag, {kv::DecodeKind::kDp, 1}, kv::IndexKind::kCopied, 0, false},
        {1, kv::Split::kShared, {kv::DecodeKind::kTp, 1}, kv::IndexKind::kCopied, 1, false},
    };
    for (const BitsCase& one : cases) bad += harness.mismatches_alone(one);
    planted = Plant::kNone;
    return bad;
  }
};

TEST_F(Planted, NothingPlantedNothingFound) {
  EXPECT_EQ(differences(Plant::kNone, DType::kF32), 0);
  EXPECT_EQ(differences(Plant::kNone, DType::kBF16), 0);
  EXPECT_EQ(differences(Plant::kNone, DType::kF32, checkpoint_of_ties()), 0);
}

// Merging is commutative to the bit (every rescale is exact), so this one is no deviation at all: the tree is
// what counts, as the next test shows.
TEST_F(Planted, SwappedOperandsAloneChangeNothing) {
  EXPECT_EQ(differences(Plant::kOperandsSwapped, DType::kF32), 0);
}
TEST_F(Planted, MergeInRankOrder) { EXPECT_GT(differences(Plant::kMergeInRankOrder, DType::kF32), 0); }
TEST_F(Planted, TileAcrossShardsWithFloatMaximum) {
  EXPECT_GT(differences(Plant::kTileAcrossShards, DType::kF32), 0);
}
TEST_F(Planted, Bf16Partials) { EXPECT_GT(differences(Plant::kBf16Partials, DType::kF32), 0); }
TEST_F(Planted, OwnRowOtherwiseRounded) {
  EXPECT_GT(differences(Plant::kOwnRowOtherwiseRounded, DType::kBF16), 0);
}
TEST_F(Planted, GemvOrder) { EXPECT_GT(differences(Plant::kGemvOrder, DType::kF32), 0); }
TEST_F(Planted, TiesToTheHigherPosition) {
  EXPECT_GT(differences(Plant::kTiesToHigher, DType::kF32, checkpoint_of_ties()), 0);
}
TEST_F(Planted, SharedExpertAddedPerRank) { EXPECT_GT(differences(Plant::kSharedPerRank, DType::kF32), 0); }

}  // namespace
}  // namespace weft::test
