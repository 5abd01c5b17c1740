#include "tests/tools/recall_forward.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>

#include "proto/vocab/check.h"
#include "worker/model/checkpoint.h"

namespace weft::test {

namespace {

size_t index(int64_t i) { return static_cast<size_t>(i); }

std::vector<double> widened(const worker::Tensor& tensor) {
  std::vector<double> out(index(tensor.count()));
  for (size_t i = 0; i < out.size(); ++i) {
    uint32_t bits = 0;
    if (tensor.type == worker::TensorType::kF32) {
      std::memcpy(&bits, tensor.data + 4 * i, 4);
    } else {
      CHECK(tensor.type == worker::TensorType::kBF16);
      uint16_t half = 0;
      std::memcpy(&half, tensor.data + 2 * i, 2);
      bits = uint32_t{half} << 16;
    }
    out[i] = std::bit_cast<float>(bits);
  }
  return out;
}

double dot(const double* a, const double* b, int64_t count) {
  return std::inner_product(a, a + count, b, 0.0);
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

Row rms_norm(Row x, const Row& weight, double eps) {
  const double mean = dot(x.data(), x.data(), static_cast<int64_t>(x.size())) / static_cast<double>(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i] *= weight[i] / std::sqrt(mean + eps);
  return x;
}

void add_to(Row& x, const Row& y, double factor = 1) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += factor * y[i];
}

// The `count` largest, ties to the lower index; ascending.
std::vector<int64_t> largest(const Row& values, int64_t count) {
  std::vector<int64_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[index(a)] > values[index(b)]; });
  order.resize(std::min(order.size(), index(count)));
  std::sort(order.begin(), order.end());
  return order;
}

}  // namespace

SparseMatrix::SparseMatrix(int64_t outputs, int64_t inputs, const std::vector<double>& values)
    : inputs_(inputs), rows_(index(outputs)) {
  CHECK_EQ(values.size(), index(outputs * inputs));
  for (int64_t o = 0; o < outputs; ++o) {
    for (int64_t i = 0; i < inputs; ++i) {
      const double value = values[index(o * inputs + i)];
      if (value != 0) rows_[index(o)].emplace_back(i, value);
    }
  }
}

Row SparseMatrix::multiply(const double* x) const {
  Row out(rows_.size());
  for (size_t o = 0; o < rows_.size(); ++o) {
    for (const auto& [i, weight] : rows_[o]) out[o] += weight * x[i];
  }
  return out;
}

Row SparseMatrix::operator()(const Row& x) const {
  CHECK_EQ(static_cast<int64_t>(x.size()), inputs_);
  return multiply(x.data());
}

void SparseMatrix::clear() {
  for (auto& row : rows_) row.clear();
}

RecallForward RecallForward::load(const std::string& folder) {
  RecallForward out;
  out.config_ = worker::read_model_config(folder).value();
  const worker::Checkpoint checkpoint = worker::Checkpoint::open(folder).value();
  for (const auto& [name, item] : checkpoint.items()) {
    const std::vector<int64_t>& shape = item.tensor->shape;
    if (shape.size() == 2) {
      out.matrices_.emplace(name, SparseMatrix(shape[0], shape[1], widened(*item.tensor)));
    } else {
      out.vectors_.emplace(name, widened(*item.tensor));
    }
  }
  return out;
}

const SparseMatrix& RecallForward::at(int64_t layer, const std::string& name) const {
  return matrices_.at("model.layers." + std::to_string(layer) + "." + name + ".weight");
}
const Row& RecallForward::vector(int64_t layer, const std::string& name) const {
  return vectors_.at("model.layers." + std::to_string(layer) + "." + name);
}
Row RecallForward::normed(int64_t layer, const char* norm, const Row& x) const {
  return rms_norm(x, vector(layer, std::string(norm) + ".weight"), config_.rms_eps);
}

void RecallForward::rotate(double* x, int64_t position) const {
  CHECK(config_.rope_layout == kernels::RopeLayout::kInterleaved);
  CHECK(config_.index_rope_layout == kernels::RopeLayout::kInterleaved);
  for (size_t pair = 0; pair < config_.inverse_frequency.size(); ++pair) {
    const double angle = static_cast<double>(position) * config_.inverse_frequency[pair];
    const double even = x[2 * pair], odd = x[2 * pair + 1];
    x[2 * pair] = even * std::cos(angle) - odd * std::sin(angle);
    x[2 * pair + 1] = even * std::sin(angle) + odd * std::cos(angle);
  }
}

Row RecallForward::query_latent(int64_t layer, const Row& normed_row) const {
  return rms_norm(at(layer, "self_attn.q_a_proj")(normed_row),
                  vector(layer, "self_attn.q_a_layernorm.weight"), config_.latent_eps);
}

