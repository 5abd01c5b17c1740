#include "tools/ctl/views.h"

#include <algorithm>

#include "proto/vocab/units.h"

namespace weft::ctl {
namespace {

std::string count(uint64_t value) { return human_count(static_cast<int64_t>(value)); }
std::string bytes(uint64_t value) { return human_bytes(static_cast<int64_t>(value)); }

// "heading" over a block of text, which is left out when empty.
std::string section(const std::string& heading, const std::string& body, const Terminal& terminal) {
  return body.empty() ? "" : "\n" + styled(heading, Style::kBold, terminal) + "\n" + body;
}

std::string facts(const std::vector<std::pair<std::string, Cell>>& rows, const Terminal& terminal) {
  Table table({{"", false, false}, {"", false, true}});
  for (const auto& [name, value] : rows) {
    if (!value.text.empty()) table.add({Cell(name, Style::kDim), value});
  }
  return table.text(terminal);
}

template <typename Message>
std::string groupings(const Message& of) {
  return "prefill " + of.prefill() + ", decode " + of.decode() + ", index " + of.index() +
         (of.mechanisms().empty() ? "" : ", " + of.mechanisms());
}

std::string drafting(const wire::StatusReply& status) {
  if (status.speculative().empty() || status.speculative() == "off") return "";
  return ", drafts by " + status.speculative() + " (" + std::to_string(status.draft_tokens()) + ")";
}

std::string host_text(const wire::StatusReply& status) {
  if (!status.has_host_pool()) return "";
  const wire::HostPoolStatus& host = status.host_pool();
  std::string text = "written " + host.write() + ", " + bytes(host.spilled_bytes()) + " spilled, " +
                     bytes(host.loaded_bytes()) + " loaded, " + count(host.hit_tokens()) +
                     " tokens of prompts";
  if (host.context_requests() > 0)
    text += ", " + count(host.context_requests()) + " requests with their context there";
  const uint64_t chosen = host.hot_hits() + host.hot_misses();
  if (chosen > 0) text += ", " + hot_text(host.hot_hits(), host.hot_misses());
  return text;
}

std::string pressure_text(const wire::StatusReply& status) {
  if (!status.has_pressure()) return "";
  const wire::PressureStatus& pressure = status.pressure();
  std::string out = pressure.on_pressure();
  if (pressure.thinned() > 0) {
    out += ", " + count(pressure.thinned()) + " thinned (" + count(pressure.thinned_now()) + " now, " +
           count(pressure.thickened()) + " got their copies back)";
  }
  if (pressure.preempted() > 0) out += ", " + count(pressure.preempted()) + " preempted";
  if (pressure.replayed_rows() > 0) out += ", " + count(pressure.replayed_rows()) + " rows computed again";
  return out;
}

std::string pools_text(const wire::StatusReply& status, const Terminal& terminal) {
  if (status.pools().empty()) return "";
  Table table({{"rank", true},
               {"stream"},
               {"pages", true},
               {"used", true},
               {"cached", true},
               {"in flight", true},
               {"free", true},
               {"page", true}});
  const auto add = [&](const std::string& where, const char* name, const wire::StreamPool& stream) {
    if (stream.pages() == 0) return;
    table.add({where, name, count(stream.pages()), count(stream.used()), count(stream.cached()),
               count(stream.in_flight()), count(stream.free()), bytes(stream.page_bytes())});
  };
  for (const auto& pool : status.pools()) {
    add(std::to_string(pool.rank()), "entries", pool.entries());
    add(std::to_string(pool.rank()), "index keys", pool.index_keys());
  }
  add("host", "entries", status.host_pool().entries());
  add("host", "index keys", status.host_pool().index_keys());
  return table.text(terminal);
}

std::string crossed_table(const wire::Crossed& crossed, const Terminal& terminal) {
  if (crossed_total(crossed) == 0) return "";
  Table table({{"", false}, {"", true}});
  for (const CrossedKind& kind : crossed_kinds(crossed)) {
    if (kind.bytes > 0) table.add({Cell(kind.name, Style::kDim), bytes(kind.bytes)});
  }
  return table.text(terminal);
}

std::string loading(const wire::StatusReply& status) {
  if (status.load_total() == 0 || status.load_done() >= status.load_total()) return "";
  return count(status.load_done()) + " of " + count(status.load_total()) + " tensors";
}

std::string model_line(const wire::StatusReply& status) {
  std::string out = status.model();
  if (!status.model_type().empty()) out += " (" + status.model_type() + ")";
  if (status.max_context() > 0) out += ", context up to " + count(status.max_context());
  if (!status.weight_dtype().empty()) {
    const std::string quantised = status.weight_format().empty() ? "" : status.weight_format() + " and ";
    out += ", weights " + quantised + status.weight_dtype() + ", cache " + status.cache_dtype();
    if (!status.index_cache().empty()) out += ", index keys " + status.index_cache();
    if (status.experts() == "split") out += ", experts split";
  }
  return out;
}

std::string stored_text(const google::protobuf::RepeatedPtrField<wire::RankStored>& stored,
                        const Terminal& terminal) {
  if (stored.empty()) return "";
  Table table({{"rank", true}, {"entries", true}, {"index keys", true}});
  for (const auto& rank : stored) {
    table.add({std::to_string(rank.rank()), bytes(rank.entries()), bytes(rank.index_keys())});
  }
  return table.text(terminal);
}

bool has_ended(const std::string& state) {
  return state == "stop" || state == "length" || state == "cancelled" || state == "error";
}

// A request that waits or has ended is in no grouping.
bool any_present(const wire::ExplainReply& reply) {
  return std::any_of(reply.costs().begin(), reply.costs().end(), [](const auto& c) { return c.present(); });
}

// Of the prompt, without what the prefix cache served; so far, while it prefills.
uint64_t prompt_tokens_computed(const wire::RequestStatus& status) {
  const uint64_t done = std::min(status.computed_tokens(), status.prompt_tokens());
  return done > status.cached_tokens() ? done - status.cached_tokens() : 0;
}

// One line for prefill, and one for each grouping that it decoded under.
std::string phases_text(const wire::Trace& trace, uint64_t computed_of_prompt, const Terminal& terminal) {
  Table table({{"phase"},
               {"grouping"},
               {"tokens", true},
               {"steps", true},
               {"time", true},
               {"tokens/s", true},
               {"crossed", false, true}});
  table.add({"prefill", prefill_text(trace), count(computed_of_prompt), count(trace.prefill_steps()),
             human_time(trace.prefill_ns()), human_rate(computed_of_prompt, trace.prefill_ns()),
             crossed_text(trace.prefill_crossed())});
  for (const wire::DecodeTrace& decode : trace.decodes()) {
    table.add({"decode", decode_text(decode), count(decode.tokens()), count(decode.steps()),
               human_time(decode.time_ns()), human_rate(decode.tokens(), decode.time_ns()),
               crossed_text(decode.crossed())});
  }
  return table.text(terminal) + (trace.decodes().empty() ? "" : kFirstTokenNote);
}

std::string times(uint64_t number) { return number == 1 ? "once" : count(number) + " times"; }

std::string regrouped_text(const wire::ExplainReply& reply) {
  const wire::Trace& trace = reply.trace();
  std::string out = trace.regroups() == 0 ? "never" : times(trace.regroups());
  // Without a change: copies of a cached prefix that lay on other ranks.
  if (trace.regroups() > 0 || trace.regroup_bytes() > 0)
    out += ", " + bytes(trace.regroup_bytes()) + " moved";
  if (trace.change_waits()) {
    out += has_ended(reply.status().state()) ? "; it ended before the last change that was asked for"
                                             : "; the last change asked for comes with its next step";
  }
  return out;
}

// What only makes sense while it runs (the mark, what a change would move) is left out otherwise.
std::string costs_text(const wire::ExplainReply& reply, const Terminal& terminal) {
  if (reply.costs().empty()) return "";
  const bool runs = any_present(reply);
  std::vector<Column> columns = {
      {"decode"}, {"index"}, {"stored per rank", true}, {"crossed per step", true}, {"step took", true}};
  if (runs) {
    columns.insert(columns.begin(), Column{""});
    columns.push_back({"a change moves", true});
  }
  Table table(columns);
  for (const auto& cost : reply.costs()) {
    uint64_t most = 0;
    for (const auto& rank : cost.stored()) most = std::max(most, rank.entries() + rank.index_keys());
    const Style style = cost.present() ? Style::kGood : Style::kPlain;
    std::vector<Cell> row = {Cell(cost.decode(), style), cost.index(), bytes(most),
                             bytes(crossed_total(cost.per_step())),
                             cost.step_ns() == 0 ? "-" : human_time(cost.step_ns())};
    if (runs) {
      row.insert(row.begin(), Cell(cost.present() ? "*" : "", style));
      row.push_back(cost.present() ? "-" : bytes(cost.change_bytes()));
    }
    table.add(std::move(row));
  }
  return table.text(terminal);
}

std::string mechanisms_text(const wire::ExplainReply& reply, const Terminal& terminal) {
  if (reply.mechanisms().empty()) return "";
  Table table({{""},
               {"phase"},
               {"mechanism"},
               {"stored per rank", true},
               {"crossed", true},
               {"exchange points", true},
               {"by kind", false, true}});
  for (const auto& line : reply.mechanisms()) {
    const Style style = line.present() ? Style::kGood : Style::kPlain;
    table.add({Cell(line.present() ? "*" : "", style), line.phase(), Cell(line.mechanism(), style),
               bytes(line.stored()), (line.at_most() ? "≤ " : "") + bytes(crossed_total(line.per_step())),
               count(line.exchanges()), crossed_text(line.per_step())});
  }
  return table.text(terminal);
}

}  // namespace

std::string drafts_text(uint64_t drafted, uint64_t accepted) {
  return drafted == 0 ? "" : count(accepted) + " of " + count(drafted) + " held";
}

std::string hot_text(uint64_t hits, uint64_t misses) {
  return hits + misses == 0
             ? ""
             : count(hits) + " of " + count(hits + misses) + " chosen entries in the hot buffer";
}

std::string context_text(const wire::Trace& trace) {
  if (trace.context() != "host") return "";
  const std::string hot = hot_text(trace.hot_hits(), trace.hot_misses());
  return hot.empty() ? "host" : "host, " + hot;
}

std::string drafts_text(const wire::Trace& trace) {
  const std::string text = drafts_text(trace.drafted_tokens(), trace.accepted_tokens());
  return text.empty() ? "" : text + " (" + trace.speculative() + ")";
}

Cell state_cell(const std::string& state) {
  if (state == "ready" || state == "decode" || state == "prefill") return {state, Style::kGood};
  if (state == "stop" || state == "length") return {"finished (" + state + ")", Style::kDim};
  if (state == "cancelled") return {state, Style::kDim};
  if (state == "error") return {"failed", Style::kBad};
  return {state, state == "down" ? Style::kBad : Style::kWarning};
}

std::string prefill_text(const wire::Trace& trace) {
  std::string out;
  for (const std::string& split : trace.prefill_ran()) out += (out.empty() ? "" : ", ") + split;
  return out.empty() ? trace.prefill() : out;
}

std::string decode_text(const wire::DecodeTrace& decode) {
  return decode.decode() + (decode.index() == "copied" ? "" : ", index " + decode.index()) +
         (decode.mechanisms().empty() ? "" : ", " + decode.mechanisms());
}

std::vector<CrossedKind> crossed_kinds(const wire::Crossed& c) {
  return {{"entries", c.entries()},   {"index keys", c.index_keys()}, {"queries", c.queries()},
          {"partials", c.partials()}, {"candidates", c.candidates()}, {"rows", c.rows()},
          {"host", c.host()},         {"regroup", c.regroup()}};
}

uint64_t crossed_total(const wire::Crossed& crossed) {
  uint64_t total = 0;
  for (const CrossedKind& kind : crossed_kinds(crossed)) total += kind.bytes;
  return total;
}

std::string crossed_text(const wire::Crossed& crossed) {
  std::string out;
  for (const CrossedKind& kind : crossed_kinds(crossed)) {
    if (kind.bytes > 0) out += (out.empty() ? "" : ", ") + std::string(kind.name) + " " + bytes(kind.bytes);
  }
  return out.empty() ? "nothing" : out;
}

std::string status_view(const wire::StatusReply& status, const Terminal& terminal) {
  const std::string pinned =
      (status.pinned_blocks() == 0 ? "" : ", " + count(status.pinned_blocks()) + " are pinned") +
      (status.pinned_host_blocks() == 0
           ? ""
           : ", " + count(status.pinned_host_blocks()) + " on the host are pinned");
  std::string workers = std::to_string(status.workers()) + ", epoch " + std::to_string(status.epoch());
  if (status.worker_restarts() > 0) workers += ", " + count(status.worker_restarts()) + " restarts";
  if (!status.instruction_set().empty()) workers += ", " + status.instruction_set();
  std::string out = facts(
      {{"state", state_cell(status.state())},
       {"because", Cell(status.trouble(), Style::kBad)},
       {"loading", loading(status)},
       {"model", model_line(status)},
       {"workers", workers},
       {"up", human_time(status.uptime_ns())},
       {"defaults", groupings(status) + drafting(status)},
       {"requests", count(status.running()) + " running, " + count(status.waiting()) + " waiting, " +
                        count(status.finished()) + " finished, " + count(status.cancelled()) +
                        " cancelled, " + count(status.failed()) + " failed"},
       {"tokens", count(status.computed_prompt_tokens()) + " of prompts computed, " +
                      count(status.cached_tokens()) + " from the prefix cache, " +
                      count(status.generated_tokens()) + " generated"},
       {"eviction", status.eviction().empty() ? ""
                                              : status.eviction() + ", " + count(status.evicted_blocks()) +
                                                    " blocks so far" + pinned},
       {"drafts", drafts_text(status.drafted_tokens(), status.accepted_tokens())},
       {"steps", count(status.steps())},
       {"block", std::to_string(status.block_tokens()) + " tokens"},
       {"pool", status.pool_tokens() > 0 ? count(status.pool_tokens()) + " tokens per rank" : ""},
       {"host pool", host_text(status)},
       {"on pressure", pressure_text(status)},
       {"clients", status.client_endpoint()},
       {"state folder", status.state_folder()}},
      terminal);
  out += section("Cache pages", pools_text(status, terminal), terminal);
  out += section("Crossed between ranks", crossed_table(status.crossed(), terminal), terminal);
  return out;
}

std::string requests_view(const wire::RequestsReply& reply, const Terminal& terminal) {
  if (reply.requests().empty()) return "no requests\n";
  Table table({{"id", true},
               {"state"},
               {"prompt", true},
               {"cached", true},
               {"computed", true},
               {"generated", true},
               {"prefill"},
               {"decode"},
               {"index"},
               {"priority", true},
               {"age", true}});
  for (const auto& request : reply.requests()) {
    const std::string now = request.thinned() ? " (now " + request.placement() + ")" : "";
    table.add({std::to_string(request.request()), state_cell(request.state()), count(request.prompt_tokens()),
               count(request.cached_tokens()), count(request.computed_tokens()),
               count(request.completion_tokens()) + "/" + count(request.max_tokens()), request.prefill(),
               request.decode() + now, request.index(), std::to_string(request.priority()),
               human_time(request.age_ns())});
  }
  return table.text(terminal);
}

std::string workers_view(const wire::WorkersReply& reply, const Terminal& terminal) {
  Table table({{"rank", true},
               {"state"},
               {"pid", true},
               {"device"},
               {"up", true},
               {"steps", true},
               {"computing", true},
               {"waiting", true},
               {"restarts", true},
               {"last exit", false, true}});
  for (const auto& worker : reply.workers()) {
    table.add({std::to_string(worker.rank()), state_cell(worker.state()),
               worker.pid() == 0 ? "-" : std::to_string(worker.pid()), worker.device(),
               human_time(worker.uptime_ns()), count(worker.steps()), human_time(worker.compute_ns()),
               human_time(worker.wait_ns()), count(worker.restarts()),
               worker.last_exit().empty() ? "-" : worker.last_exit()});
  }
  return table.text(terminal);
}

std::string pins_view(const wire::PinsReply& reply, const Terminal& terminal) {
  if (reply.pins().empty()) return "nothing is pinned\n";
  Table table({{"pin", true}, {"request", true}, {"tokens", true}, {"on the host", true}, {"age", true}});
  for (const auto& pin : reply.pins()) {
    table.add({std::to_string(pin.pin()), std::to_string(pin.request()), count(pin.tokens()),
               count(pin.host_tokens()), human_time(pin.age_ns())});
  }
  return table.text(terminal);
}

std::string topology_view(const wire::TopologyReply& reply) {
  std::string ranks;
  for (const uint32_t rank : reply.active()) ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
  std::string out = "epoch " + std::to_string(reply.epoch()) + ": ranks " + ranks + " compute; moved " +
                    bytes(reply.bytes_moved()) + " of " + count(reply.sequences_moved()) + " requests";
  if (reply.blocks_dropped() > 0) out += ", dropped " + count(reply.blocks_dropped()) + " cached blocks";
  return out + "\n";
}

std::string history_view(const wire::HistoryReply& reply, const Terminal& terminal) {
  Table table({{"time"}, {"epoch", true}, {"what"}, {"outcome", false, true}});
  for (const auto& line : reply.lines()) {
    table.add(
        {line.time(), line.epoch() == 0 ? "-" : std::to_string(line.epoch()), line.what(), line.outcome()});
  }
  return table.text(terminal);
}

std::string explain_view(const wire::ExplainReply& reply, const Terminal& terminal) {
  const auto& status = reply.status();
  const auto& trace = reply.trace();
  const std::string moved_at_switch = bytes(trace.switch_bytes()) +
                                      " moved between the last prefill and the first decode step, " +
                                      human_time(trace.switch_gap_ns()) + " apart";
  std::string out =
      facts({{"request", std::to_string(status.request())},
             {"state", state_cell(status.state())},
             {"error", status.error()},
             {"prompt", count(status.prompt_tokens()) + " tokens, " + count(status.cached_tokens()) +
                            " from the prefix cache"},
             {"generated", count(status.completion_tokens()) + " of at most " + count(status.max_tokens())},
             {"asked for", groupings(status)},
             {"context", context_text(trace)},
             {"drafts", drafts_text(trace)},
             {"queued", human_time(trace.queued_ns())},
             {"switch", trace.decode_steps() > 0 ? moved_at_switch : ""},
             {"regrouped", regrouped_text(reply)}},
            terminal);
  out += section("Phases", phases_text(trace, prompt_tokens_computed(status), terminal), terminal);
  out += section("Stored", stored_text(trace.stored(), terminal), terminal);
  const char* heading = any_present(reply)          ? "Groupings it could have (* now)"
                        : has_ended(status.state()) ? "Groupings it could have had"
                                                    : "Groupings it could have";
  out += section(heading, costs_text(reply, terminal), terminal);
  out += section("Ways to exchange: of the prompt's last chunk, of a decode step (* as asked)",
                 mechanisms_text(reply, terminal), terminal);
  return out;
}

std::string stats_view(const wire::Finished& finished, const Terminal& terminal) {
  const wire::Usage& usage = finished.usage();
  return "request " + std::to_string(finished.request()) + ", " + state_cell(finished.reason()).text + ": " +
         count(usage.prompt_tokens()) + " prompt tokens, " + count(usage.cached_tokens()) +
         " from the prefix cache, " + count(usage.completion_tokens()) + " generated\n" +
         phases_text(finished.trace(), usage.computed_tokens(), terminal) +
         (finished.trace().drafted_tokens() == 0 ? "" : "drafts: " + drafts_text(finished.trace()) + "\n") +
         (context_text(finished.trace()).empty() ? "" : "context: " + context_text(finished.trace()) + "\n");
}

std::string regroup_view(const wire::RegroupReply& reply, bool defaults, bool dry_run,
                         const Terminal& terminal) {
  std::string out;
  Table table({{"id", true},
               {"before"},
               {"after"},
               {dry_run ? "would move" : "will move", true},
               {dry_run ? "would drop" : "will drop", true}});
  bool any = false;
  for (const auto& outcome : reply.outcomes()) {
    if (outcome.has_error()) continue;
    any = true;
    table.add({std::to_string(outcome.request()), outcome.before(), outcome.after(),
               bytes(outcome.bytes_moved()), count(outcome.pages_dropped()) + " pages"});
  }
  if (any) out += table.text(terminal);
  if (any && !dry_run) out += "Each changes with its next step; weftctl explain ID says what has moved.\n";
  if (defaults) {
    out += std::string(dry_run ? "defaults would be: " : "defaults: ") + groupings(reply) + "\n";
  }
  return out.empty() && reply.outcomes().empty() ? "nothing to regroup\n" : out;
}

}  // namespace weft::ctl
