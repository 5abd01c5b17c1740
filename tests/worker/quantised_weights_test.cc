// Goal: weights that a checkpoint holds quantised stay so, each at its place, in every coding; a checkpoint
// that contradicts itself or config.json is refused in one sentence. Method: the quantised golden
// checkpoints; every quantised matrix times the unit vectors gives its weights, which are compared with code
// · scale read here from the raw tensors; one defect at a time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <vector>

#include "kernels/bf16.h"
#include "kernels/fp8.h"
#include "kernels/quantised.h"
#include "proto/vocab/random.h"
#include "tests/worker/checkpoint_files.h"
#include "worker/model/weight_plan.h"

namespace weft::worker {
namespace {

using nlohmann::json;
using test::golden_folder;
using test::RawTensor;
using test::RawTensors;
using test::TempFolder;
using ::testing::HasSubstr;

const char* const kGoldens[] = {"glm_moe_dsa_fp8", "qwen3_moe_nvfp4", "llama_nvfp4"};

// A fresh arena and what was loaded into it.
struct Loaded {
  explicit Loaded(const std::string& folder, DType dtype, int ranks = 1, bool draft_layers = false)
      : config(read_model_config(folder, draft_layers).value()), plan(plan_weights(config, dtype, weights)) {
    arena.resize(static_cast<size_t>(plan.arena_bytes) + kWeightAlignment);
    const size_t misplaced = reinterpret_cast<uintptr_t>(arena.data()) % kWeightAlignment;
    at = arena.data() + (kWeightAlignment - misplaced) % kWeightAlignment;
    for (int rank = 0; rank < ranks && failure.code == ErrorCode::kOk; ++rank) {
      const auto counts = load_weights(folder, config, dtype, at, plan.arena_bytes, rank, ranks, {});
      failure = counts.has_value() ? error(ErrorCode::kOk, "") : counts.error();
    }
    if (failure.code != ErrorCode::kOk) return;
    view = view_weights(config, dtype, at, plan.arena_bytes).value();
  }

