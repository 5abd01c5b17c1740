// Checks every field of a GenerateRequest and turns it into words of the control plane.
//
// Pure. Whether the request fits (the context, the pools) is the control plane's to say. An Error names the
// field and the limit. Text is tokenized between validate_request() and validate_prompt().
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "controlplane/event.h"
#include "proto/client.pb.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

struct ModelFacts {
  std::string name;
  std::string model_type;
  int64_t vocabulary = 0;
  int64_t max_context = 0;
  std::vector<uint32_t> eos_tokens;
  bool has_tokenizer = false;
  controlplane::Speculation speculation;  // the default
};

inline constexpr int kStopTokensMax = 64;
inline constexpr size_t kSaltBytesMax = 256;
inline constexpr int kPriorityMost = 1000;
inline constexpr uint32_t kDefaultMaxTokens = 16;

// Everything but the prompt.
struct CheckedRequest {
  controlplane::SamplingParams sampling;
  int64_t max_tokens = kDefaultMaxTokens;
  std::vector<uint32_t> stop_tokens;  // with the model's, unless ignore_eos
  controlplane::GroupingWish grouping;
  controlplane::Speculation speculation;
  controlplane::ContextPlace context = controlplane::ContextPlace::kAuto;
  bool use_prefix_cache = true;
  bool digest = false;
  std::string cache_salt;
  uint32_t credit = 0;
  int priority = 0;
  std::optional<Duration> deadline;
};

Result<void> validate_model(const std::string& name, const ModelFacts& model);
Result<CheckedRequest> validate_request(const wire::GenerateRequest& request, const ModelFacts& model,
                                        const controlplane::GroupingWish& defaults, int rank_count);
// How errors about the prompt name it: as the client gave it, "text" or "tokens"; "prompt" if it gave none.
const char* prompt_field(const wire::GenerateRequest& request);
Result<void> validate_prompt(const std::vector<uint32_t>& prompt, const char* field, const ModelFacts& model);

// A grouping as a GenerateRequest, a RegroupRequest or the journal says it; empty strings say nothing.
struct GroupingText {
  std::string prefill, decode, index, mechanisms;
  bool empty() const { return prefill.empty() && decode.empty() && index.empty() && mechanisms.empty(); }
};
template <typename Message>
GroupingText grouping_text(const Message& message) {
  return {message.prefill(), message.decode(), message.index(), message.mechanisms()};
}
GroupingText grouping_text(const controlplane::GroupingWish& wish);
template <typename Message>
void set_grouping(const controlplane::GroupingWish& wish, Message* message) {
  const GroupingText text = grouping_text(wish);
  message->set_prefill(text.prefill);
  message->set_decode(text.decode);
  message->set_index(text.index);
  message->set_mechanisms(text.mechanisms);
}
// What is empty stays as in `base`.
Result<controlplane::GroupingWish> validate_grouping(const GroupingText& text,
                                                     const controlplane::GroupingWish& base, int rank_count);

}  // namespace weft::daemon
