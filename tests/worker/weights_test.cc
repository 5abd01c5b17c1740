// Goal: every number of a checkpoint lies where the runner will read it, in both dtypes and from every
// spelling; the checkpoint is accounted for exactly; seals let ranks share the work and a respawned rank skip
// it. Method: the golden checkpoints; a slow reader of the packed layout beside the packer; one defect at a
// time.
#include "worker/model/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <thread>

#include "tests/worker/checkpoint_files.h"
#include "worker/model/weight_plan.h"

namespace weft::worker {
namespace {

using test::golden_folder;
using test::RawTensor;
using test::RawTensors;
using test::TempFolder;
using test::values_of;
using ::testing::HasSubstr;

const char* const kGoldens[] = {"deepseek_v2_lite", "deepseek_v2",   "deepseek_v3",   "deepseek_v3_plain",
                                "deepseek_v32",     "glm4_moe_lite", "glm_moe_dsa",   "llama_smol",
                                "llama_bias",       "qwen2",         "qwen3",         "qwen3_moe",
                                "qwen3_moe_plain",  "glm4_moe",      "glm4_moe_plain"};

// Zeroed, as a fresh memfd is.
class Arena {
 public:
  explicit Arena(int64_t bytes)
      : bytes_(bytes), data_(static_cast<std::byte*>(::operator new(static_cast<size_t>(bytes), kAlign))) {
    std::memset(data_, 0, static_cast<size_t>(bytes));
  }
  ~Arena() { ::operator delete(data_, kAlign); }
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* data() { return data_; }
  int64_t bytes() const { return bytes_; }
  bool operator==(const Arena& other) const {
    return bytes_ == other.bytes_ && std::memcmp(data_, other.data_, static_cast<size_t>(bytes_)) == 0;
  }

 private:
  static constexpr std::align_val_t kAlign{4096};
  int64_t bytes_;
  std::byte* data_;
};

ModelConfig config_of(const std::string& folder) { return read_model_config(folder).value(); }

Result<LoadCounts> load(const std::string& folder, DType dtype, Arena& arena, int rank = 0,
                        int rank_count = 1) {
  return load_weights(folder, config_of(folder), dtype, arena.data(), arena.bytes(), rank, rank_count, {});
}

std::unique_ptr<Arena> loaded(const std::string& folder, DType dtype) {
  auto arena = std::make_unique<Arena>(weight_arena_bytes(config_of(folder), dtype));
  const auto counts = load(folder, dtype, *arena);
  EXPECT_TRUE(counts.has_value()) << counts.error().text();
  return arena;
}

// ---- the packed layout, read one element at a time, as kernels/gemm.h describes it -----------------------

float element(const void* data, DType dtype, int64_t index) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[index];
  return std::bit_cast<float>(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[index]) << 16);
}

float packed(const kernels::PackedMatrix& m, int64_t group, int64_t output, int64_t k) {
  const int64_t step = m.dtype == DType::kF32 ? 1 : 2;
  const int64_t k_padded = (m.k + step - 1) / step * step;
  const int64_t panels = (m.group_outputs + 15) / 16;
  const int64_t panel = group * panels + output / 16;
  return element(m.data, m.dtype,
                 panel * k_padded * 16 + k / step * 16 * step + output % 16 * step + k % step);
}

float rounded(float value, DType dtype) {
  if (dtype == DType::kF32) return value;
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t up = 0x7fffu + ((bits >> 16) & 1);  // to nearest, ties to even
  return std::bit_cast<float>((bits + up) & 0xffff0000u);
}

// Compares packed matrices and vectors with the checkpoint's tensors and remembers which tensors it used.
class Comparison {
 public:
  Comparison(RawTensors tensors, DType dtype) : dtype_(dtype) {
    for (const auto& [name, tensor] : tensors) values_[name] = values_of(tensor);
  }

