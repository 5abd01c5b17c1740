// The partials of wide rows whose cache is split over a c-group: where attention leaves them, how they travel
// to the owners of the heads, and how they merge down the upper tree.
//
// All to all: what attention computes for other members goes straight into the outbox, and the owner merges
// all c classes where they lie. Tree: everything is kept here first; in each round partners (whose classes
// differ in one bit, the highest first) send each other the half of the heads that the other is on the way
// to, and merge. Both merge the same pairs in the same order, so they are equal to the bit. Belongs to the
// thread that runs the step.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "worker/model/step_state.h"

namespace weft::worker {

class Partials {
 public:
  explicit Partials(StepState& state) : state_(state) {}

  // Once the layout of a step, or of a further guess, is known.
  void begin_step();
  // Before attention of a layer. Pointers of at() are valid until exchange().
  void begin_layer();
  // For the heads of a member of this rank's c-group, of the rows of a dcp span: [rows][heads of the
  // member][words].
  float* at(const SpanRoute& span, int member);
  // Passes exchange point kPartials, once or in rounds, merges this rank's heads of each dcp span and
  // divides: out(span) is [rows][own heads][value width]. Calls after_first() while the inboxes of the first
  // round are valid.
  Result<void> exchange(int layer, const std::function<float*(const SpanRoute&)>& out,
                        const std::function<void()>& after_first);

 private:
  int64_t words() const;
  int64_t heads_of(const SpanRoute& span, int member) const;
  std::vector<int> members_of(const SpanRoute& span) const;
  float* kept(const SpanRoute& span, int member);
  size_t offset(const SpanRoute& span, int from, int member, int round);
  void send(const SpanRoute& span, int round);
  void receive(const SpanRoute& span, int round);
  void finish_classes(const SpanRoute& span, float* out);
  void finish_tree(const SpanRoute& span, float* out);

  StepState& state_;
  std::vector<float> kept_;      // by dcp span: own heads; tree: of each member of the c-group
  std::vector<int64_t> offset_;  // by span, in kept_
  std::vector<std::optional<PartialsMap>> maps_;  // by round and rank that sends; made when first asked
};

}  // namespace weft::worker