  ModelConfig config;
  ModelWeights weights, view;
  WeightPlan plan;
  std::vector<std::byte> arena;
  std::byte* at = nullptr;
  Error failure = error(ErrorCode::kOk, "");
};

float float_at(const RawTensor& tensor, size_t index) {
  float out = 0;
  std::memcpy(&out, tensor.bytes.data() + index * 4, 4);
  return out;
}
uint8_t byte_at(const RawTensor& tensor, int64_t index) {
  return static_cast<uint8_t>(tensor.bytes[static_cast<size_t>(index)]);
}

// What the tensors of a place say of weight (output, k), output counted over all groups.
float stored_weight(const RawTensors& tensors, const WeightPlace& place, int64_t output, int64_t i) {
  const RawTensor& codes = tensors.at(place.source.name);
  const int64_t k = place.k;
  if (place.coding == WeightCoding::kFp8) {
    const auto scale = static_cast<size_t>(output / 128 * ((k + 127) / 128) + i / 128);
    return kernels::e4m3_to_f32(byte_at(codes, output * k + i)) *
           float_at(tensors.at(place.scales[0].name), scale);
  }
  const auto pair = byte_at(codes, (output * k + i) / 2);
  const float code = kernels::e2m1_to_f32(static_cast<uint8_t>(i % 2 == 0 ? pair : pair >> 4));
  const float small = kernels::e4m3_to_f32(byte_at(tensors.at(place.scales[0].name), (output * k + i) / 16));
  const float whole = float_at(tensors.at(place.scales[1].name), 0);
  return code * small * (place.coding == WeightCoding::kNvfp4Modelopt ? whole : 1 / whole);
}

// All weights of a packed matrix, as products with unit vectors: [k][outputs of all groups].
std::vector<float> multiplied_out(const kernels::PackedMatrix& matrix) {
  const int64_t k = matrix.k, outputs = matrix.groups * matrix.group_outputs;
  std::vector<float> unit(static_cast<size_t>(k * k)), y(static_cast<size_t>(k * outputs));
  for (int64_t i = 0; i < k; ++i) unit[static_cast<size_t>(i * k + i)] = 1;
  std::vector<std::byte> x(unit.size() * 4);
  kernels::convert(unit.data(), k * k, matrix.dtype, x.data());
  kernels::Gemm p;
  p.weights = matrix;
  p.group_end = matrix.groups;
  p.rows = k;
  p.x = x.data();
  p.x_stride = k;
  p.y = y.data();
  p.y_stride = outputs;
  kernels::gemm(p, kernels::serial());
  return y;
}

kernels::PackedMatrix matrix_of(const Loaded& loaded, const WeightPlace& place) {
  return {place.dtype, place.groups, place.outputs, place.k, loaded.at + place.offset, place.format};
}

TEST(QuantisedWeights, EveryWeightIsItsCodeTimesItsScale) {
  for (const char* name : kGoldens) {
    const RawTensors tensors = test::read_weights(golden_folder(name));
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(std::string(name) + " " + dtype_name(dtype));
      const Loaded loaded(golden_folder(name), dtype);
      ASSERT_EQ(loaded.failure.code, ErrorCode::kOk) << loaded.failure.text();
      int quantised = 0;
      for (const WeightPlace& place : loaded.plan.places) {
        if (place.format == kernels::PanelFormat::kDense) continue;
        ++quantised;
        const std::vector<float> got = multiplied_out(matrix_of(loaded, place));
        const int64_t outputs = place.groups * place.outputs;
        int64_t wrong = 0;
        for (int64_t o = 0; o < outputs; ++o) {
          for (int64_t i = 0; i < place.k; ++i) {
            wrong += got[static_cast<size_t>(i * outputs + o)] != stored_weight(tensors, place, o, i) ? 1 : 0;
          }
        }
        EXPECT_EQ(wrong, 0) << place.source.name;
        EXPECT_EQ(place.bytes, static_cast<int64_t>(kernels::packed_bytes(dtype, place.groups, place.outputs,
                                                                          place.k, place.format)));
      }
      EXPECT_GE(quantised, 11);
    }
  }
}

// kv_b_proj is used by head and transposed: dequantised, rounded once to the dtype.
TEST(QuantisedWeights, TheAbsorbedMatricesAreDequantised) {
  const std::string folder = golden_folder("glm_moe_dsa_fp8");
  const RawTensors tensors = test::read_weights(folder);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Loaded loaded(folder, dtype);
    const ModelConfig& c = loaded.config;
    int seen = 0;
    for (const WeightPlace& place : loaded.plan.places) {
      if (place.source.name != "model.layers.1.self_attn.kv_b_proj.weight") continue;
      EXPECT_EQ(place.format, kernels::PanelFormat::kDense);
      WeightPlace stored = place;
      stored.k = c.latent;
      const std::vector<float> got = multiplied_out(matrix_of(loaded, place));
      const int64_t outputs = place.groups * place.outputs;
      for (int64_t head = 0; head < place.groups; ++head) {
        for (int64_t o = 0; o < place.outputs; ++o) {
          for (int64_t i = 0; i < place.k; ++i) {
            const int64_t first = head * (c.nope + c.value);
            const bool up = place.source.k_stride == 1;  // W_UV: rows behind the nope rows
            float want = up ? stored_weight(tensors, stored, first + c.nope + o, i)
                            : stored_weight(tensors, stored, first + i, o);
            if (dtype == DType::kBF16) want = kernels::bf16_to_f32(kernels::f32_to_bf16(want));
            ASSERT_EQ(got[static_cast<size_t>(i * outputs + head * place.outputs + o)], want)
                << up << " head " << head << " output " << o << " k " << i;
          }
        }
      }
      ++seen;
    }
    EXPECT_EQ(seen, 2);
  }
}