  // Element (group, output, k) must be source[at(group, output, k)].
  template <typename At>
  void matrix(const kernels::PackedMatrix& m, const std::string& name, int64_t groups, int64_t outputs,
              int64_t k, At at, DType dtype) {
    ASSERT_EQ(m.groups, groups) << name;
    ASSERT_EQ(m.group_outputs, outputs) << name;
    ASSERT_EQ(m.k, k) << name;
    ASSERT_EQ(m.dtype, dtype) << name;
    ASSERT_EQ(reinterpret_cast<uintptr_t>(m.data) % 64, 0u);
    const std::vector<float>& source = values_.at(name);
    int64_t wrong = 0;
    for (int64_t g = 0; g < groups; ++g) {
      for (int64_t o = 0; o < outputs; ++o) {
        for (int64_t i = 0; i < k; ++i) {
          wrong += packed(m, g, o, i) != rounded(source.at(static_cast<size_t>(at(g, o, i))), dtype) ? 1 : 0;
        }
      }
    }
    EXPECT_EQ(wrong, 0) << name;
  }
  void plain(const kernels::PackedMatrix& m, const std::string& name, int64_t outputs, int64_t k) {
    matrix(
        m, name, 1, outputs, k, [k](int64_t, int64_t o, int64_t i) { return o * k + i; }, dtype_);
  }
  void always_float(const kernels::PackedMatrix& m, const std::string& name, int64_t outputs, int64_t k) {
    matrix(
        m, name, 1, outputs, k, [k](int64_t, int64_t o, int64_t i) { return o * k + i; }, DType::kF32);
  }
  void by_head(const kernels::PackedMatrix& m, const std::string& name, int64_t heads, int64_t outputs,
               int64_t k) {
    matrix(
        m, name, heads, outputs, k,
        [=](int64_t g, int64_t o, int64_t i) { return (g * outputs + o) * k + i; }, dtype_);
  }
  void vector(const float* data, const std::string& name, int64_t width) {
    const std::vector<float>& source = values_.at(name);
    ASSERT_EQ(static_cast<int64_t>(source.size()), width);
    EXPECT_TRUE(std::equal(source.begin(), source.end(), data)) << name;
  }
  void rows(const std::byte* data, const std::string& name) {
    const std::vector<float>& source = values_.at(name);
    int64_t wrong = 0;
    for (size_t i = 0; i < source.size(); ++i) {
      wrong += element(data, dtype_, static_cast<int64_t>(i)) != rounded(source[i], dtype_) ? 1 : 0;
    }
    EXPECT_EQ(wrong, 0) << name;
  }
  void mlp(const Mlp& w, const std::string& p, int64_t width, int64_t hidden) {
    plain(w.gate, p + "gate_proj.weight", width, hidden);
    plain(w.up, p + "up_proj.weight", width, hidden);
    plain(w.down, p + "down_proj.weight", hidden, width);
  }

 private:
  DType dtype_;
  std::map<std::string, std::vector<float>> values_;
};

void compare_grouped(Comparison& is, const LayerWeights& w, const std::string& p, const ModelConfig& c) {
  const auto optional = [&](bool given, const float* view, const std::string& name, int64_t width) {
    if (given) return is.vector(view, p + name, width);
    EXPECT_EQ(view, nullptr) << name;
  };
  const int64_t q = c.heads * c.head_width, kv = c.kv_heads * c.head_width;
  is.by_head(w.q, p + "q_proj.weight", c.heads, c.head_width, c.hidden);
  is.by_head(w.k, p + "k_proj.weight", c.kv_heads, c.head_width, c.hidden);
  is.by_head(w.v, p + "v_proj.weight", c.kv_heads, c.head_width, c.hidden);
  is.plain(w.o, p + "o_proj.weight", c.hidden, q);
  optional(c.qkv_bias, w.q_bias, "q_proj.bias", q);
  optional(c.qkv_bias, w.k_bias, "k_proj.bias", kv);
  optional(c.qkv_bias, w.v_bias, "v_proj.bias", kv);
  optional(c.output_bias, w.o_bias, "o_proj.bias", c.hidden);
  optional(c.normed_heads, w.q_norm, "q_norm.weight", c.head_width);
  optional(c.normed_heads, w.k_norm, "k_norm.weight", c.head_width);
}

