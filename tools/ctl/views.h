// Replies of the daemon as text for people. Pure: the same reply and terminal give the same text.
#pragma once

#include <string>

#include "proto/control.pb.h"
#include "tools/ctl/context.h"
#include "tools/ctl/table.h"

namespace weft::ctl {

std::string status_view(const wire::StatusReply& status, const Terminal& terminal);
std::string requests_view(const wire::RequestsReply& reply, const Terminal& terminal);
std::string pins_view(const wire::PinsReply& reply, const Terminal& terminal);
std::string topology_view(const wire::TopologyReply& reply);
std::string history_view(const wire::HistoryReply& reply, const Terminal& terminal);
std::string workers_view(const wire::WorkersReply& reply, const Terminal& terminal);
std::string explain_view(const wire::ExplainReply& reply, const Terminal& terminal);
// What generate --stats says of a request that has ended.
std::string stats_view(const wire::Finished& finished, const Terminal& terminal);
// Outcomes that are errors are left out: they are told as errors. The defaults are shown where they were
// asked for.
std::string regroup_view(const wire::RegroupReply& reply, bool defaults, bool dry_run,
                         const Terminal& terminal);

// A state for people, in its colour: "decode", "finished (length)", "failed".
Cell state_cell(const std::string& state);

// Of a request: what read its prompt ("zigzag, none"), and how an answer's tokens were decoded ("dcp(4)",
// "tp, index split").
std::string prefill_text(const wire::Trace& trace);
std::string decode_text(const wire::DecodeTrace& decode);
// "12 of 40 chosen entries in the hot buffer"; empty where none were chosen. "host, …"; empty where the
// context lies on devices.
std::string hot_text(uint64_t hits, uint64_t misses);
std::string context_text(const wire::Trace& trace);
// "12 of 40 held", and "… (lookup)"; empty where there were no drafts.
std::string drafts_text(uint64_t drafted, uint64_t accepted);
std::string drafts_text(const wire::Trace& trace);
// What the figures of decoding leave out; a line.
inline constexpr char kFirstTokenNote[] =
    "The first token of an answer comes from prefill; decode counts the others.\n";

struct CrossedKind {
  const char* name;
  uint64_t bytes;
};
// All kinds, in the order of the message.
std::vector<CrossedKind> crossed_kinds(const wire::Crossed& crossed);
uint64_t crossed_total(const wire::Crossed& crossed);
// "rows 1.2 MiB, partials 48.0 KiB": the kinds that are not zero; "nothing".
std::string crossed_text(const wire::Crossed& crossed);

}  // namespace weft::ctl