TEST(QuantisedWeights, TakeTheirOwnRoomOnly) {
  // The same matrix in each form: 8 bits and 4 bits a weight, and scales.
  const auto bytes = [](const char* golden, const char* tensor) {
    const Loaded loaded(golden_folder(golden), DType::kBF16);
    for (const WeightPlace& place : loaded.plan.places) {
      if (place.source.name == tensor) return place.bytes;
    }
    return int64_t{-1};
  };
  // [200, 144]: 13 panels of two blocks, 128 and 16 k.
  EXPECT_EQ(bytes("glm_moe_dsa_fp8", "model.layers.0.mlp.gate_proj.weight"), 13 * (2 * 64 + 144 * 16));
  // [208, 96]: 13 panels; 96 k in two records of 64.
  EXPECT_EQ(bytes("llama_nvfp4", "model.layers.0.mlp.gate_proj.weight_packed"), 13 * (64 + 2 * (64 + 512)));
}

TEST(QuantisedWeights, RanksShareTheWork) {
  for (const char* name : kGoldens) {
    const Loaded one(golden_folder(name), DType::kBF16), three(golden_folder(name), DType::kBF16, 3);
    EXPECT_EQ(std::memcmp(one.at, three.at, static_cast<size_t>(one.plan.arena_bytes)), 0) << name;
  }
}

// ---- tensors ------------------------------------------------------------------------------------------

class Defect : public ::testing::Test {
 protected:
  void use(const char* golden, bool draft_layers = false) {
    from_ = golden_folder(golden);
    draft_layers_ = draft_layers;
    tensors_ = test::read_weights(from_);
  }
  Error load() {
    const TempFolder folder;
    test::write_checkpoint(folder, from_, tensors_);
    return Loaded(folder.path(), DType::kF32, 1, draft_layers_).failure;
  }
  // These tensors are packed to the same bytes as `others`.
  void expect_same_arena(const RawTensors& others) {
    const TempFolder a, b;
    test::write_checkpoint(a, from_, tensors_);
    test::write_checkpoint(b, from_, others);
    const Loaded one(a.path(), DType::kBF16, 1, draft_layers_), two(b.path(), DType::kBF16, 1, draft_layers_);
    ASSERT_EQ(one.failure.code, ErrorCode::kOk) << one.failure.text();
    ASSERT_EQ(two.failure.code, ErrorCode::kOk) << two.failure.text();
    EXPECT_EQ(std::memcmp(one.at, two.at, static_cast<size_t>(two.plan.arena_bytes)), 0);
  }
  void refused(const std::string& field, const char* why, ErrorCode code = ErrorCode::kBadCheckpoint) {
    const Error failure = load();
    EXPECT_EQ(failure.code, code) << failure.text();
    EXPECT_THAT(failure.field, HasSubstr(field));
    EXPECT_THAT(failure.message, HasSubstr(why));
    tensors_ = test::read_weights(from_);
  }
  void put_float(const std::string& name, float value) {
    std::memcpy(tensors_.at(name).bytes.data() + tensors_.at(name).bytes.size() - 4, &value, 4);
  }

  std::string from_;
  bool draft_layers_ = false;
  RawTensors tensors_;
};