void compare_mla(Comparison& is, const LayerWeights& w, const std::string& p, const ModelConfig& c) {
  if (c.q_lora_rank == 0) {
    is.by_head(w.q_b, p + "q_proj.weight", c.heads, c.nope + c.rope, c.hidden);
    EXPECT_EQ(w.q_a.k, 0);
  } else {
    is.plain(w.q_a, p + "q_a_proj.weight", c.q_lora_rank, c.hidden);
    is.vector(w.q_a_norm, p + "q_a_layernorm.weight", c.q_lora_rank);
    is.by_head(w.q_b, p + "q_b_proj.weight", c.heads, c.nope + c.rope, c.q_lora_rank);
  }
  is.plain(w.kv_a, p + "kv_a_proj_with_mqa.weight", c.latent + c.rope, c.hidden);
  is.vector(w.kv_a_norm, p + "kv_a_layernorm.weight", c.latent);
  // kv_b_proj: [heads][nope + value][latent].
  const int64_t rows = c.nope + c.value;
  is.matrix(
      w.w_uk, p + "kv_b_proj.weight", c.heads, c.latent, c.nope,
      [&](int64_t h, int64_t o, int64_t i) { return (h * rows + i) * c.latent + o; }, w.q_b.dtype);
  is.matrix(
      w.w_uv, p + "kv_b_proj.weight", c.heads, c.value, c.latent,
      [&](int64_t h, int64_t o, int64_t i) { return (h * rows + c.nope + o) * c.latent + i; }, w.q_b.dtype);
  is.plain(w.o, p + "o_proj.weight", c.hidden, c.heads * c.value);
}

void compare_layer(Comparison& is, const LayerWeights& w, const std::string& p, const ModelConfig& c,
                   const LayerConfig& layer) {
  is.vector(w.input_norm, p + "input_layernorm.weight", c.hidden);
  is.vector(w.post_attention_norm, p + "post_attention_layernorm.weight", c.hidden);
  (c.attention == AttentionKind::kMla ? compare_mla : compare_grouped)(is, w, p + "self_attn.", c);
  if (layer.indexer == Indexer::kFull) {
    const std::string q = p + "self_attn.indexer.";
    is.by_head(w.index_q, q + "wq_b.weight", c.index_heads, c.index_width, c.q_lora_rank);
    is.plain(w.index_k, q + "wk.weight", c.index_width, c.hidden);
    is.vector(w.index_k_norm, q + "k_norm.weight", c.index_width);
    is.vector(w.index_k_norm_bias, q + "k_norm.bias", c.index_width);
    is.always_float(w.index_weights, q + "weights_proj.weight", c.index_heads, c.hidden);
  } else {
    EXPECT_EQ(w.index_q.data, nullptr);
  }
  if (layer.feed_forward == FeedForward::kDense) {
    is.mlp(w.dense, p + "mlp.", c.dense_width, c.hidden);
    EXPECT_EQ(w.dense.gate_bias != nullptr, c.mlp_bias);
    if (!c.mlp_bias) return;
    is.vector(w.dense.gate_bias, p + "mlp.gate_proj.bias", c.dense_width);
    is.vector(w.dense.up_bias, p + "mlp.up_proj.bias", c.dense_width);
    is.vector(w.dense.down_bias, p + "mlp.down_proj.bias", c.hidden);
    return;
  }
  is.always_float(w.router, p + "mlp.gate.weight", c.experts, c.hidden);
  if (c.expert_bias) {
    is.vector(w.router_bias, p + "mlp.gate.e_score_correction_bias", c.experts);
  } else {
    EXPECT_EQ(w.router_bias, nullptr);
  }
  ASSERT_EQ(static_cast<int64_t>(w.experts.size()), c.experts);
  for (size_t e = 0; e < w.experts.size(); ++e) {
    is.mlp(w.experts[e], p + "mlp.experts." + std::to_string(e) + ".", c.expert_width, c.hidden);
  }
  if (c.shared_width > 0) is.mlp(w.shared, p + "mlp.shared_experts.", c.shared_width, c.hidden);
}

// `tensors`: the checkpoint with one tensor per expert matrix.
void compare_all(const ModelWeights& w, const RawTensors& tensors, const ModelConfig& c, DType dtype) {
  Comparison is(tensors, dtype);
  EXPECT_EQ(w.dtype, dtype);
  is.rows(w.embedding, "model.embed_tokens.weight");
  is.plain(w.head, c.tied_embeddings ? "model.embed_tokens.weight" : "lm_head.weight", c.vocabulary,
           c.hidden);
  is.vector(w.final_norm, "model.norm.weight", c.hidden);
  ASSERT_EQ(w.layers.size(), c.layers.size());
  for (size_t i = 0; i < w.layers.size(); ++i) {
    compare_layer(is, w.layers[i], "model.layers." + std::to_string(i) + ".", c, c.layers[i]);
  }
}

