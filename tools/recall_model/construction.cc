#include "tools/recall_model/construction.h"

#include <algorithm>
#include <cmath>

#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "tools/recall_model/shape.h"

namespace weft::recall {

namespace {

// ---- amplitudes

// Layer 0 attention writes places at 1/8; its dense layer adds 7/8 of their sign. Neither is enough alone.
constexpr double kPlaceAmplitude = 0.125;
// A head's logit is kRotation · Σ cos θ_i Δ; the next best position is at least 0.476 · 64 = 30 below.
constexpr double kRotation = 64;
// A wrong bit costs 2 · 3.5, so a full match beats a one-bit miss by e^7.
constexpr double kBitLogit = 3.5;
constexpr double kSignGain = 32;   // steepness of the sign units
constexpr double kRouterGain = 8;  // σ(8) for the right expert, σ(−8) for a one-bit miss
constexpr double kExpertGate = 8;  // an expert's gate, a constant
constexpr double kHeadGain = 8;    // a wrong bit costs 16 in the logits
constexpr double kEndGain = 9;     // end of text wins over the control byte with the same code
// The indexer's two heads look for these distances; all of 1…16 then rank within the best 48 of 2^20
// positions.
constexpr double kIndexDistances[kIndexHeads] = {4, 13};
// The mean of each bit in English text: subtracted so that index keys spread over all directions.
constexpr double kTextMean[kCode] = {0, 0, 0, 0, 0, 0.8, 0.8, -1};

double code_bit(int64_t byte, int64_t bit) { return (byte >> bit & 1) != 0 ? 1 : -1; }

// ---- matrices

class Matrix {
 public:
  Matrix(int64_t outputs, int64_t inputs)
      : outputs_(outputs), inputs_(inputs), values_(static_cast<size_t>(outputs * inputs)) {}
  double& operator()(int64_t output, int64_t input) {
    CHECK(output >= 0 && output < outputs_ && input >= 0 && input < inputs_);
    return values_[static_cast<size_t>(output * inputs_ + input)];
  }
  // Divides column i by divisor[i]: what the norm weight before this matrix multiplied in.
  Matrix& divide_columns(const std::vector<double>& divisor) {
    CHECK_EQ(static_cast<int64_t>(divisor.size()), inputs_);
    for (size_t i = 0; i < values_.size(); ++i) values_[i] /= divisor[i % divisor.size()];
    return *this;
  }
  std::vector<int64_t> shape() const { return {outputs_, inputs_}; }
  const std::vector<double>& values() const { return values_; }

 private:
  int64_t outputs_, inputs_;
  std::vector<double> values_;
};

struct Builder {
  std::vector<Tensor> tensors;