TEST_F(Defect, ScalesOfBlocks) {
  use("glm_moe_dsa_fp8");
  EXPECT_EQ(load().code, ErrorCode::kOk);
  const std::string weight = "model.layers.0.mlp.up_proj.weight", scale = weight + "_scale_inv";
  tensors_.erase(scale);
  refused(scale, "no such tensor");
  tensors_["model.layers.1.self_attn.q_a_proj.weight_scale_inv"] = tensors_.at(scale);
  refused("unexpected tensors", "model.layers.1.self_attn.q_a_proj.weight_scale_inv");
  tensors_.at(scale) = test::f32_tensor({1, 1}, {1});
  refused(scale, "has shape [1, 1], but config.json implies [2, 2]");
  tensors_.at(scale).type = "I32";
  refused(scale, "weights of type I32 are not served", ErrorCode::kUnsupported);
  for (const float bad : {NAN, INFINITY}) {
    put_float(scale, bad);
    refused(scale, "holds a scale that is NaN, infinite");
  }
  put_float(scale, 1e38f);
  refused(weight, "NaN or, with its scale, infinite");
  tensors_.at(weight).bytes.back() = '\x7f';
  refused(weight, "NaN or, with its scale, infinite");
  tensors_.at("model.layers.0.self_attn.kv_b_proj.weight").bytes[77] = '\xff';
  refused("kv_b_proj.weight", "NaN or, with its scale, infinite");
}

TEST_F(Defect, TypesThatContradictConfig) {
  use("glm_moe_dsa_fp8");
  const std::string plain = "model.layers.1.self_attn.q_a_proj.weight";
  tensors_.at(plain) = {"F8_E4M3", {136, 144}, std::string(136 * 144, '\0')};
  refused(plain, "is F8_E4M3, but config.json does not say that its module is quantised");
  const std::string weight = "model.layers.0.self_attn.q_a_proj.weight";
  tensors_.at(weight) = test::f32_tensor({136, 144}, std::vector<float>(136 * 144));
  refused(weight, "is F32, but config.json says that its module is quantised (fp8)");
  use("qwen3_moe_nvfp4");
  const std::string codes = "model.layers.0.self_attn.q_proj.weight";
  tensors_.at(codes) = test::f32_tensor({128, 80}, std::vector<float>(128 * 80));
  refused(codes, "is F32, but config.json says that its module is quantised (nvfp4)");
}

TEST_F(Defect, ScalesOfGroups) {
  use("qwen3_moe_nvfp4");
  EXPECT_EQ(load().code, ErrorCode::kOk);
  const std::string module = "model.layers.0.mlp.experts.3.down_proj.";
  tensors_.erase(module + "weight_scale");
  refused(module + "weight_scale", "no such tensor");
  tensors_.erase(module + "weight_scale_2");
  refused(module + "weight_scale_2", "no such tensor");
  tensors_.at(module + "weight_scale").shape = {40, 6};
  refused(module + "weight_scale", "has shape [40, 6], but config.json implies [80, 3]");
  tensors_.at(module + "weight_scale").bytes[5] = '\x7f';
  refused(module + "weight_scale", "holds a scale that is NaN");
  put_float(module + "weight_scale_2", NAN);
  refused(module + "weight_scale_2", "holds a scale that is NaN");
  tensors_["model.layers.2.self_attn.o_proj.weight_scale"] = tensors_.at(module + "weight_scale");
  refused("unexpected tensors", "model.layers.2.self_attn.o_proj.weight_scale");
  // Scales of activations and of cached keys and values are passed over, or may be missing.
  tensors_.erase(module + "input_scale");
  tensors_["model.layers.0.self_attn.k_proj.k_scale"] = test::f32_tensor({1}, {1});
  EXPECT_EQ(load().code, ErrorCode::kOk);

  use("llama_nvfp4");
  const std::string whole = "model.layers.0.mlp.up_proj.weight_global_scale";
  put_float(whole, 0);
  refused(whole, "as a divisor, zero");
  put_float(whole, INFINITY);
  refused(whole, "holds a scale that is NaN, infinite");
  tensors_.erase(whole);
  refused(whole, "no such tensor");
}

// Released checkpoints also write the scales of blocks as BF16.
TEST_F(Defect, ScalesOfBlocksMayBeBf16) {
  use("glm_moe_dsa_fp8");
  RawTensors rounded = tensors_;
  for (auto& [name, tensor] : tensors_) {
    if (!name.ends_with("_scale_inv")) continue;
    RawTensor narrow{"BF16", tensor.shape, {}};
    for (size_t i = 0; i < tensor.bytes.size(); i += 4) {
      narrow.bytes += tensor.bytes.substr(i + 2, 2);
      rounded.at(name).bytes.replace(i, 2, 2, '\0');
    }
    tensor = narrow;
  }
  expect_same_arena(rounded);
}