// mlp.experts.gate_up_proj [E, 2I, d] and mlp.experts.down_proj [E, d, I] as one tensor per matrix.
RawTensors split_experts(const RawTensors& fused) {
  RawTensors out;
  for (const auto& [name, tensor] : fused) {
    const size_t at = name.find("mlp.experts.gate_up_proj");
    const size_t down_at = name.find("mlp.experts.down_proj");
    if (at == std::string::npos && down_at == std::string::npos) {
      out[name] = tensor;
      continue;
    }
    const auto experts = static_cast<size_t>(tensor.shape[0]);
    const size_t bytes = tensor.bytes.size() / experts;
    for (size_t e = 0; e < experts; ++e) {
      const std::string one = tensor.bytes.substr(e * bytes, bytes);
      if (at == std::string::npos) {
        out[name.substr(0, down_at) + "mlp.experts." + std::to_string(e) + ".down_proj.weight"] = {
            tensor.type, {tensor.shape[1], tensor.shape[2]}, one};
        continue;
      }
      const std::string base = name.substr(0, at) + "mlp.experts." + std::to_string(e);
      const std::vector<int64_t> shape{tensor.shape[1] / 2, tensor.shape[2]};
      out[base + ".gate_proj.weight"] = {tensor.type, shape, one.substr(0, bytes / 2)};
      out[base + ".up_proj.weight"] = {tensor.type, shape, one.substr(bytes / 2)};
    }
  }
  return out;
}

// Keeps the upper 16 bits: an exact BF16 tensor; or converts to F16 (values here are far from its limits).
RawTensor as_bf16(const RawTensor& tensor) {
  RawTensor out{"BF16", tensor.shape, {}};
  for (size_t i = 0; i < tensor.bytes.size(); i += 4) out.bytes += tensor.bytes.substr(i + 2, 2);
  return out;
}
RawTensor as_f16(const RawTensor& tensor) {
  RawTensor out{"F16", tensor.shape, {}};
  for (const float value : values_of(tensor)) {
    const float size = std::fabs(value);
    int exponent = 0;
    std::frexp(size, &exponent);
    exponent = std::max(exponent - 1, -14);
    const auto fraction = static_cast<uint32_t>(std::ldexp(size, 10 - exponent));  // truncated
    const uint32_t magnitude =
        fraction < 1024 ? fraction : (static_cast<uint32_t>(exponent + 15) << 10) + fraction - 1024;
    const auto bits = static_cast<uint16_t>(magnitude | (std::signbit(value) ? 0x8000u : 0u));
    out.bytes += {static_cast<char>(bits & 255), static_cast<char>(bits >> 8)};
  }
  return out;
}

// ---- numbers ----------------------------------------------------------------------------------------

TEST(Weights, GoldenCheckpointsLieWhereTheRunnerReads) {
  for (const char* name : kGoldens) {
    const std::string folder = golden_folder(name);
    const ModelConfig config = config_of(folder);
    const RawTensors tensors = split_experts(test::read_weights(folder));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(std::string(name) + " " + dtype_name(dtype));
      const auto arena = loaded(folder, dtype);
      const auto weights = view_weights(config, dtype, arena->data(), arena->bytes());
      ASSERT_TRUE(weights.has_value()) << weights.error().text();
      compare_all(*weights, tensors, config, dtype);
    }
  }
}

TEST(Weights, BothExpertSpellingsGiveTheSameBytes) {
  const std::string fused = golden_folder("deepseek_v32");
  const RawTensors tensors = test::read_weights(fused);
  ASSERT_TRUE(tensors.contains("model.layers.1.mlp.experts.gate_up_proj"));
  const TempFolder split;
  test::write_checkpoint(split, fused, split_experts(tensors));
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    EXPECT_TRUE(*loaded(fused, dtype) == *loaded(split.path(), dtype));
  }
}

TEST(Weights, HalfPrecisionSourcesAtAnyAlignment) {
  const std::string from = golden_folder("deepseek_v3_plain");
  RawTensors tensors = test::read_weights(from);
  int turn = 0;
  for (auto& [name, tensor] : tensors) {
    ++turn;
    if (turn % 3 == 0) tensor = as_bf16(tensor);
    if (turn % 3 == 1) tensor = as_f16(tensor);
  }
  for (const int spaces : {0, 1, 3}) {
    const TempFolder folder;
    test::write_checkpoint(folder, from, tensors, spaces);
    const ModelConfig config = config_of(folder.path());
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const auto arena = loaded(folder.path(), dtype);
      compare_all(view_weights(config, dtype, arena->data(), arena->bytes()).value(), tensors, config, dtype);
    }
  }
}

