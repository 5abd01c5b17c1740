// weftctl generate: one prompt, its answer as it comes.
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <limits>

#include "proto/vocab/units.h"
#include "tools/client/client.h"
#include "tools/ctl/connect.h"
#include "tools/ctl/json.h"
#include "tools/ctl/position_digest.h"
#include "tools/ctl/run.h"
#include "tools/ctl/table.h"
#include "tools/ctl/views.h"

namespace weft::ctl {
namespace {

std::string read_all(std::istream& in) { return {std::istreambuf_iterator<char>(in), {}}; }

Result<std::string> prompt_text(Context& context) {
  const Arguments& a = context.arguments;
  if (!a.prompt.empty()) return a.prompt;
  if (!a.file.empty() && a.file != "-") {
    std::error_code ignored;
    if (std::filesystem::is_directory(a.file, ignored)) {
      return error(ErrorCode::kInvalidArgument, a.file + " is a folder", "--file");
    }
    std::ifstream file(a.file, std::ios::binary);
    if (!file) return error(ErrorCode::kNotFound, "cannot read " + a.file, "--file");
    return read_all(file);
  }
  if (a.file.empty() && context.in_is_terminal) {
    return error(ErrorCode::kInvalidArgument, "give it as an argument, with --file, or on the standard input",
                 "prompt");
  }
  return read_all(context.in);
}

Result<wire::GenerateRequest> request_of(Context& context) {
  const Arguments& a = context.arguments;
  if ((a.prompt.empty() ? 0 : 1) + (a.file.empty() ? 0 : 1) + (a.tokens.empty() ? 0 : 1) > 1) {
    return error(ErrorCode::kInvalidArgument, "give one of an argument, --file and --tokens", "prompt");
  }
  if (a.max_tokens == 0) return error(ErrorCode::kInvalidArgument, "must be at least 1", "--max-tokens");
  wire::GenerateRequest request;
  if (a.tokens.empty()) {
    TRY(*request.mutable_text(), prompt_text(context));
  } else {
    for (const uint32_t token : a.tokens) request.mutable_tokens()->add_ids(token);
  }
  request.set_model(a.model);
  request.set_max_tokens(a.max_tokens);
  request.set_temperature(static_cast<float>(a.temperature));
  request.set_top_k(a.top_k);
  if (a.top_p) request.set_top_p(static_cast<float>(*a.top_p));
  request.set_seed(a.seed);
  request.set_ignore_eos(a.ignore_eos);
  for (const uint32_t token : a.stop_tokens) request.add_stop_tokens(token);
  request.set_prefill(a.prefill);
  request.set_decode(a.decode);
  request.set_index(a.index);
  request.set_mechanisms(a.mechanisms);
  request.set_digest(a.digest);
  request.set_no_prefix_cache(a.no_prefix_cache);
  request.set_cache_salt(a.cache_salt);
  request.set_credit(a.credit);
  request.set_speculative(a.speculative);
  request.set_draft_tokens(a.draft_tokens);
  request.set_priority(a.priority);
  request.set_parent(a.parent);
  request.set_context(a.context);
  if (a.deadline_s) {
    const double ms = std::ceil(*a.deadline_s * 1e3);
    if (!(ms >= 1 && ms <= std::numeric_limits<uint32_t>::max())) {
      return error(ErrorCode::kInvalidArgument, "must be above 0 and below 50 days", "--deadline");
    }
    request.set_deadline_ms(static_cast<uint32_t>(ms));
  }
  return request;
}

// The answer so far, shown as it grows.
struct Answer {
  explicit Answer(Context& context) : context(context) {}

  Context& context;
  uint64_t request = 0;
  uint64_t prompt_tokens = 0;
  std::string text;
  std::vector<uint32_t> tokens;
  PositionDigests digests;
  bool progress_shown = false;
  bool interrupted = false;

  void put(const std::string& piece) {
    text += piece;
    if (!context.arguments.json()) context.out << piece << std::flush;
  }
  void clear_progress() {
    if (progress_shown) context.err << "\r\033[K" << std::flush;
    progress_shown = false;
  }
  void show_progress(const wire::PrefillProgress& progress) {
    if (!context.terminal.error_is_terminal || progress.total() == 0) return;
    context.err << "\r\033[Kreading the prompt: " << 100 * progress.done() / progress.total() << " % of "
                << human_count(static_cast<int64_t>(progress.total())) << " tokens" << std::flush;
    progress_shown = true;
  }
};

client::StreamHandlers handlers_of(Answer& answer) {
  client::StreamHandlers handlers;
  handlers.accepted = [&](const wire::Accepted& accepted) {
    answer.request = accepted.request();
    answer.prompt_tokens = accepted.prompt_tokens();
  };
  handlers.progress = [&](const wire::PrefillProgress& progress) { answer.show_progress(progress); };
  handlers.token = [&](const wire::TokenEvent& token) {
    answer.clear_progress();
    answer.tokens.push_back(token.token());
    answer.put(token.text());
  };
  handlers.digest = [&](const wire::PositionDigest& digest) {
    answer.digests.add(digest.position(), digest.sha256());
  };
  handlers.interrupted = [&] { answer.interrupted = true; };
  return handlers;
}

// The standard error may be no terminal where the standard output is one: no colours.
std::string stats_text(const Context& context, const wire::Finished& finished) {
  Terminal plain;
  plain.width = context.terminal.error_is_terminal ? context.terminal.width : 0;
  return stats_view(finished, plain);
}

// Of a stream that broke off: what came before.
Json broken_json(const Answer& answer) {
  return {{"request", answer.request}, {"text", answer.text}, {"tokens", answer.tokens}};
}

Json answer_json(const Answer& answer, const wire::Finished& finished, const std::string& digest) {
  Json out = {{"request", finished.request()},
              {"reason", finished.reason()},
              {"text", answer.text},
              {"tokens", answer.tokens},
              {"usage", to_json(finished.usage())},
              {"trace", to_json(finished.trace())}};
  out["digest"] = nullptr;
  if (!digest.empty()) {
    out["digest"] = {{"sha256", digest},
                     {"positions", answer.digests.count()},
                     {"first", answer.digests.first()},
                     {"last", answer.digests.last()}};
  }
  return out;
}

}  // namespace

Result<void> run_generate(Context& context) {
  TRY(const auto request, request_of(context));
  TRY(auto client, connect_client(context));
  Answer answer(context);
  auto outcome =
      client.generate(request, handlers_of(answer), timeout_of(context.arguments, client::kForever));
  answer.clear_progress();
  if (!outcome) {
    if (!context.arguments.json() && !answer.text.empty()) context.out << std::endl;
    if (context.arguments.json() && answer.request != 0)
      context.result = document("generate", broken_json(answer));
    return std::move(outcome).error();
  }
  const wire::Finished& finished = *outcome;
  answer.put(finished.text());
  std::string digest;
  if (!answer.digests.empty()) {
    TRY(digest, answer.digests.hex_digest());
  }
  if (context.arguments.json()) {
    context.result = document("generate", answer_json(answer, finished, digest));
  } else {
    const bool refused = answer.tokens.empty() && answer.text.empty() && finished.reason() == "error";
    if (!refused) context.out << std::endl;
    if (!digest.empty()) {
      context.out << "digest: " << digest << " over " << answer.digests.count() << " positions" << std::endl;
    }
    if (context.arguments.stats) context.err << stats_text(context, finished);
  }
  return client::outcome_of(finished, answer.interrupted);
}

}  // namespace weft::ctl
