// Owned rows whose queries travel: holders of the context compute partials over their own pages, and the
// owner merges them by residue class down the upper tree.
//
// Readers follow from the plan (routes.h). Rows are dense: none selects entries. Belongs to the thread that
// runs the step.
#pragma once

#include "worker/model/attend.h"
#include "worker/model/step_state.h"

namespace weft::worker {

class PassQuery {
 public:
  explicit PassQuery(StepState& state) : state_(state) {}

  // Before exchange point kEntries: the queries of own rows, [whole row][all heads][key width], into the
  // outbox.
  void publish(const std::byte* whole_query);
  // After it: partials for the rows of all owners; those of others into the outbox of kPartials.
  void attend(int64_t layer, const std::byte* whole_query);
  // After the first kPartials: merges and divides; z is [whole row][all heads][value width].
  void finish(float* z);

 private:
  template <typename Body>
  void for_spans(const Body& body) const {
    for (const SpanRoute& span : state_.layout.spans()) {
      if (span.pass_query) body(span);
    }
  }
  bool reads_for(const SpanRoute& span, int owner, int64_t part) const {
    return worker::reads_for(span, state_.config, state_.rank_count, state_.rank, owner, part);
  }
  int64_t head_bytes() const {
    return state_.config.key_width() * static_cast<int64_t>(dtype_bytes(state_.setup.cache.query_dtype()));
  }
  int64_t part_words() const;  // of one row's heads that read a part
  void place_own();
  void finish_part(const SpanRoute& span, int64_t part, float* z);

  StepState& state_;
  std::vector<float> own_;  // by span and part that this rank reads for itself: [own rows][part words]
  std::vector<int64_t> own_offset_;  // by span and part, in own_
};

}  // namespace weft::worker