TEST(Weights, EveryFloat16ValueIsExact) {
  const std::string from = golden_folder("deepseek_v3_plain");
  RawTensors tensors = test::read_weights(from);
  RawTensor& embedding = tensors["model.embed_tokens.weight"];
  const auto count = static_cast<uint32_t>(embedding.bytes.size() / 4);
  for (uint32_t first = 0; first < 0x10000; first += count) {
    embedding.type = "F16";
    embedding.bytes.clear();
    for (uint32_t i = 0; i < count; ++i) {
      uint32_t bits = (first + i) & 0xffffu;
      if ((bits & 0x7c00u) == 0x7c00u) bits &= ~0x400u;  // neither infinity nor NaN is a weight
      embedding.bytes += {static_cast<char>(bits & 255), static_cast<char>(bits >> 8)};
    }
    const TempFolder folder;
    test::write_checkpoint(folder, from, tensors);
    const auto arena = loaded(folder.path(), DType::kF32);
    const auto weights = view_weights(config_of(folder.path()), DType::kF32, arena->data(), arena->bytes());
    const std::vector<float> expected = values_of(embedding);
    EXPECT_EQ(std::memcmp(weights->embedding, expected.data(), expected.size() * 4), 0) << first;
  }
}

TEST(Weights, AValueThatIsNotFiniteIsRefused) {
  const std::string from = golden_folder("deepseek_v32");
  const RawTensors good = test::read_weights(from);
  const ModelConfig config = config_of(from);
  const char* const kNames[] = {"model.embed_tokens.weight",
                                "model.layers.0.input_layernorm.weight",
                                "model.layers.0.self_attn.kv_a_layernorm.weight",
                                "model.layers.0.self_attn.indexer.k_norm.bias",
                                "model.layers.0.self_attn.indexer.weights_proj.weight",
                                "model.layers.1.mlp.gate.e_score_correction_bias",
                                "model.layers.1.mlp.gate.weight",
                                "model.layers.1.mlp.experts.down_proj",
                                "model.layers.1.self_attn.o_proj.weight",
                                "model.norm.weight"};
  const auto refused = [&](const RawTensors& tensors, const char* name, DType dtype,
                           const char* why = "holds a value that is NaN, infinite or beyond") {
    const TempFolder folder;
    test::write_checkpoint(folder, from, tensors);
    Arena arena(weight_arena_bytes(config, dtype));
    const auto counts = load(folder.path(), dtype, arena);
    ASSERT_FALSE(counts.has_value()) << name;
    EXPECT_EQ(counts.error().code, ErrorCode::kBadCheckpoint);
    EXPECT_EQ(counts.error().field, std::string("model.safetensors: ") + name);
    EXPECT_THAT(counts.error().message, HasSubstr(why));
    EXPECT_FALSE(view_weights(config, dtype, arena.data(), arena.bytes()).has_value()) << "sealed";
  };
  for (const char* name : kNames) {
    for (const float bad : {NAN, INFINITY, -INFINITY}) {
      RawTensors tensors = good;
      RawTensor& tensor = tensors.at(name);
      ASSERT_EQ(tensor.type, "F32");
      std::memcpy(tensor.bytes.data() + tensor.bytes.size() - 4, &bad, 4);
      refused(tensors, name, DType::kF32);
      refused(tensors, name, DType::kBF16);
    }
  }
  // Finite as float32, but it rounds to infinity as bf16.
  RawTensors tensors = good;
  const float large = std::numeric_limits<float>::max();
  std::memcpy(tensors.at("model.layers.1.self_attn.o_proj.weight").bytes.data(), &large, 4);
  const TempFolder folder;
  test::write_checkpoint(folder, from, tensors);
  EXPECT_NE(loaded(folder.path(), DType::kF32), nullptr);
  refused(tensors, "model.layers.1.self_attn.o_proj.weight", DType::kBF16, "beyond bf16");
}

// ---- seals ------------------------------------------------------------------------------------------

TEST(Seals, ASecondLoaderPacksNothing) {
  const std::string folder = golden_folder("glm_moe_dsa");
  const auto arena = loaded(folder, DType::kF32);
  const auto again = load(folder, DType::kF32, *arena);
  ASSERT_TRUE(again.has_value());
  EXPECT_EQ(again->tensors_packed, 0);
  EXPECT_EQ(again->tensors_done, again->tensors_total);
  EXPECT_GT(again->tensors_total, 200);
  EXPECT_TRUE(*arena == *loaded(folder, DType::kF32));
}

