// Who asks for what: prompts that share beginnings, wishes of every kind, drafts right and wrong.
#pragma once

#include <optional>
#include <vector>

#include "tests/simulation/core.h"

namespace weft::simulation {

class Traffic {
 public:
  explicit Traffic(Core& core);

  // A new request, entered in the book. Some are turns that go on from an ended request, of which some name
  // one that is not known or is another tenant's.
  RequestArrived arrival(Draw& draw);
  RegroupRequested regroup(Draw& draw, RequestId request);
  std::optional<RequestId> any(Draw& draw) const;
  RequestId any_ever(Draw& draw) const;  // ended ones, and such as never were

 private:
  // The whole text that the request is about. Sets what depends on it.
  std::vector<uint32_t> new_prompt(Draw& draw, RequestArrived& arrival) const;
  std::vector<uint32_t> turn(Draw& draw, RequestArrived& arrival) const;
  GroupingWish wish(Draw& draw) const;
  Speculation speculation(Draw& draw, const Truth& truth) const;

  Core& core_;
  std::vector<std::vector<uint32_t>> documents_;
  uint64_t requests_ = 0, commands_ = 0;
};

}  // namespace weft::simulation
