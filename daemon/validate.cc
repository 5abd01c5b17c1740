#include "daemon/validate.h"

#include <cmath>

#include "daemon/field_error.h"

namespace weft::daemon {
namespace {

std::string show(float value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", static_cast<double>(value));
  return text;
}

Result<void> check_token(uint32_t token, const char* field, int64_t index, const ModelFacts& model) {
  if (static_cast<int64_t>(token) < model.vocabulary) return {};
  return bad_field(field, "token id " + std::to_string(token) + " at index " + std::to_string(index) +
                              " is not below the vocabulary of " + std::to_string(model.vocabulary));
}

Result<controlplane::SamplingParams> check_sampling(const wire::GenerateRequest& request,
                                                    const ModelFacts& model) {
  const float temperature = request.temperature();
  if (!std::isfinite(temperature) || temperature < 0 || temperature > 100) {
    return bad_field("temperature", "must be from 0 to 100, not " + show(temperature));
  }
  const float top_p = request.has_top_p() ? request.top_p() : 1.0f;
  if (!std::isfinite(top_p) || top_p <= 0 || top_p > 1) {
    return bad_field("top_p", "must be above 0 and at most 1, not " + show(top_p));
  }
  if (static_cast<int64_t>(request.top_k()) > model.vocabulary) {
    return bad_field("top_k", "must be at most the vocabulary of " + std::to_string(model.vocabulary) +
                                  ", not " + std::to_string(request.top_k()));
  }
  return controlplane::SamplingParams{temperature, request.top_k(), top_p, request.seed()};
}

Result<std::vector<uint32_t>> check_stop_tokens(const wire::GenerateRequest& request,
                                                const ModelFacts& model) {
  if (request.stop_tokens_size() > kStopTokensMax) {
    return error(
        ErrorCode::kTooLarge,
        std::to_string(request.stop_tokens_size()) + " given, limit " + std::to_string(kStopTokensMax),
        "stop_tokens");
  }
  std::vector<uint32_t> stop;
  for (int i = 0; i < request.stop_tokens_size(); ++i) {
    TRY_VOID(check_token(request.stop_tokens(i), "stop_tokens", i, model));
    stop.push_back(request.stop_tokens(i));
  }
  if (!request.ignore_eos()) stop.insert(stop.end(), model.eos_tokens.begin(), model.eos_tokens.end());
  return stop;
}

Result<controlplane::Speculation> check_speculation(const wire::GenerateRequest& request,
                                                    const ModelFacts& model) {
  controlplane::Speculation speculation = model.speculation;
  if (!request.speculative().empty()) {
    auto source = controlplane::parse_draft_source(request.speculative());
    if (!source) return with_field(source.error(), "speculative");
    speculation.source = *source;
  }
  if (speculation.source == controlplane::DraftSource::kMtp &&
      model.speculation.source != controlplane::DraftSource::kMtp) {
    return error(ErrorCode::kFailedPrecondition,
                 "the draft layer is not loaded; the daemon was started without --speculative mtp",
                 "speculative");
  }
  if (request.draft_tokens() > controlplane::kDraftTokensMax) {
    return bad_field("draft_tokens", "must be at most " + std::to_string(controlplane::kDraftTokensMax) +
                                         ", not " + std::to_string(request.draft_tokens()));
  }
  if (request.draft_tokens() > 0) {
    if (!speculation.on()) return bad_field("draft_tokens", "needs a source of drafts (speculative)");
    speculation.draft_tokens = request.draft_tokens();
  }
  const bool forced = speculation.source == controlplane::DraftSource::kForced;
  if (forced != (request.forced_drafts_size() > 0)) {
    return bad_field("forced_drafts",
                     forced ? "missing: speculative is forced" : "needs speculative to be forced");
  }
  if (request.forced_drafts_size() > model.max_context) {
    return error(ErrorCode::kTooLarge,
                 std::to_string(request.forced_drafts_size()) + " given, more than the context of " +
                     std::to_string(model.max_context),
                 "forced_drafts");
  }
  for (int i = 0; i < request.forced_drafts_size(); ++i) {
    TRY_VOID(check_token(request.forced_drafts(i), "forced_drafts", i, model));
    speculation.forced.push_back(request.forced_drafts(i));
  }
  return speculation;
}

}  // namespace

Result<void> validate_model(const std::string& name, const ModelFacts& model) {
  if (name.empty() || name == model.name) return {};
  return error(ErrorCode::kNotFound, "no model '" + name + "' here; this daemon serves '" + model.name + "'",
               "model");
}

GroupingText grouping_text(const controlplane::GroupingWish& wish) {
  return {kv::split_name(wish.prefill), kv::decode_name(wish.decode), kv::index_name(wish.index),
          kv::mechanisms_name(wish.mechanisms)};
}

Result<controlplane::GroupingWish> validate_grouping(const GroupingText& text,
                                                     const controlplane::GroupingWish& base, int rank_count) {
  controlplane::GroupingWish wish = base;
  if (!text.prefill.empty()) {
    auto split = kv::parse_split(text.prefill);
    if (!split) return with_field(split.error(), "prefill");
    wish.prefill = *split;
  }
  if (!text.decode.empty()) {
    auto parsed = kv::parse_decode(text.decode, rank_count);
    if (!parsed) return with_field(parsed.error(), "decode");
    wish.decode = *parsed;
  }
  if (!text.index.empty()) {
    auto kind = kv::parse_index(text.index, rank_count);
    if (!kind) return with_field(kind.error(), "index");
    wish.index = *kind;
  }
  auto mechanisms = kv::parse_mechanisms(text.mechanisms, wish.mechanisms);
  if (!mechanisms) return with_field(mechanisms.error(), "mechanisms");
  wish.mechanisms = *mechanisms;
  TRY_VOID(kv::validate_mechanisms(wish.mechanisms, wish.decode));
  return wish;
}

Result<CheckedRequest> validate_request(const wire::GenerateRequest& request, const ModelFacts& model,
                                        const controlplane::GroupingWish& defaults, int rank_count) {
  TRY_VOID(validate_model(request.model(), model));
  CheckedRequest checked;
  switch (request.prompt_case()) {
    case wire::GenerateRequest::PROMPT_NOT_SET:
      return bad_field("prompt", "missing: give text or tokens");
    case wire::GenerateRequest::kText:
      if (request.text().empty()) return bad_field("text", "must not be empty");
      if (!model.has_tokenizer) {
        return error(ErrorCode::kUnsupported, "the model has no tokenizer.json; send token ids", "text");
      }
      break;
    case wire::GenerateRequest::kTokens:
      if (request.tokens().ids().empty()) return bad_field("tokens", "must hold at least one token");
      break;
  }
  if (request.max_tokens() != 0) checked.max_tokens = request.max_tokens();
  TRY(checked.sampling, check_sampling(request, model));
  TRY(checked.stop_tokens, check_stop_tokens(request, model));
  TRY(checked.grouping, validate_grouping(grouping_text(request), defaults, rank_count));
  if (request.cache_salt().size() > kSaltBytesMax) {
    return error(
        ErrorCode::kTooLarge,
        std::to_string(request.cache_salt().size()) + " bytes, limit " + std::to_string(kSaltBytesMax),
        "cache_salt");
  }
  TRY(checked.speculation, check_speculation(request, model));
  if (request.priority() < -kPriorityMost || request.priority() > kPriorityMost) {
    return bad_field("priority", "must be from -" + std::to_string(kPriorityMost) + " to " +
                                     std::to_string(kPriorityMost) + ", not " +
                                     std::to_string(request.priority()));
  }
  checked.priority = request.priority();
  if (!request.context().empty()) {
    auto place = controlplane::parse_context_place(request.context());
    if (!place) return with_field(place.error(), "context");
    checked.context = *place;
  }
  if (request.deadline_ms() > 0) checked.deadline = std::chrono::milliseconds(request.deadline_ms());
  checked.use_prefix_cache = !request.no_prefix_cache();
  checked.digest = request.digest();
  checked.cache_salt = request.cache_salt();
  checked.credit = request.credit();
  return checked;
}

const char* prompt_field(const wire::GenerateRequest& request) {
  switch (request.prompt_case()) {
    case wire::GenerateRequest::kText:
      return "text";
    case wire::GenerateRequest::kTokens:
      return "tokens";
    case wire::GenerateRequest::PROMPT_NOT_SET:
      break;
  }
  return "prompt";
}

Result<void> validate_prompt(const std::vector<uint32_t>& prompt, const char* field,
                             const ModelFacts& model) {
  if (prompt.empty()) return bad_field(field, "must hold at least one token");
  for (size_t i = 0; i < prompt.size(); ++i) {
    TRY_VOID(check_token(prompt[i], field, static_cast<int64_t>(i), model));
  }
  return {};
}

}  // namespace weft::daemon