// ---- draft layers -------------------------------------------------------------------------------------

constexpr const char* kDrafts = "deepseek_v3_sure_drafts";  // its scales are bare exponents

// The same checkpoint with float32 scales.
RawTensors with_float_scales(RawTensors tensors) {
  for (auto& [name, tensor] : tensors) {
    if (tensor.type != "F8_E8M0") continue;
    std::vector<float> scales;
    for (const char code : tensor.bytes) scales.push_back(std::ldexp(1.0f, static_cast<uint8_t>(code) - 127));
    tensor = test::f32_tensor(tensor.shape, scales);
  }
  return tensors;
}

TEST_F(Defect, ScalesOfBlocksMayBeExponents) {
  use(kDrafts, /*draft_layers=*/true);
  expect_same_arena(with_float_scales(tensors_));
  const std::string scale = "model.layers.2.self_attn.o_proj.weight_scale_inv";
  ASSERT_EQ(tensors_.at(scale).type, "F8_E8M0");
  tensors_.at(scale).bytes[0] = '\xff';
  refused(scale, "holds a scale that is NaN, infinite");
  tensors_.at(scale).bytes[0] = '\xfe';
  refused("model.layers.2.self_attn.o_proj.weight", "NaN or, with its scale, infinite");
  const std::string plain = "model.layers.2.mlp.gate.weight";
  tensors_.at(plain) = {"F8_E8M0", tensors_.at(plain).shape, std::string(16 * 64, '\x7f')};
  refused(plain, "weights of type F8_E8M0 are not served", ErrorCode::kUnsupported);
}

// A draft layer is quantised like any other; eh_proj may be, and is dequantised.
TEST_F(Defect, DraftLayersAreQuantised) {
  use(kDrafts, /*draft_layers=*/true);
  RawTensors plain = tensors_;
  for (const char* layer : {"2", "3"}) {
    const std::string weight = std::string("model.layers.") + layer + ".eh_proj.weight";
    const RawTensor codes = plain.at(weight), scales = with_float_scales(plain).at(weight + "_scale_inv");
    std::vector<float> values;  // [64][128]: one block
    for (const char code : codes.bytes)
      values.push_back(kernels::e4m3_to_f32(static_cast<uint8_t>(code)) * float_at(scales, 0));
    plain.at(weight) = test::f32_tensor(codes.shape, values);
    plain.erase(weight + "_scale_inv");
  }
  expect_same_arena(plain);
  const Loaded loaded(from_, DType::kBF16, 1, true);
  for (const LayerWeights& layer : loaded.view.layers) EXPECT_EQ(layer.o.format, kernels::PanelFormat::kFp8);
  ASSERT_EQ(loaded.view.draft.size(), 2u);
  for (const DraftWeights& draft : loaded.view.draft)
    EXPECT_EQ(draft.combine.format, kernels::PanelFormat::kDense);
  const std::string scale = "model.layers.3.eh_proj.weight_scale_inv";
  tensors_.erase(scale);
  refused(scale, "no such tensor");
  plain["model.layers.3.eh_proj.weight_scale_inv"] = tensors_.at(scale);
  tensors_ = plain;
  refused("unexpected tensors", "model.layers.3.eh_proj.weight_scale_inv");
}