  void add(std::string name, std::vector<int64_t> shape, const std::vector<double>& values,
           bool float32_always = false) {
    tensors.push_back({std::move(name), std::move(shape), std::vector<float>(values.begin(), values.end()),
                       float32_always});
  }
  void add(std::string name, const Matrix& matrix) { add(std::move(name), matrix.shape(), matrix.values()); }
  void add(std::string name, const std::vector<double>& vector) {
    add(std::move(name), {static_cast<int64_t>(vector.size())}, vector);
  }
};

// ---- norms

// The squared length of the residual is the same for every token, so the norm is a known factor; this weight
// takes it back and the layer sees the residual in its own units.
std::vector<double> undo_norm(double squared_length) {
  return std::vector<double>(kHidden, std::sqrt(squared_length / kHidden + kNormEps));
}
constexpr double kConstantSquared = kConstantValue * kConstantValue;
constexpr double kPlacesSquared = (kLookBack + 1) * kCode;

// Weights ½, 1, 2 for the latents' norms (all latents are ±1, so their RMS is 1). The next matrix divides
// them out.
std::vector<double> varied_weights(int64_t count, int64_t phase) {
  static constexpr double kChoice[3] = {0.5, 1, 2};
  std::vector<double> out;
  for (int64_t i = phase; i < phase + count; ++i) out.push_back(kChoice[(5 * i + i / 7) % 3]);
  return out;
}
std::vector<double> query_weights() { return varied_weights(kQueryLatent, 0); }
std::vector<double> entry_weights() { return varied_weights(kLatent, 1); }

// ---- rotary queries

// The query that, rotated by its own position t, points where the constant key (1, 0, 1, 0, …) of position
// t − back points: pairs (cos back·θ, −sin back·θ).
double turned_back(double back, int64_t dimension) {
  const double pair = static_cast<double>(dimension / 2);
  const double angle = back * std::pow(kRopeTheta, -2.0 * pair / static_cast<double>(kRope));
  return dimension % 2 == 0 ? std::cos(angle) : -std::sin(angle);
}
// Rows [first_row, first_row + kRope) read the 16 constants of the query latent.
void set_turned_back(Matrix& matrix, int64_t first_row, double back, double amplitude) {
  for (int64_t i = 0; i < kRope; ++i) {
    for (int64_t c = kNope; c < kQueryLatent; ++c) {
      matrix(first_row + i, c) = amplitude * turned_back(back, i) / static_cast<double>(kQueryLatent - kNope);
    }
  }
}

// ---- attention

double softmax_scale() { return 1 / std::sqrt(static_cast<double>(kNope + kRope)); }

// The part of both layers that only fills the latents, all with ±1. Layer 0 has one code so far and repeats
// it; layer 1's query holds the last J bytes and its entry the J bytes before, then the byte itself.
void add_latents(Builder& out, const std::string& attention, int64_t layer) {
  Matrix query(kQueryLatent, kHidden), entry(kLatent + kRope, kHidden);
  for (int64_t i = 0; i < kNope; ++i) {
    query(i, layer == 0 ? i % kCode : place(0) + i) = 1;
    entry(i, layer == 0 ? i % kCode : place(1) + i) = 1;
  }
  for (int64_t i = kNope; i < kQueryLatent; ++i) query(i, kConstant) = 1 / kConstantValue;
  for (int64_t b = 0; b < kCode; ++b) entry(kNope + b, place(0) + b) = 1;
  for (int64_t i = kNope + kCode; i < kLatent; ++i) entry(i, kConstant) = 1 / kConstantValue;
  for (int64_t i = 0; i < kRope; i += 2) entry(kLatent + i, kConstant) = 1 / kConstantValue;
  out.add(attention + "q_a_proj.weight", query);
  out.add(attention + "q_a_layernorm.weight", query_weights());
  out.add(attention + "kv_a_proj_with_mqa.weight", entry);
  out.add(attention + "kv_a_layernorm.weight", entry_weights());
}

// Layer 0: head h copies the byte h + 1 positions back into its place. Position alone decides.
void add_previous_bytes(Builder& out, const std::string& attention) {
  Matrix query(kHeads * (kNope + kRope), kQueryLatent), expand(kHeads * (kNope + kValue), kLatent);
  Matrix output(kHidden, kHeads * kValue);
  for (int64_t h = 0; h < kHeads; ++h) {
    set_turned_back(query, h * (kNope + kRope) + kNope, static_cast<double>(h + 1),
                    kRotation / softmax_scale());
    for (int64_t b = 0; b < kCode; ++b) {
      expand(h * (kNope + kValue) + kNope + b, h * kCode + b) =
          1;  // each head reads its own copy of the code
      output(place(h + 1) + b, h * kValue + b) = kPlaceAmplitude;
    }
  }
  out.add(attention + "q_b_proj.weight", query.divide_columns(query_weights()));
  out.add(attention + "kv_b_proj.weight", expand.divide_columns(entry_weights()));
  out.add(attention + "o_proj.weight", output);
}

// Layer 1: every head finds the position whose J bytes before it are the last J bytes here, and fetches the
// code that stands there. Heads 2b and 2b + 1 each give half of bit b.
void add_lookup(Builder& out, const std::string& attention) {
  Matrix query(kHeads * (kNope + kRope), kQueryLatent), expand(kHeads * (kNope + kValue), kLatent);
  Matrix output(kHidden, kHeads * kValue);
  for (int64_t h = 0; h < kHeads; ++h) {
    for (int64_t i = 0; i < kNope; ++i) {
      query(h * (kNope + kRope) + i, i) = kBitLogit / softmax_scale();
      expand(h * (kNope + kValue) + i, i) = 1;
    }
    for (int64_t b = 0; b < kCode; ++b) expand(h * (kNope + kValue) + kNope + b, kNope + b) = 1;
    output(kRecalled + h / 2, h * kValue + h / 2) = 0.5;
  }
  out.add(attention + "q_b_proj.weight", query.divide_columns(query_weights()));
  out.add(attention + "kv_b_proj.weight", expand.divide_columns(entry_weights()));
  out.add(attention + "o_proj.weight", output);
}

// ---- indexer

void add_index_weights(Builder& out, const std::string& indexer) {
  Matrix weights(kIndexHeads, kHidden);
  for (int64_t h = 0; h < kIndexHeads; ++h) weights(h, kConstant) = 1 / kConstantValue;
  out.add(indexer + "weights_proj.weight", weights);
}

// Layer 0: constant rotary vectors again. The key is the LayerNorm's bias; whatever wk gives has weight 0.
void add_position_index(Builder& out, const std::string& indexer) {
  Matrix key(kIndexWidth, kHidden), query(kIndexHeads * kIndexWidth, kQueryLatent);
  std::vector<double> bias(kIndexWidth);
  for (int64_t i = 0; i < kIndexContent; ++i) key(kRope + i, place(0) + i % kCode) = 1;
  for (int64_t i = 0; i < kRope; i += 2) bias[static_cast<size_t>(i)] = 1;
  for (int64_t h = 0; h < kIndexHeads; ++h) set_turned_back(query, h * kIndexWidth, kIndexDistances[h], 1);
  out.add(indexer + "wk.weight", key);
  out.add(indexer + "k_norm.weight", std::vector<double>(kIndexWidth));
  out.add(indexer + "k_norm.bias", bias);
  out.add(indexer + "wq_b.weight", query.divide_columns(query_weights()));
  add_index_weights(out, indexer);
}

// A fixed ±1 matrix, each column's mean removed: every image sums to zero, so LayerNorm only divides by its
// length.
Matrix mixing_matrix() {
  Matrix out(kIndexContent, kNope);
  for (int64_t k = 0; k < kNope; ++k) {
    double sum = 0;
    for (int64_t i = 0; i < kIndexContent; ++i) {
      out(i, k) = (mix64(static_cast<uint64_t>(i * kNope + k)) & 1) != 0 ? 1 : -1;
      sum += out(i, k);
    }
    for (int64_t i = 0; i < kIndexContent; ++i) out(i, k) -= sum / kIndexContent;
  }
  return out;
}

// Layer 1: query and key are the same image of J codes, the key with length fixed by LayerNorm. Their product
// is largest where the key has the query's direction, so a full match ranks first among any number of
// positions. Each head looks at one half of the dimensions; clipping a negative half at zero cannot lift a
// key above the match.
void add_passage_index(Builder& out, const std::string& indexer) {
  Matrix mix = mixing_matrix();
  Matrix key(kIndexWidth, kHidden), query(kIndexHeads * kIndexWidth, kQueryLatent);
  const std::vector<double> weight = varied_weights(kIndexWidth, 2);
  for (int64_t i = 0; i < kIndexContent; ++i) {
    const int64_t row = kRope + i;
    const int64_t query_row = i / (kIndexContent / kIndexHeads) * kIndexWidth + row;
    double mean = 0;
    for (int64_t k = 0; k < kNope; ++k) {
      key(row, place(1) + k) = mix(i, k);
      query(query_row, k) = mix(i, k) / weight[static_cast<size_t>(row)];
      mean += mix(i, k) * kTextMean[k % kCode];
    }
    key(row, kConstant) = -mean / kConstantValue;
    for (int64_t c = kNope; c < kQueryLatent; ++c) {
      query(query_row, c) =
          -mean / static_cast<double>(kQueryLatent - kNope) / weight[static_cast<size_t>(row)];
    }
  }
  out.add(indexer + "wk.weight", key);
  out.add(indexer + "k_norm.weight", weight);
  out.add(indexer + "k_norm.bias", std::vector<double>(kIndexWidth));
  out.add(indexer + "wq_b.weight", query.divide_columns(query_weights()));
  add_index_weights(out, indexer);
}

// ---- feed-forward

struct Mlp {
  explicit Mlp(int64_t width) : gate(width, kHidden), up(width, kHidden), down(kHidden, width) {}
  void add_to(Builder& out, const std::string& prefix) const {
    out.add(prefix + "gate_proj.weight", gate);
    out.add(prefix + "up_proj.weight", up);
    out.add(prefix + "down_proj.weight", down);
  }
  Matrix gate, up, down;
};

double silu(double x) { return x / (1 + std::exp(-x)); }

// Four units that add `amount` · sign(x[input] / scale) to `output`. silu of a steep argument is a ramp, and
// [ramp(v + ½) − ramp(v − ½)] − [ramp(−v + ½) − ramp(−v − ½)] is −1 below −½, 2v between, +1 above ½.
void set_sign_units(Mlp& mlp, int64_t first, int64_t input, double scale, int64_t output, double amount) {
  static constexpr struct {
    double slope, offset, sign;
  } kRamps[4] = {{1, 0.5, 1}, {1, -0.5, -1}, {-1, 0.5, -1}, {-1, -0.5, 1}};
  for (int64_t i = 0; i < 4; ++i) {
    mlp.gate(first + i, input) = kSignGain * kRamps[i].slope / scale;
    mlp.gate(first + i, kConstant) = kSignGain * kRamps[i].offset / kConstantValue;
    mlp.up(first + i, kConstant) = 1 / kConstantValue;
    mlp.down(output, first + i) = kRamps[i].sign * amount / kSignGain;
  }
}

// Layer 0: brings places 1…J to full amplitude, as exact signs.
void add_dense(Builder& out, const std::string& mlp_name) {
  Mlp mlp(kDenseWidth);
  for (int64_t i = 0; i < kLookBack * kCode; ++i) {
    set_sign_units(mlp, 4 * i, place(1) + i, kPlaceAmplitude, place(1) + i, 1 - kPlaceAmplitude);
  }
  mlp.add_to(out, mlp_name);
}

constexpr int64_t kNibble = 4;     // bits
constexpr int64_t kSharedBit = 3;  // the shared expert's; expert groups answer the others
constexpr int64_t kNibbleExperts = kExperts / 2;

// Which nibble an expert owns: bits reversed, so that the nibbles of letters and digits spread over the
// groups.
int64_t nibble_of_expert(int64_t expert) {
  const int64_t index = expert % kNibbleExperts;
  return (index & 1) << 3 | (index & 2) << 1 | (index & 4) >> 1 | (index & 8) >> 3;
}

// An expert knows the nibble it owns and writes it, whatever was recalled: the high one whole, the low one
// without the shared expert's bit.
void add_expert(Builder& out, const std::string& name, int64_t first_bit, int64_t bits, int64_t nibble) {
  Mlp mlp(kExpertWidth);
  for (int64_t unit = 0; unit < kExpertWidth; ++unit) {
    const int64_t bit = unit % bits;
    const int64_t sharers = (kExpertWidth - bit + bits - 1) / bits;  // units that write the same bit
    mlp.gate(unit, kConstant) = kExpertGate / kConstantValue;
    mlp.up(unit, kConstant) = 1 / kConstantValue;
    mlp.down(kAnswer + first_bit + bit, unit) =
        code_bit(nibble, bit) / (static_cast<double>(sharers) * silu(kExpertGate));
  }
  mlp.add_to(out, name);
}

// Layer 1: two experts, one for each nibble of the recalled code, and the shared one complete the answer.
void add_experts(Builder& out, const std::string& mlp_name) {
  Matrix router(kExperts, kHidden);
  std::vector<double> choice_bias;
  for (int64_t e = 0; e < kExperts; ++e) {
    const bool high = e < kNibbleExperts;
    const int64_t first_bit = high ? kNibble : 0;
    const int64_t nibble = nibble_of_expert(e);
    for (int64_t b = 0; b < kNibble; ++b)
      router(e, kRecalled + first_bit + b) = kRouterGain * code_bit(nibble, b);
    router(e, kConstant) = -kRouterGain * (kNibble - 1) / kConstantValue;
    choice_bias.push_back((static_cast<double>(e % 4) - 1.5) / 32);  // too small to change a choice
    add_expert(out, mlp_name + "experts." + std::to_string(e) + ".", first_bit, high ? kNibble : kSharedBit,
               nibble);
  }
  out.add(mlp_name + "gate.weight", router);
  out.add(mlp_name + "gate.e_score_correction_bias", {kExperts}, choice_bias, /*float32_always=*/true);

  Mlp shared(kExpertWidth);
  const int64_t copies = kExpertWidth / 4;
  for (int64_t c = 0; c < copies; ++c) {
    set_sign_units(shared, 4 * c, kRecalled + kSharedBit, 1, kAnswer + kSharedBit,
                   1.0 / static_cast<double>(copies));
  }
  shared.add_to(out, mlp_name + "shared_experts.");
}

// ---- ends

int64_t byte_of_token(int64_t token) {
  if (token < 256) return token;
  if (token == kBeginToken) return kBeginByte;
  return token == kEndToken ? kEndByte : kPadByte;
}

void add_ends(Builder& out) {
  Matrix embedding(kVocabulary, kHidden), head(kVocabulary, kHidden);
  for (int64_t token = 0; token < kVocabulary; ++token) {
    const double gain = token < 256 ? kHeadGain : token == kEndToken ? kEndGain : 0;
    for (int64_t b = 0; b < kCode; ++b) {
      embedding(token, place(0) + b) = code_bit(byte_of_token(token), b);
      head(token, kAnswer + b) = gain * code_bit(byte_of_token(token), b);
    }
    embedding(token, kConstant) = kConstantValue;
  }
  out.add("model.embed_tokens.weight", embedding);
  out.add("model.norm.weight", undo_norm(kPlacesSquared + kConstantSquared + 2 * kCode));
  out.add("lm_head.weight", head);
}

}  // namespace

std::vector<Tensor> construct() {
  Builder out;
  add_ends(out);

  const std::string first = "model.layers.0.", second = "model.layers.1.";
  out.add(first + "input_layernorm.weight", undo_norm(kCode + kConstantSquared));
  add_latents(out, first + "self_attn.", 0);
  add_previous_bytes(out, first + "self_attn.");
  add_position_index(out, first + "self_attn.indexer.");
  out.add(first + "post_attention_layernorm.weight",
          undo_norm(kCode + kLookBack * kCode * kPlaceAmplitude * kPlaceAmplitude + kConstantSquared));
  add_dense(out, first + "mlp.");

  out.add(second + "input_layernorm.weight", undo_norm(kPlacesSquared + kConstantSquared));
  add_latents(out, second + "self_attn.", 1);
  add_lookup(out, second + "self_attn.");
  add_passage_index(out, second + "self_attn.indexer.");
  out.add(second + "post_attention_layernorm.weight", undo_norm(kPlacesSquared + kConstantSquared + kCode));
  add_experts(out, second + "mlp.");

  std::sort(out.tensors.begin(), out.tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
  return std::move(out.tensors);
}

}  // namespace weft::recall
