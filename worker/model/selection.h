// Which positions each row attends to: the indexer's top-k, kept from a full layer for the shared ones after
// it.
//
// A row that sees no more than index_topk keys is dense: it needs no scores. Rows of spans whose index keys
// are split offer their rank's best keys before exchange point kEntries (offer) and find the top-k of all
// offers after it (choose); all others choose at once, after the point. All ranks find the same top-k
// (kernels/split_top_k.h); each keeps of it the positions whose entries it may read.
#pragma once

#include <map>

#include "kernels/indexer.h"
#include "kernels/split_top_k.h"
#include "worker/model/offer_length.h"
#include "worker/model/step_state.h"

namespace weft::worker {

class Selection {
 public:
  explicit Selection(StepState& state) : state_(state) {}

  // Marks every row dense and none given: for layers without an indexer, and at the start of a step.
  void reset();

  // Index queries and head weights of the home rows, computed by the caller: [home][heads][width], and
  // [home][heads] with the factors Hi^-1/2 · Di^-1/2 in it. The weights are changed, and kept in use until
  // the layer's choose().
  void offer(int64_t index_layer, const float* query, float* weights);
  void choose(int64_t index_layer);

 private:
  void round_queries(const float* query, float* weights);
  // Runs index_select for the scored rows of one span; results in found_.
  void select(const SpanRoute& span, int64_t first_home, int64_t count, int64_t index_layer);
  void keep(int64_t home, std::span<const kernels::Candidate> chosen);
  void choose_split(const SpanRoute& span, int64_t first_home, int64_t count, int64_t index_layer);
  template <typename Body>
  void for_scored_spans(const Body& body);

  StepState& state_;
  std::vector<std::byte> query_;  // in the dtype of index queries
  const float* weights_ = nullptr;
  std::vector<kernels::Candidate> found_;
  std::vector<int32_t> found_count_;
  std::vector<int64_t> positions_;
  std::vector<kernels::IndexKeys> keys_;
  std::map<std::pair<int64_t, int>, OfferLength> offer_lengths_;  // by index layer and index_c
  std::vector<kernels::SplitTopK> split_;                         // by thread
  std::vector<std::byte> copied_;  // keys of other ranks' pages, where a span wants them copied
};

}  // namespace weft::worker