// The packed eh_proj of the draft layer of a checkpoint of these parts.
std::string packed_eh_proj(const json& config, const RawTensors& tensors) {
  const TempFolder folder;
  test::write_file(folder.file("config.json"), config.dump());
  test::write_safetensors(folder.file("model.safetensors"), tensors);
  const Loaded loaded(folder.path(), DType::kF32, 1, true);
  EXPECT_EQ(loaded.failure.code, ErrorCode::kOk) << loaded.failure.text();
  if (loaded.view.draft.empty()) return {};
  const kernels::PackedMatrix& matrix = loaded.view.draft[0].combine;
  return {static_cast<const char*>(static_cast<const void*>(matrix.data)),
          kernels::packed_bytes(matrix.dtype, matrix.groups, matrix.group_outputs, matrix.k, matrix.format)};
}

TEST(DraftLayers, EhProjOfFourBits) {
  json config = json::parse(test::read_file(golden_folder("glm4_moe_draft") + "/config.json"));
  const RawTensors plain = test::read_weights(golden_folder("glm4_moe_draft"));
  const std::string module = "model.layers.2.eh_proj.";
  const auto hidden = config["hidden_size"].get<int64_t>();
  const auto count = static_cast<size_t>(2 * hidden * hidden);
  std::vector<float> values(count);
  std::string codes(count / 2, '\0'), scales(count / 16, '\0');
  SplitMix64 random(3);
  for (char& pair : codes) pair = static_cast<char>(random.below(256));
  for (char& scale : scales) scale = static_cast<char>(0x30 + random.below(16));
  for (size_t i = 0; i < count; ++i) {
    const auto pair = static_cast<uint8_t>(codes[i / 2]);
    values[i] = kernels::e2m1_to_f32(i % 2 == 0 ? pair & 15 : pair >> 4) *
                kernels::e4m3_to_f32(static_cast<uint8_t>(scales[i / 16])) * 0.25f;
  }
  RawTensors dequantised = plain, modelopt = plain, compressed = plain;
  dequantised[module + "weight"] = test::f32_tensor({hidden, 2 * hidden}, values);
  modelopt[module + "weight"] = {"U8", {hidden, hidden}, codes};
  modelopt[module + "weight_scale"] = {"F8_E4M3", {hidden, hidden / 8}, scales};
  modelopt[module + "weight_scale_2"] = test::f32_tensor({}, {0.25f});
  compressed.erase(module + "weight");
  compressed[module + "weight_packed"] = modelopt[module + "weight"];
  compressed[module + "weight_scale"] = modelopt[module + "weight_scale"];
  compressed[module + "weight_global_scale"] = test::f32_tensor({1}, {4.0f});

  const std::string expected = packed_eh_proj(config, dequantised);
  json with = config;
  with["quantization_config"] = {
      {"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", {"self_attn", "mlp", "lm_head"}}};
  EXPECT_EQ(packed_eh_proj(with, modelopt), expected);
  EXPECT_EQ(packed_eh_proj(with, dequantised), expected) << "left as it was";
  with["quantization_config"] =
      json::parse(test::read_file(golden_folder("llama_nvfp4") + "/config.json"))["quantization_config"];
  with["quantization_config"]["ignore"] = {"self_attn", "mlp", "lm_head"};
  EXPECT_EQ(packed_eh_proj(with, compressed), expected);
}

TEST_F(Defect, QuantisedExpertsInOneTensor) {
  for (const char* golden : {"glm_moe_dsa_fp8", "qwen3_moe_nvfp4"}) {
    use(golden);
    const std::string layer = "model.layers.1.mlp.", other = "model.layers.0.mlp.";
    const std::string mlp = tensors_.contains(layer + "experts.0.down_proj.weight") ? layer : other;
    std::erase_if(tensors_, [&](const auto& item) { return item.first.starts_with(mlp + "experts."); });
    const RawTensors others = tensors_;
    for (const char* name : {"experts.gate_up_proj", "experts.gate_up_proj_packed"}) {
      tensors_ = others;
      tensors_[mlp + name] = {"F8_E4M3", {1, 1, 1}, "\x38"};
      refused(mlp + name, "all experts of a layer, which is not served", ErrorCode::kUnsupported);
    }
  }
}

}  // namespace
}  // namespace weft::worker
