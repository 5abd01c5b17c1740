#include "tools/demo/report.h"

#include <algorithm>
#include <cstdio>

#include "proto/vocab/units.h"
#include "tools/ctl/views.h"

namespace weft::demo {
namespace {

using ctl::Cell;
using ctl::Style;
using ctl::Table;

std::string count(uint64_t value) { return human_count(static_cast<int64_t>(value)); }
std::string bytes(uint64_t value) { return human_bytes(static_cast<int64_t>(value)); }

std::string percent(double share) {
  char text[16];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

// " 20586." as a person would say it.
std::string bare(const std::string& answer) {
  const size_t first = answer.find_first_not_of(' ');
  if (first == std::string::npos) return "(nothing)";
  const size_t last = answer.find_last_not_of(" .");
  return last == std::string::npos ? answer : answer.substr(first, last - first + 1);
}

// The first token of an answer comes out of the last prefill step.
uint64_t decoded_tokens(const wire::Usage& usage) {
  return usage.completion_tokens() > 0 ? usage.completion_tokens() - 1 : 0;
}

std::string answers_table(const Report& report, const ctl::Terminal& terminal) {
  Table table({{"station"}, {"planted at", true}, {"passkey", true}, {"answered", true}, {""}});
  for (const Turn& turn : report.turns) {
    table.add({turn.fact.station, percent(turn.planted_at), bare(turn.fact.answer), bare(turn.answered),
               turn.right() ? Cell("right", Style::kGood) : Cell("WRONG", Style::kBad)});
  }
  return table.text(terminal);
}

std::string phases_table(const Report& report, const ctl::Terminal& terminal) {
  Table table({{"turn", true},
               {"phase"},
               {"grouping"},
               {"tokens", true},
               {"from cache", true},
               {"steps", true},
               {"time", true},
               {"tokens/s", true}});
  for (size_t i = 0; i < report.turns.size(); ++i) {
    const auto& usage = report.turns[i].finished.usage();
    const auto& trace = report.turns[i].finished.trace();
    table.add({std::to_string(i + 1), "prefill", ctl::prefill_text(trace), count(usage.computed_tokens()),
               count(usage.cached_tokens()), count(trace.prefill_steps()),
               ctl::human_time(trace.prefill_ns()),
               ctl::human_rate(usage.computed_tokens(), trace.prefill_ns())});
    for (const wire::DecodeTrace& decode : trace.decodes()) {
      table.add({"", "decode", ctl::decode_text(decode), count(decode.tokens()), "", count(decode.steps()),
                 ctl::human_time(decode.time_ns()), ctl::human_rate(decode.tokens(), decode.time_ns())});
    }
  }
  return table.text(terminal) + ctl::kFirstTokenNote;
}

// Bytes of the first turn's entries if they are stored once. What the last token adds is never stored.
uint64_t one_copy(const Report& report) {
  const auto& usage = report.turns.front().finished.usage();
  const auto block = static_cast<int64_t>(report.status.block_tokens());
  if (block == 0 || report.status.pools().empty()) return 0;
  const auto tokens = static_cast<int64_t>(usage.prompt_tokens() + decoded_tokens(usage));
  return static_cast<uint64_t>(ceil_div(tokens, block)) * report.status.pools(0).entries().page_bytes();
}

std::string stored_table(const Report& report, const ctl::Terminal& terminal) {
  const uint64_t whole = one_copy(report);
  Table table(
      {{"rank", true}, {"entries", true}, {"of one copy", true}, {"index keys", true}, {"together", true}});
  for (const auto& rank : report.turns.front().finished.trace().stored()) {
    const double share = static_cast<double>(rank.entries()) / static_cast<double>(whole);
    table.add({std::to_string(rank.rank()), bytes(rank.entries()), whole == 0 ? "-" : percent(share),
               bytes(rank.index_keys()), bytes(rank.entries() + rank.index_keys())});
  }
  return table.text(terminal) +
         (whole == 0 ? "" : "One copy of all tokens' entries has " + bytes(whole) + ".\n");
}

void add_to(std::vector<uint64_t>& sums, const wire::Crossed& crossed) {
  const auto kinds = ctl::crossed_kinds(crossed);
  sums.resize(kinds.size());
  for (size_t k = 0; k < kinds.size(); ++k) sums[k] += kinds[k].bytes;
}

std::string crossed_table(const Report& report, const ctl::Terminal& terminal) {
  std::vector<uint64_t> first, later, decode;
  for (size_t i = 0; i < report.turns.size(); ++i) {
    add_to(i == 0 ? first : later, report.turns[i].finished.trace().prefill_crossed());
    add_to(decode, report.turns[i].finished.trace().decode_crossed());
  }
  later.resize(first.size());
  Table table({{"kind"}, {"reading the document", true}, {"reading later turns", true}, {"decoding", true}});
  const auto kinds = ctl::crossed_kinds({});
  uint64_t sums[3] = {0, 0, 0};
  for (size_t k = 0; k < kinds.size(); ++k) {
    sums[0] += first[k];
    sums[1] += later[k];
    sums[2] += decode[k];
    if (first[k] + later[k] + decode[k] == 0) continue;
    table.add({kinds[k].name, bytes(first[k]), bytes(later[k]), bytes(decode[k])});
  }
  table.add({Cell("together", Style::kBold), bytes(sums[0]), bytes(sums[1]), bytes(sums[2])});
  return table.text(terminal);
}

std::string cache_sentence(const Report& report) {
  std::string out = "The document was read once. From the prefix cache came";
  for (size_t i = 1; i < report.turns.size(); ++i) {
    const auto& usage = report.turns[i].finished.usage();
    out += (i == 1 ? " " : ", ") + count(usage.cached_tokens()) + " of turn " + std::to_string(i + 1) +
           "'s " + count(usage.prompt_tokens()) + " prompt tokens";
  }
  return out + ".\n";
}

// Of all turns together; empty without drafts.
std::string drafts_sentence(const Report& report) {
  uint64_t drafted = 0, accepted = 0, tokens = 0, steps = 0;
  for (const Turn& turn : report.turns) {
    const wire::Trace& trace = turn.finished.trace();
    drafted += trace.drafted_tokens();
    accepted += trace.accepted_tokens();
    tokens += decoded_tokens(turn.finished.usage());
    steps += trace.decode_steps();
  }
  if (drafted == 0) return "";
  char rate[32];
  std::snprintf(rate, sizeof rate, "%.2f", static_cast<double>(tokens) / static_cast<double>(steps));
  return "Of the drafts (" + report.turns.front().finished.trace().speculative() + ") " +
         ctl::drafts_text(drafted, accepted) + ": " + rate + " tokens a step.\n";
}

std::string switch_sentence(const Report& report, const ctl::Terminal& terminal) {
  const uint64_t moved = report.switch_bytes();
  return "Moved at the switch from prefill to decode: " +
         ctl::styled(bytes(moved), moved == 0 ? Style::kGood : Style::kBad, terminal) +
         (moved == 0 ? ", as it must be.\n" : "; it must be 0.\n");
}

}  // namespace

uint64_t Report::switch_bytes() const {
  uint64_t moved = 0;
  for (const Turn& turn : turns) moved += turn.finished.trace().switch_bytes();
  return moved;
}

uint64_t Report::cacheable_tokens() const {
  const uint64_t block = std::max<uint64_t>(1, status.block_tokens());
  return document_tokens / block * block;
}

bool Report::document_reused() const {
  return std::all_of(turns.begin() + 1, turns.end(), [this](const Turn& turn) {
    return turn.finished.usage().cached_tokens() >= cacheable_tokens();
  });
}

std::vector<std::string> Report::faults() const {
  std::vector<std::string> out;
  for (const Turn& turn : turns) {
    if (turn.right()) continue;
    out.push_back("station " + turn.fact.station + ": answered \"" + turn.answered + "\" instead of \"" +
                  turn.fact.answer + "\"");
  }
  if (switch_bytes() != 0)
    out.push_back(bytes(switch_bytes()) + " moved at the switch from prefill to decode");
  const uint64_t prompt = turns.front().finished.usage().prompt_tokens();
  if (prompt != context) {
    out.push_back("the first prompt had " + count(prompt) + " tokens instead of " + count(context) +
                  ": the demo is for a model of one token per byte");
  } else if (!document_reused()) {
    out.push_back("a later turn did not take the document from the prefix cache");
  }
  return out;
}

std::string report_text(const Report& report, const ctl::Terminal& terminal) {
  const auto heading = [&](const char* text) {
    return "\n" + ctl::styled(text, Style::kBold, terminal) + "\n";
  };
  std::string out = heading("Answers") + answers_table(report, terminal);
  out += heading("Phases") + phases_table(report, terminal);
  out += heading("Cache stored per rank, at the end of turn 1") + stored_table(report, terminal);
  out += heading("Bytes that crossed between ranks") + crossed_table(report, terminal);
  out += "\n" + switch_sentence(report, terminal);
  out += drafts_sentence(report);
  if (report.document_reused()) out += cache_sentence(report);
  const auto faults = report.faults();
  for (const std::string& fault : faults) out += ctl::styled("FAULT: ", Style::kBad, terminal) + fault + "\n";
  if (faults.empty()) {
    out += ctl::styled("All " + std::to_string(report.turns.size()) + " answers are right.", Style::kGood,
                       terminal) +
           "\n";
  }
  return out;
}

ctl::Json report_json(const Report& report) {
  ctl::Json turns = ctl::Json::array();
  for (const Turn& turn : report.turns) {
    turns.push_back({{"station", turn.fact.station},
                     {"planted_at", turn.planted_at},
                     {"expected", turn.fact.answer},
                     {"answered", turn.answered},
                     {"right", turn.right()},
                     {"wall_ns", turn.wall_ns},
                     {"request", turn.finished.request()},
                     {"reason", turn.finished.reason()},
                     {"usage", ctl::to_json(turn.finished.usage())},
                     {"trace", ctl::to_json(turn.finished.trace())}});
  }
  return {{"context", report.context},
          {"document_tokens", report.document_tokens},
          {"seed", report.seed},
          {"skipped_files", report.skipped_files},
          {"model", report.status.model()},
          {"workers", report.status.workers()},
          {"cache_dtype", report.status.cache_dtype()},
          {"turns", turns},
          {"switch_bytes", report.switch_bytes()},
          {"document_reused", report.document_reused()},
          {"faults", report.faults()},
          {"ok", report.faults().empty()}};
}

}  // namespace weft::demo