TEST(Seals, RanksShareTheWork) {
  const std::string folder = golden_folder("deepseek_v32");
  const ModelConfig config = config_of(folder);
  const auto whole = loaded(folder, DType::kBF16);
  for (const int ranks : {2, 3, 8}) {
    Arena arena(weight_arena_bytes(config, DType::kBF16));
    int64_t packed_count = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const auto early = view_weights(config, DType::kBF16, arena.data(), arena.bytes());
      ASSERT_FALSE(early.has_value());
      EXPECT_EQ(early.error().code, ErrorCode::kFailedPrecondition);
      if (rank == 1) {
        EXPECT_EQ(early.error().field, "model.layers.0.input_layernorm.weight");
      }
      const auto counts = load(folder, DType::kBF16, arena, rank, ranks);
      ASSERT_TRUE(counts.has_value());
      EXPECT_EQ(counts->tensors_packed, counts->tensors_total);
      packed_count += counts->tensors_packed;
    }
    EXPECT_TRUE(view_weights(config, DType::kBF16, arena.data(), arena.bytes()).has_value());
    EXPECT_TRUE(arena == *whole) << ranks;
    ModelWeights unused;
    EXPECT_EQ(packed_count, static_cast<int64_t>(plan_weights(config, DType::kBF16, unused).places.size()));
  }
}

TEST(Seals, RanksMayLoadAtTheSameTime) {
  const std::string folder = golden_folder("deepseek_v32");
  const auto whole = loaded(folder, DType::kF32);
  Arena arena(whole->bytes());
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] { EXPECT_TRUE(load(folder, DType::kF32, arena, rank, 4).has_value()); });
  }
  for (auto& rank : ranks) rank.join();
  EXPECT_TRUE(arena == *whole);
}

// A worker killed while packing leaves a tensor without a seal, whatever its bytes are.
TEST(Seals, AnInterruptedOrDamagedTensorIsPackedAgain) {
  const std::string folder = golden_folder("deepseek_v3");
  const ModelConfig config = config_of(folder);
  const auto whole = loaded(folder, DType::kF32);
  const auto arena = loaded(folder, DType::kF32);
  ModelWeights unused;
  const WeightPlan plan = plan_weights(config, DType::kF32, unused);
  const size_t torn = 17;
  const size_t damaged = 40;
  auto* seals = reinterpret_cast<uint64_t*>(arena->data() + kDirectoryHeaderBytes);
  seals[torn] = 0;
  std::memset(arena->data() + plan.places[torn].offset, 0xee,
              static_cast<size_t>(plan.places[torn].bytes / 2));
  arena->data()[plan.places[damaged].offset] ^= std::byte{1};
  const auto view = view_weights(config, DType::kF32, arena->data(), arena->bytes());
  ASSERT_FALSE(view.has_value());
  EXPECT_EQ(view.error().field, plan.places[torn].source.name);

  const auto other = load(folder, DType::kF32, *arena, 1, 2);  // place 17 is odd, place 40 even
  ASSERT_TRUE(other.has_value());
  EXPECT_EQ(other->tensors_packed, 1);
  const auto owner = load(folder, DType::kF32, *arena, 0, 2);
  ASSERT_TRUE(owner.has_value());
  EXPECT_EQ(owner->tensors_packed, 1);
  EXPECT_TRUE(*arena == *whole);
}

TEST(Seals, AnArenaBelongsToOneModelAndDType) {
  const std::string folder = golden_folder("deepseek_v3");
  const ModelConfig config = config_of(folder);
  const auto arena = loaded(folder, DType::kF32);
  const auto bf16 = load(folder, DType::kBF16, *arena);
  ASSERT_FALSE(bf16.has_value());
  EXPECT_EQ(bf16.error().code, ErrorCode::kFailedPrecondition);
  const auto view = view_weights(config, DType::kBF16, arena->data(), arena->bytes());
  ASSERT_FALSE(view.has_value());
  EXPECT_EQ(view.error().code, ErrorCode::kFailedPrecondition);
}