Row RecallForward::entry(int64_t layer, const Row& x, int64_t position) const {
  Row both = at(layer, "self_attn.kv_a_proj_with_mqa")(normed(layer, "input_layernorm", x));
  Row out = rms_norm(Row(both.begin(), both.begin() + config_.latent),
                     vector(layer, "self_attn.kv_a_layernorm.weight"), config_.latent_eps);
  out.insert(out.end(), both.begin() + config_.latent, both.end());
  rotate(out.data() + config_.latent, position);
  return out;
}

Row RecallForward::index_key(int64_t layer, const Row& x, int64_t position) const {
  Row key = at(layer, "self_attn.indexer.wk")(normed(layer, "input_layernorm", x));
  const double mean = std::accumulate(key.begin(), key.end(), 0.0) / static_cast<double>(key.size());
  for (double& value : key) value -= mean;
  key = rms_norm(key, vector(layer, "self_attn.indexer.k_norm.weight"), 1e-6);
  add_to(key, vector(layer, "self_attn.indexer.k_norm.bias"));
  rotate(key.data(), position);
  return key;
}

RecallForward::IndexQuery RecallForward::index_query(int64_t layer, const Row& x, int64_t position) const {
  const Row row = normed(layer, "input_layernorm", x);
  IndexQuery out{at(layer, "self_attn.indexer.wq_b")(query_latent(layer, row)),
                 at(layer, "self_attn.indexer.weights_proj")(row)};
  for (int64_t h = 0; h < config_.index_heads; ++h)
    rotate(out.query.data() + h * config_.index_width, position);
  return out;
}

double RecallForward::index_score(const IndexQuery& query, const Row& key) const {
  double sum = 0;
  for (int64_t h = 0; h < config_.index_heads; ++h) {
    const double product = dot(query.query.data() + h * config_.index_width, key.data(), config_.index_width);
    sum += query.weights[index(h)] * std::max(0.0, product);
  }
  return sum / std::sqrt(static_cast<double>(config_.index_heads * config_.index_width));
}

// Per head: W_UKᵀ q_nope, then the rotated rope part.
std::vector<Row> RecallForward::absorbed_query(int64_t layer, const Row& x, int64_t position) const {
  const Row flat = at(layer, "self_attn.q_b_proj")(query_latent(layer, normed(layer, "input_layernorm", x)));
  const SparseMatrix& expand = at(layer, "self_attn.kv_b_proj");
  std::vector<Row> out;
  for (int64_t h = 0; h < config_.heads; ++h) {
    const double* q = flat.data() + h * (config_.nope + config_.rope);
    Row query(index(config_.entry_width()));
    for (int64_t i = 0; i < config_.nope; ++i) {
      for (const auto& [k, weight] : expand.row(h * (config_.nope + config_.value) + i))
        query[index(k)] += weight * q[i];
    }
    std::copy(q + config_.nope, q + config_.nope + config_.rope, query.begin() + config_.latent);
    rotate(query.data() + config_.latent, position);
    out.push_back(std::move(query));
  }
  return out;
}

Row RecallForward::attend(int64_t layer, const Row& x, int64_t position, const std::vector<Row>& entries,
                          const std::vector<Row>& keys) const {
  const IndexQuery index_row = index_query(layer, x, position);
  Row scores;
  for (int64_t t = 0; t <= position; ++t) scores.push_back(index_score(index_row, keys[index(t)]));
  const std::vector<int64_t> selected = largest(scores, config_.index_topk);
  const std::vector<Row> queries = absorbed_query(layer, x, position);
  const SparseMatrix& expand = at(layer, "self_attn.kv_b_proj");
  Row heads;
  for (int64_t h = 0; h < config_.heads; ++h) {
    Row logits;
    for (const int64_t s : selected) {
      logits.push_back(config_.scale *
                       dot(queries[index(h)].data(), entries[index(s)].data(), config_.entry_width()));
    }
    const double top = *std::max_element(logits.begin(), logits.end());
    Row mixed(index(config_.latent));
    double total = 0;
    for (size_t k = 0; k < selected.size(); ++k) {
      const double p = std::exp(logits[k] - top);
      total += p;
      for (size_t i = 0; i < mixed.size(); ++i) mixed[i] += p * entries[index(selected[k])][i];
    }
    for (int64_t v = 0; v < config_.value; ++v) {
      double sum = 0;
      for (const auto& [k, weight] : expand.row(h * (config_.nope + config_.value) + config_.nope + v)) {
        sum += weight * mixed[index(k)] / total;
      }
      heads.push_back(sum);
    }
  }
  return at(layer, "self_attn.o_proj")(heads);
}

