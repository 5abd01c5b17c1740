// Prompts and the prefixes of them that a cache would have, drawn from traces of real serving traffic.
//
// Two formats, one JSON object a line, by file name: `agent*.jsonl` holds sessions of requests with the
// number of leading 64-token blocks that an earlier request shares (of sessions that overlap, the first one
// counts); any other *.jsonl is in Mooncake's format, requests with one id for each 512-token prompt block.
// The cache is endless and keeps at least the prompt's last token to be computed. Without files: the traces'
// published shape, as quantiles of prompt lengths and of new tokens, drawn independently.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "proto/vocab/random.h"
#include "proto/vocab/result.h"

namespace weft::bench {

struct TracePrompt {
  int64_t tokens = 0;
  int64_t cached = 0;  // < tokens
};

class Trace {
 public:
  explicit Trace(std::string name) : name_(std::move(name)) {}
  TracePrompt draw(SplitMix64& random) const;
  const std::string& name() const { return name_; }
  const std::vector<TracePrompt>& prompts() const { return prompts_; }

 private:
  friend Result<std::vector<Trace>> read_traces(const std::string& folder);
  friend std::vector<Trace> trace_shapes();
  std::string name_;
  std::vector<TracePrompt> prompts_;  // or else, both ascending and evenly spaced:
  std::vector<int64_t> lengths_, new_ones_;
};

// Of all *.jsonl files of a folder, by name; kNotFound or kBadMessage names folder or file and line.
Result<std::vector<Trace>> read_traces(const std::string& folder);
// Where there are no files.
std::vector<Trace> trace_shapes();

}  // namespace weft::bench