TEST(Seals, ProgressCountsUp) {
  const std::string folder = golden_folder("deepseek_v3");
  const ModelConfig config = config_of(folder);
  Arena arena(weight_arena_bytes(config, DType::kF32));
  int64_t calls = 0;
  int64_t bytes = 0;
  const auto counts = load_weights(folder, config, DType::kF32, arena.data(), arena.bytes(), 0, 1,
                                   [&](const LoadCounts& now) {
                                     EXPECT_EQ(now.tensors_done, ++calls);
                                     EXPECT_GT(now.bytes_done, bytes);
                                     EXPECT_LE(now.bytes_done, now.bytes_total);
                                     bytes = now.bytes_done;
                                   });
  ASSERT_TRUE(counts.has_value());
  EXPECT_EQ(calls, counts->tensors_total);
  EXPECT_EQ(bytes, counts->bytes_total);
}

// ---- accounting -------------------------------------------------------------------------------------

class Accounting : public ::testing::Test {
 protected:
  const std::string from_ = golden_folder("deepseek_v3_plain");
  RawTensors tensors_ = test::read_weights(from_);

  Result<LoadCounts> load_changed(const std::string& config_text = {}) {
    const TempFolder folder;
    test::write_checkpoint(folder, from_, tensors_);
    if (!config_text.empty()) test::write_file(folder.file("config.json"), config_text);
    Arena arena(weight_arena_bytes(config_of(folder.path()), DType::kF32));
    auto counts = load(folder.path(), DType::kF32, arena);
    if (!counts.has_value()) {  // refused before the first byte
      EXPECT_TRUE(arena == Arena(arena.bytes()));
    }
    return counts;
  }
  std::string config_with(const std::string& was, const std::string& is) const {
    std::string text = test::read_file(from_ + "/config.json");
    const size_t at = text.find(was);
    EXPECT_NE(at, std::string::npos) << was;
    return text.replace(at, was.size(), is);
  }
  void expect_refused(const Result<LoadCounts>& counts, const std::string& field, const std::string& why) {
    ASSERT_FALSE(counts.has_value());
    EXPECT_EQ(counts.error().code, ErrorCode::kBadCheckpoint);
    EXPECT_EQ(counts.error().field, field) << counts.error().text();
    EXPECT_THAT(counts.error().message, HasSubstr(why));
  }
};

TEST_F(Accounting, EachTensorIsNeeded) {
  for (const auto& [name, tensor] : test::read_weights(from_)) {
    tensors_.erase(name);
    expect_refused(load_changed(), name, "no such tensor");
    tensors_[name] = tensor;
  }
  EXPECT_TRUE(load_changed().has_value());
}

TEST_F(Accounting, WrongShape) {
  tensors_["model.norm.weight"] = test::f32_tensor({47}, std::vector<float>(47));
  expect_refused(load_changed(), "model.safetensors: model.norm.weight",
                 "has shape [47], but config.json implies [48]");
  tensors_ = test::read_weights(from_);
  std::swap(tensors_["model.layers.0.mlp.down_proj.weight"].shape[0],
            tensors_["model.layers.0.mlp.down_proj.weight"].shape[1]);
  expect_refused(load_changed(), "model.safetensors: model.layers.0.mlp.down_proj.weight", "[64, 48]");
}

TEST_F(Accounting, UnexpectedTensorsAreListed) {
  for (int i = 0; i < 7; ++i) tensors_["extra." + std::to_string(i)] = test::f32_tensor({1}, {0});
  const auto counts = load_changed();
  expect_refused(counts, "unexpected tensors", "extra.0");
  EXPECT_THAT(counts.error().message, HasSubstr("extra.4 and 2 more"));
}

TEST_F(Accounting, BothExpertSpellingsAtOnce) {
  tensors_["model.layers.1.mlp.experts.down_proj"] =
      test::f32_tensor({8, 48, 16}, std::vector<float>(size_t{8} * 48 * 16));
  expect_refused(load_changed(), "unexpected tensors", "experts.0.down_proj.weight");
}

TEST_F(Accounting, ElementTypesThatAreNotServed) {
  tensors_["model.norm.weight"] = {"I32", {48}, std::string(4 * 48, '\0')};
  auto counts = load_changed();
  ASSERT_FALSE(counts.has_value());
  EXPECT_EQ(counts.error().code, ErrorCode::kUnsupported);
  tensors_["model.norm.weight"] = {"F8_E4M3", {48}, std::string(48, '\0')};
  counts = load_changed();
  ASSERT_FALSE(counts.has_value());
  EXPECT_EQ(counts.error().code, ErrorCode::kBadCheckpoint);
  EXPECT_THAT(counts.error().message,
              HasSubstr("is F8_E4M3, but config.json does not say that its module is quantised"));
}

