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

  // Of the layout: who reads for whom, and where partials lie.
  void begin_step();
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
  int64_t head_bytes() const {
    return state_.config.key_width() * static_cast<int64_t>(dtype_bytes(state_.setup.cache.query_dtype()));
  }
  int64_t part_words() const;  // of one row's heads that read a part
  // Partials that this rank computes: of its own rows into own_, of others' into the outbox.
  struct Reading {
    int span = 0;
    int64_t part = 0;
    int owner = 0;
    int64_t offset = 0;
  };
  // Where those of one residue class of own rows come from.
  struct Source {
    int reader = 0;
    int64_t offset = 0;  // as above, of the reader
  };
  std::vector<Source>& sources(const SpanRoute& span, int64_t part) {
    return sources_[static_cast<size_t>(span.index * state_.config.kv_heads + part)];
  }
  void add_own(const SpanRoute& span, int64_t part);
  void add_jobs(const Reading& reading, const std::byte* whole_query, std::vector<AttendJob>& jobs);
  void finish_part(const SpanRoute& span, int64_t part, float* z);

  StepState& state_;
  std::vector<Reading> readings_;             // by span, part and owner
  std::vector<std::vector<Source>> sources_;  // by span and part, by class
  std::vector<float> own_;                    // [own rows][part words], one after the other
  int64_t own_words_ = 0;
};

}  // namespace weft::worker
