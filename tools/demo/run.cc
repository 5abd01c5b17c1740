#include "tools/demo/run.h"

#include <functional>
#include <iostream>

#include "proto/vocab/units.h"
#include "tools/client/client.h"
#include "tools/ctl/connect.h"
#include "tools/ctl/run.h"
#include "tools/demo/long_prompt.h"
#include "tools/demo/progress.h"
#include "tools/demo/report.h"
#include "tools/demo/source_text.h"

namespace weft::demo {
namespace {

std::string count(uint64_t value) { return human_count(static_cast<int64_t>(value)); }

// The licences may be missing on a small system; a file that the user named may not.
Result<Source> source_text(const DemoOptions& options) {
  if (!options.source.empty()) return read_source(options.source);
  auto source = read_source(kDefaultFolder);
  return source ? std::move(source) : Result<Source>(Source());
}

void introduce(const DemoOptions& options, size_t skipped_files, const LongPrompt& prompt,
               const wire::StatusReply& status, ctl::Context& context) {
  const auto& terminal = context.terminal;
  std::string source = options.source.empty() ? kDefaultFolder : options.source;
  if (skipped_files > 0) source += " (" + skipped_text(skipped_files) + ")";
  std::string stations;
  for (const Fact& fact : prompt.facts) stations += (stations.empty() ? "" : ", ") + fact.station;
  ctl::Table table({{"", false}, {"", false}});
  const auto add = [&](const char* name, const std::string& text) {
    table.add({ctl::Cell(name, ctl::Style::kDim), text});
  };
  add("model", status.model() + " (" + status.model_type() + ")");
  add("workers", std::to_string(status.workers()) + ", " + status.instruction_set());
  add("cache", status.cache_dtype());
  add("document", count(prompt.source_bytes) + " bytes of " + source + ", " + count(prompt.made_bytes) +
                      " bytes of made text");
  add("planted", stations + " (seed " + std::to_string(options.seed) + ")");
  context.out << ctl::styled("Three facts in " + count(options.context) + " tokens", ctl::Style::kBold,
                             terminal)
              << "\n"
              << table.text(terminal) << "\n"
              << std::flush;
}

// Tokens of the last turn with its answer: the most that the daemon must take. One token per byte.
size_t longest_turn(const LongPrompt& prompt) {
  size_t tokens = prompt.document.size();
  for (const Fact& fact : prompt.facts) tokens += fact.question().size() + fact.answer.size();
  return tokens;
}

// Refused before the document has been read for minutes.
Result<void> check_room(const LongPrompt& prompt, const wire::StatusReply& status) {
  const size_t needed = longest_turn(prompt);
  if (needed <= status.max_context()) return {};
  return error(ErrorCode::kTooLarge,
               "the document with three questions and answers has " + count(needed) +
                   " tokens; the daemon takes up to " + count(status.max_context()) + " (its --max-context)",
               "--context");
}

// What all turns ask alike.
wire::GenerateRequest common_request(const DemoOptions& options, const ctl::Arguments& arguments) {
  wire::GenerateRequest request;
  request.set_prefill(arguments.prefill);
  request.set_decode(arguments.decode);
  request.set_index(arguments.index);
  request.set_cache_salt(options.cache_salt);
  request.set_speculative(arguments.speculative);
  request.set_draft_tokens(arguments.draft_tokens);
  return request;
}

// `accepted` is called when the daemon has taken the request: until then it may refuse it.
Result<Turn> ask_for(const Fact& fact, const wire::GenerateRequest& request,
                     const std::function<void(const wire::Accepted&)>& accepted, client::Client& client,
                     ctl::Context& context) {
  const bool people = !context.arguments.json();
  Turn turn;
  turn.fact = fact;
  ProgressBar bar(context.err, context.terminal);
  client::StreamHandlers handlers;
  handlers.accepted = [&](const wire::Accepted& reply) {
    accepted(reply);
    bar.start();
  };
  handlers.progress = [&](const wire::PrefillProgress& progress) {
    bar.show(progress.done(), progress.total());
  };
  handlers.token = [&](const wire::TokenEvent& token) {
    bar.clear();
    if (people && token.index() == 0) context.out << "      " << fact.stem;
    if (people) context.out << ctl::styled(token.text(), ctl::Style::kBold, context.terminal) << std::flush;
    turn.answered += token.text();
  };
  bool interrupted = false;
  handlers.interrupted = [&] { interrupted = true; };
  const Time begin = monotonic_now();
  auto finished = client.generate(request, handlers, ctl::timeout_of(context.arguments, client::kForever));
  turn.wall_ns = static_cast<uint64_t>((monotonic_now() - begin).count());
  bar.clear();
  if (people && !turn.answered.empty()) context.out << "\n" << std::flush;
  if (!finished) return std::move(finished).error();
  turn.finished = std::move(*finished);
  turn.answered += turn.finished.text();
  TRY_VOID(client::outcome_of(turn.finished, interrupted));
  return turn;
}

}  // namespace

Result<bool> run_demo(const DemoOptions& options, ctl::Context& context) {
  TRY(const Source source, source_text(options));
  const PromptOptions prompt_options{options.context, options.seed, source.text};
  TRY(const LongPrompt prompt, build_prompt(prompt_options));
  wire::ControlRequest status_request;
  status_request.mutable_status();
  TRY(const auto status, ctl::ask(context, std::move(status_request)));
  TRY_VOID(check_room(prompt, status.status()));
  TRY(auto client, ctl::connect_client(context));

  Report report{options.context,      prompt.document.size(), options.seed,
                source.skipped_files, status.status(),        {}};
  wire::GenerateRequest request = common_request(options, context.arguments);
  std::string conversation = prompt.document;
  for (size_t i = 0; i < prompt.facts.size(); ++i) {
    const Fact& fact = prompt.facts[i];
    conversation += fact.question();
    const auto accepted = [&](const wire::Accepted& reply) {
      if (context.arguments.json()) return;
      if (i == 0) introduce(options, source.skipped_files, prompt, status.status(), context);
      context.out << "[" << i + 1 << "/" << prompt.facts.size() << "] " << count(reply.prompt_tokens())
                  << " tokens\n"
                  << std::flush;
    };
    request.set_text(conversation);
    request.set_max_tokens(static_cast<uint32_t>(fact.answer.size()));  // one token per byte
    TRY(Turn turn, ask_for(fact, request, accepted, client, context));
    turn.planted_at = static_cast<double>(fact.offset) / static_cast<double>(prompt.document.size());
    conversation += turn.answered;
    report.turns.push_back(std::move(turn));
  }
  if (context.arguments.json()) {
    context.out << ctl::dump(ctl::document("demo", report_json(report))) << std::endl;
  } else {
    context.out << report_text(report, context.terminal) << std::flush;
  }
  return report.faults().empty();
}

}  // namespace weft::demo
