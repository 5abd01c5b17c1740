// What the demo found out, as text for people or as JSON.
//
// Pure. A demo is good when every answer is right, nothing moved at the switch from prefill to decode, the
// first prompt had the tokens it was built for, and the later turns took the document from the prefix cache.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/control.pb.h"
#include "tools/ctl/json.h"
#include "tools/ctl/table.h"
#include "tools/demo/long_prompt.h"

namespace weft::demo {

struct Turn {
  Fact fact;
  double planted_at = 0;  // of the document, 0 … 1
  std::string answered;
  wire::Finished finished;
  uint64_t wall_ns = 0;  // from sending to the last token
  bool right() const { return answered == fact.answer; }
};

struct Report {
  size_t context = 0;
  size_t document_tokens = 0;
  uint64_t seed = 0;
  size_t skipped_files = 0;  // of the source: not UTF-8
  wire::StatusReply status;  // when the demo began
  std::vector<Turn> turns;

  uint64_t switch_bytes() const;
  // The document's blocks that a later turn could have taken from the cache, in tokens.
  uint64_t cacheable_tokens() const;
  bool document_reused() const;
  // What is wrong, one sentence each; empty: the demo is good.
  std::vector<std::string> faults() const;
};

std::string report_text(const Report& report, const ctl::Terminal& terminal);
ctl::Json report_json(const Report& report);

}  // namespace weft::demo