TEST_F(Accounting, DraftLayersAndRotaryTables) {
  tensors_["model.layers.0.self_attn.rotary_emb.inv_freq"] = test::f32_tensor({4}, {1, 2, 3, 4});
  EXPECT_TRUE(load_changed().has_value());
  tensors_["model.layers.3.enorm.weight"] = test::f32_tensor({1}, {1});
  expect_refused(load_changed(), "unexpected tensors", "model.layers.3.enorm.weight");
  const std::string one = config_with(R"("num_nextn_predict_layers": 0)", R"("num_nextn_predict_layers": 1)");
  EXPECT_TRUE(load_changed(one).has_value());
  tensors_["model.layers.4.enorm.weight"] = test::f32_tensor({1}, {1});
  expect_refused(load_changed(one), "unexpected tensors", "model.layers.4.enorm.weight");
  tensors_.erase("model.layers.4.enorm.weight");
  tensors_["model.layers.3"] = test::f32_tensor({1}, {1});
  expect_refused(load_changed(one), "unexpected tensors", "model.layers.3");
  tensors_.erase("model.layers.3");
  tensors_["model.layers.99999999999999999999.x"] = test::f32_tensor({1}, {1});
  expect_refused(load_changed(one), "unexpected tensors", "model.layers.99999999999999999999.x");
}

TEST(DraftLayer, IsLoadedWhenAskedFor) {
  const std::string from = golden_folder("glm_moe_dsa_draft");
  RawTensors tensors = test::read_weights(from);
  const ModelConfig config = read_model_config(from, true).value();
  const auto load_changed = [&] {
    const TempFolder folder;
    test::write_checkpoint(folder, from, tensors);
    Arena arena(weight_arena_bytes(config, DType::kF32));
    const auto counts =
        load_weights(folder.path(), config, DType::kF32, arena.data(), arena.bytes(), 0, 1, {});
    return counts.has_value() ? std::string() : counts.error().text();
  };
  const std::string layer = "model.layers.3.";
  EXPECT_EQ(load_changed(), "");
  for (const char* name : {"enorm", "hnorm", "eh_proj", "shared_head.norm", "self_attn.indexer.wk"}) {
    const auto kept = tensors.extract(layer + name + ".weight");
    ASSERT_FALSE(kept.empty()) << name;
    EXPECT_THAT(load_changed(), HasSubstr("no such tensor")) << name;
    tensors[layer + name + ".weight"] = kept.mapped();
  }
  // An embedding or a head of its own would have to be used.
  for (const char* name : {"embed_tokens", "shared_head.head"}) {
    const auto kept = tensors.at(layer + name + ".weight");
    tensors[layer + name + ".weight"].bytes[0] ^= 1;
    EXPECT_THAT(load_changed(), HasSubstr("config.json does not account for")) << name;
    tensors.erase(layer + name + ".weight");
    EXPECT_EQ(load_changed(), "") << "a copy may be missing";
    tensors[layer + name + ".weight"] = kept;
  }
}

TEST_F(Accounting, TiedEmbeddings) {
  const std::string tied = config_with(R"("tie_word_embeddings": false)", R"("tie_word_embeddings": true)");
  expect_refused(load_changed(tied), "unexpected tensors",
                 "lm_head.weight");  // another matrix than the embedding
  tensors_["lm_head.weight"] = tensors_["model.embed_tokens.weight"];
  EXPECT_TRUE(load_changed(tied).has_value());
  tensors_.erase("lm_head.weight");
  EXPECT_TRUE(load_changed(tied).has_value());
}

TEST_F(Accounting, ConfigurationOfAnotherModel) {
  expect_refused(load_changed(config_with(R"("kv_lora_rank": 32)", R"("kv_lora_rank": 40)")),
                 "model.safetensors: model.layers.0.self_attn.kv_a_proj_with_mqa.weight", "[48, 48]");
  expect_refused(load_changed(config_with(R"("num_hidden_layers": 3)", R"("num_hidden_layers": 4)")),
                 "model.layers.3.input_layernorm.weight", "no such tensor");
  expect_refused(load_changed(config_with(R"("num_hidden_layers": 3)", R"("num_hidden_layers": 2)")),
                 "unexpected tensors", "model.layers.2.");
}

}  // namespace
}  // namespace weft::worker
