// The recall model's forward pass in double, written from the published formulas of its family, slow and
// obvious.
//
// Reads a checkpoint folder as any loader would (no constant of the generator is used); shares no code with
// the engine but the checkpoint reader. Keeps matrices as lists of their non-zero weights: most are zero, and
// adding a zero changes nothing. Layer 0 runs for all rows, layer 1 for those asked for.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "worker/model/config.h"

namespace weft::test {

using Row = std::vector<double>;

class SparseMatrix {
 public:
  SparseMatrix() = default;
  SparseMatrix(int64_t outputs, int64_t inputs, const std::vector<double>& values);
  Row multiply(const double* x) const;
  Row operator()(const Row& x) const;
  void clear();  // every weight zero
  int64_t outputs() const { return static_cast<int64_t>(rows_.size()); }
  const std::vector<std::pair<int64_t, double>>& row(int64_t output) const {
    return rows_[static_cast<size_t>(output)];
  }

 private:
  int64_t inputs_ = 0;
  std::vector<std::vector<std::pair<int64_t, double>>> rows_;
};

class RecallForward {
 public:
  static RecallForward load(const std::string& folder);

  // The residual after layer 0, of every token.
  std::vector<Row> first_layer(const std::vector<uint32_t>& tokens) const;
  // Logits of row `position`, given first_layer()'s result.
  Row logits(const std::vector<Row>& after_first, int64_t position) const;
  // The feed-forward of layer 1 and the head alone.
  Row finish(Row x) const;
  // A text of equal tokens whose residual before layer 0 is `x`: what a row at `position` gives the rows up
  // to it, as index scores, and as softmax logits of one head (selected or not).
  Row index_scores_of_equal_rows(const Row& x, int64_t position) const;
  Row attention_logits_of_equal_rows(int64_t head, const Row& x, int64_t position) const;

  const worker::ModelConfig& config() const { return config_; }
  // For experiments that damage the model.
  SparseMatrix& matrix(const std::string& name) { return matrices_.at(name); }
  int64_t expert_shift = 0;  // a router that is off by so many experts

 private:
  const SparseMatrix& at(int64_t layer, const std::string& name) const;
  const Row& vector(int64_t layer, const std::string& name) const;
  Row normed(int64_t layer, const char* norm, const Row& x) const;
  void rotate(double* x, int64_t position) const;
  Row query_latent(int64_t layer, const Row& normed_row) const;
  Row entry(int64_t layer, const Row& x, int64_t position) const;
  Row index_key(int64_t layer, const Row& x, int64_t position) const;
  struct IndexQuery {
    Row query, weights;
  };
  IndexQuery index_query(int64_t layer, const Row& x, int64_t position) const;
  double index_score(const IndexQuery& query, const Row& key) const;
  std::vector<Row> absorbed_query(int64_t layer, const Row& x, int64_t position) const;
  Row attend(int64_t layer, const Row& x, int64_t position, const std::vector<Row>& entries,
             const std::vector<Row>& keys) const;
  Row mlp(int64_t layer, const std::string& prefix, const Row& x) const;
  Row experts(const Row& x) const;

  worker::ModelConfig config_;
  std::map<std::string, SparseMatrix> matrices_;
  std::map<std::string, Row> vectors_;
};

// The largest element; ties to the lower index.
int64_t best_of(const Row& logits);
// How far the largest is above the second.
double lead_of(const Row& logits);

}  // namespace weft::test