Row RecallForward::mlp(int64_t layer, const std::string& prefix, const Row& x) const {
  Row inner = at(layer, prefix + "gate_proj")(x);
  const Row up = at(layer, prefix + "up_proj")(x);
  for (size_t i = 0; i < inner.size(); ++i) inner[i] *= sigmoid(inner[i]) * up[i];
  return at(layer, prefix + "down_proj")(inner);
}

// noaux_tc: the biased scores choose, first groups by their two best, then experts; the plain ones weigh.
Row RecallForward::experts(const Row& x) const {
  Row sigma = at(1, "mlp.gate")(x);
  for (double& value : sigma) value = sigmoid(value);
  Row biased = sigma;
  add_to(biased, vector(1, "mlp.gate.e_score_correction_bias"));
  const int64_t per_group = config_.experts / config_.expert_groups;
  Row group_scores;
  for (int64_t g = 0; g < config_.expert_groups; ++g) {
    Row members(biased.begin() + g * per_group, biased.begin() + (g + 1) * per_group);
    std::sort(members.begin(), members.end(), std::greater<>());
    group_scores.push_back(members[0] + members[1]);
  }
  const std::vector<int64_t> groups = largest(group_scores, config_.top_expert_groups);
  for (int64_t e = 0; e < config_.experts; ++e) {
    if (std::find(groups.begin(), groups.end(), e / per_group) == groups.end()) biased[index(e)] = -INFINITY;
  }
  const std::vector<int64_t> chosen = largest(biased, config_.experts_per_token);
  double total = 1e-20;
  for (const int64_t e : chosen) total += sigma[index(e)];
  Row out = mlp(1, "mlp.shared_experts.", x);
  for (const int64_t e : chosen) {
    const int64_t used = (e + expert_shift) % config_.experts;
    add_to(out, mlp(1, "mlp.experts." + std::to_string(used) + ".", x),
           sigma[index(e)] / (config_.normalise_experts ? total : 1) * config_.expert_scale);
  }
  return out;
}

std::vector<Row> RecallForward::first_layer(const std::vector<uint32_t>& tokens) const {
  std::vector<Row> x, entries, keys;
  for (size_t t = 0; t < tokens.size(); ++t) {
    Row row(index(config_.hidden));
    for (const auto& [i, value] : matrices_.at("model.embed_tokens.weight").row(tokens[t]))
      row[index(i)] = value;
    entries.push_back(entry(0, row, static_cast<int64_t>(t)));
    keys.push_back(index_key(0, row, static_cast<int64_t>(t)));
    x.push_back(std::move(row));
  }
  for (size_t t = 0; t < tokens.size(); ++t) {
    add_to(x[t], attend(0, x[t], static_cast<int64_t>(t), entries, keys));
    add_to(x[t], mlp(0, "mlp.", normed(0, "post_attention_layernorm", x[t])));
  }
  return x;
}

Row RecallForward::logits(const std::vector<Row>& after_first, int64_t position) const {
  std::vector<Row> entries, keys;
  for (int64_t t = 0; t <= position; ++t) {
    entries.push_back(entry(1, after_first[index(t)], t));
    keys.push_back(index_key(1, after_first[index(t)], t));
  }
  Row x = after_first[index(position)];
  add_to(x, attend(1, x, position, entries, keys));
  return finish(std::move(x));
}

Row RecallForward::finish(Row x) const {
  add_to(x, experts(normed(1, "post_attention_layernorm", x)));
  return matrices_.at("lm_head.weight")(rms_norm(x, vectors_.at("model.norm.weight"), config_.rms_eps));
}

// Position 0 turns nothing, so the vectors of position 0 turned by t are those of position t.
Row RecallForward::index_scores_of_equal_rows(const Row& x, int64_t position) const {
  const IndexQuery query = index_query(0, x, position);
  const Row unturned = index_key(0, x, 0);
  Row out;
  for (int64_t t = 0; t <= position; ++t) {
    Row key = unturned;
    rotate(key.data(), t);
    out.push_back(index_score(query, key));
  }
  return out;
}

Row RecallForward::attention_logits_of_equal_rows(int64_t head, const Row& x, int64_t position) const {
  const Row query = absorbed_query(0, x, position)[index(head)];
  const Row unturned = entry(0, x, 0);
  Row out;
  for (int64_t t = 0; t <= position; ++t) {
    Row turned = unturned;
    rotate(turned.data() + config_.latent, t);
    out.push_back(config_.scale * dot(query.data(), turned.data(), config_.entry_width()));
  }
  return out;
}

int64_t best_of(const Row& logits) { return std::max_element(logits.begin(), logits.end()) - logits.begin(); }

double lead_of(const Row& logits) {
  Row sorted = logits;
  std::nth_element(sorted.begin(), sorted.begin() + 1, sorted.end(), std::greater<>());
  return *std::max_element(logits.begin(), logits.end()) - sorted[1];
}

}  // namespace weft::test
