#include "tools/ctl/command.h"

#include "tools/ctl/plans.h"
#include "tools/ctl/run.h"

namespace weft::ctl {
namespace {

using A = Arguments;

Option decode_option(const std::string& help) {
  return {"--decode", "GROUPING", help, &A::decode, Check::kGrouping};
}
Option prefill_option(const std::string& help) {
  return {"--prefill", "SPLIT",        help,
          &A::prefill, Check::kChoice, {"none", "zigzag", "interleave", "contiguous"}};
}
Option index_option(const std::string& help) { return {"--index", "MODE", help, &A::index, Check::kIndex}; }

Option mechanisms_option() {
  return {
      "--mechanisms", "LIST",
      "how ranks exchange what a step needs, as query=replicated,partials=tree; what is not named stays. "
      "query: gathered, replicated; partials: all-to-all, tree; of split prompts, context: auto, pass-kv, "
      "pass-q; fetch: view, copies; form: absorbed, expanded (other bits; fixed once it runs)",
      &A::mechanisms};
}

std::vector<Option> watch_options() {
  return {{"-w,--watch", "", "show it again and again until Ctrl-C", &A::watch},
          {"--interval", "SECONDS", "time between two looks, default 1", &A::interval_s}};
}

Command status() {
  Command command{
      "status",
      "the daemon, its pools and its counters",
      "Shows the daemon's state (starting, loading, ready, recovering, stopping), its model, its "
      "default groupings, what it has served, the cache pages of each rank, and the bytes that have "
      "crossed between ranks by kind.",
      watch_options(),
      {"weftctl status", "weftctl status --wait --timeout 60", "weftctl status -o json"},
      run_status};
  command.options.push_back(
      {"--wait", "", "wait until the daemon is ready, showing how far it is", &A::wait});
  return command;
}

Command generate() {
  return {
      "generate",
      "send a prompt and stream the answer",
      "The prompt is the argument, or the content of --file, or the standard input, or the token ids of "
      "--tokens. The answer goes to the standard output as it is made. Ctrl-C cancels the request and shows "
      "what there was; a second Ctrl-C leaves at once.",
      {{"PROMPT", "", "the prompt", &A::prompt},
       {"--file", "PATH", "read the prompt from a file; - is the standard input", &A::file},
       {"--tokens", "IDS", "the prompt as token ids: 1,2,3", &A::tokens},
       {"--model", "NAME", "the model; default: the only one", &A::model},
       {"-n,--max-tokens", "N", "tokens to generate at most, default 16", &A::max_tokens},
       {"--temperature", "T", "0 (default) takes the likeliest token", &A::temperature},
       {"--top-k", "K", "sample among the K likeliest; 0: all", &A::top_k},
       {"--top-p", "P", "sample among the likeliest that make up probability P", &A::top_p},
       {"--seed", "S", "the draw's seed, default 0; equal seeds give equal tokens", &A::seed},
       {"--ignore-eos", "", "go on after an end-of-text token", &A::ignore_eos},
       {"--stop-tokens", "IDS", "also stop at these token ids", &A::stop_tokens},
       prefill_option("split of the prompt: none, zigzag, interleave, contiguous"),
       decode_option("grouping while decoding: tp, dp, dcp(4); in groups of 4 ranks: dp(4)xdcp(2), dp(4)xtp"),
       index_option("index keys: copied, copied(4) (scored in 4 parts), split, split(4)"),
       mechanisms_option(),
       {"--digest", "",
        "print the SHA-256 over the digests of the logits of all positions computed (not of a prefix hit)",
        &A::digest},
       {"--speculative",
        "SOURCE",
        "where drafts of the next tokens come from: off, lookup, mtp; the answer is the same",
        &A::speculative,
        Check::kChoice,
        {"off", "lookup", "mtp"}},
       {"--draft-tokens", "K", "drafts in one step at most, 1 to 16; default: the daemon's",
        &A::draft_tokens},
       {"--priority", "N", "smaller is more urgent, -1000 to 1000, default 0: who is let in and read first",
        &A::priority},
       {"--deadline", "SECONDS", "end with an error (exit code 6) if it is not done by then", &A::deadline_s},
       {"--parent", "REQUEST",
        "go on from the prompt and answer of this ended request (of the same salt); only what comes behind "
        "is "
        "sent and read",
        &A::parent},
       {"--context",
        "PLACE",
        "where the entries of its cache lie: device; host, the host pool, from where each row reads those "
        "that "
        "it selects (models with an indexer only); auto (default): on the host if they do not fit the "
        "devices",
        &A::context,
        Check::kChoice,
        {"auto", "device", "host"}},
       {"--no-prefix-cache", "", "compute the whole prompt", &A::no_prefix_cache},
       {"--cache-salt", "TEXT", "share cached prefixes only with requests of the same salt", &A::cache_salt},
       {"--credit", "N", "let the daemon be at most N tokens ahead; 0: its own limit", &A::credit},
       {"--stats", "", "say at the end what it took, on the standard error", &A::stats}},
      {"weftctl generate 'The licence grants'", "weftctl generate --file report.txt -n 64 --decode dcp4",
       "weftctl generate --tokens 1,2,3 --digest -o json"},
      run_generate};
}

Command requests() {
  Command command{
      "requests",
      "running and waiting requests",
      "Lists the requests that run or wait; --all adds the last finished ones. A request is waiting (for "
      "room), in "
      "prefill, in decode, or paused while its client does not take what there is; then finished (stop, "
      "length), cancelled or failed: weftctl explain says why.",
      watch_options(),
      {"weftctl requests --all", "weftctl requests -w"},
      run_requests};
  command.options.push_back({"--all", "", "also the last finished requests", &A::all});
  return command;
}

Command explain() {
  return {
      "explain",
      "what one request cost, and would cost in other groupings",
      "Shows a request's phases (one line for each grouping that it decoded under), the bytes it stores on "
      "each rank, the bytes that crossed for it by kind, and for every decode grouping it could have: bytes "
      "stored by the fullest rank, bytes that cross per step, what its latest step took under that grouping "
      "(-: it never decoded so), and, while it runs, what the change would move now. Then what the "
      "prompt's last chunk and a decode step would move with each way of exchanging, under the grouping it "
      "has; ≤ where the entries that rows will select decide. Kinds of bytes: entries and index keys of the "
      "cache, "
      "queries and partials of attention over a split cache, candidates (scores offered by the ranks of a "
      "split "
      "index), rows (activations, sums and logits), regroup (copies of pages), host. The first "
      "token of an answer comes from prefill; decode counts the others.",
      {{"ID", "", "the request", &A::request, Check::kNone, {}, true}},
      {"weftctl explain 7"},
      run_explain};
}

Command regroup() {
  return {
      "regroup",
      "change the grouping of running requests or of the defaults",
      "Running requests change between two steps: the reply says what the change will move and drop, and it "
      "happens with the request's next step (not at all, if the request ends before, or another change "
      "follows first). weftctl explain says what has moved. Going from copies to parts drops pages and "
      "moves nothing; going back copies what is missing. Name requests, or --all, or --defaults, and at "
      "least one of --prefill, --decode, --index, --mechanisms.",
      {{"ID", "", "the requests", &A::requests},
       {"--all", "", "every running request", &A::all},
       {"--defaults", "", "what requests get that do not say", &A::defaults},
       prefill_option("split of prompts: none, zigzag, interleave, contiguous"),
       decode_option("grouping while decoding: tp, dp, dcp(4); in groups of 4 ranks: dp(4)xdcp(2), dp(4)xtp"),
       index_option("index keys: copied, copied(4) (scored in 4 parts), split, split(4)"),
       mechanisms_option(),
       {"--dry-run", "", "only say what would be moved and dropped, and what the defaults would be",
        &A::dry_run}},
      {"weftctl regroup 7 --decode dcp4", "weftctl regroup --all --decode tp --dry-run",
       "weftctl regroup --defaults --decode dcp2 --index split"},
      run_regroup};
}

Command cancel() {
  return {"cancel",
          "end requests",
          "Their streams finish with the reason \"cancelled\" and their cache pages are free again.",
          {{"ID", "", "the requests", &A::requests, Check::kNone, {}, true}},
          {"weftctl cancel 7 8"},
          run_cancel};
}

Command pin() {
  return {
      "pin",
      "keep a request's context in the prefix cache",
      "The whole blocks of its prompt and answer that are there now stay, whatever pressure comes, until "
      "they are unpinned: on the ranks, and where only the host pool has them, there. The request may run or "
      "have ended. Pinned blocks take room from others.",
      {{"ID", "", "the requests", &A::requests, Check::kNone, {}, true}},
      {"weftctl pin 7"},
      run_pin};
}

Command unpin() {
  return {"unpin",
          "let pinned contexts be evicted again",
          "Takes the numbers of pins, as weftctl pins shows them.",
          {{"PIN", "", "the pins", &A::requests, Check::kNone, {}, true}},
          {"weftctl unpin 1"},
          run_unpin};
}

Command pins() {
  return {"pins", "the pinned contexts", "One line for each pin.", {}, {"weftctl pins"}, run_pins};
}

Command workers() {
  return {
      "workers",
      "the worker processes",
      "Without an action, one line per rank: state, process, restarts, how the last one ended, and where "
      "its time went. weftctl workers add brings a worker in while requests run: a new process on a device, "
      "or, with --rank, one that was drained or removed before. weftctl workers remove drains a worker and "
      "ends its process. Requests go on with the same bits; what a grouping needs elsewhere is moved first, "
      "and where there is no room for it, nothing changes.",
      {{"ACTION", "", "add or remove; nothing: show them", &A::action, Check::kChoice, {"add", "remove"}},
       {"WHAT", "", "to add: a device (cpu, cpu:0-3); to remove: a rank", &A::what},
       {"--rank", "RANK", "to add: the drained or removed rank that comes back", &A::drained_rank}},
      {"weftctl workers", "weftctl workers add cpu:4-7", "weftctl workers add --rank 3",
       "weftctl workers remove 3"},
      run_workers};
}

Command drain() {
  return {
      "drain",
      "move everything off a worker and run on without it",
      "The cache pages of running requests and of the prefix cache that lie on this rank alone move to the "
      "others, then steps run without it. Its process and its memory stay; weftctl workers add --rank brings "
      "it back. Nothing changes, and the reason is told, where the others have no room, or where it is the "
      "last one.",
      {{"RANK", "", "the worker", &A::rank, Check::kNone, {}, true}},
      {"weftctl drain 3"},
      run_drain};
}

Command history() {
  return {
      "history",
      "what changed the daemon's course",
      "Commands, workers that came and went, and recoveries, the newest last, each with its outcome and the "
      "epoch it was done in. Earlier runs of the daemon on the same state folder count.",
      {{"--limit", "LINES", "how many, default 100", &A::limit}},
      {"weftctl history", "weftctl history --limit 5"},
      run_history};
}

Command version() {
  return {"version",
          "versions of weftctl, the daemon and their protocols",
          "Prints weftctl's own version also when the daemon is unreachable (and then exits with 69).",
          {},
          {"weftctl version"},
          run_version};
}

Command record() {
  return {
      "record",
      "start or stop writing every plan to a file",
      "A recording lies in the daemon's state folder, readable by its owner alone (it holds the tokens of "
      "prompts). It has every step that the daemon planned; weftctl plans shows it.",
      {{"ON_OR_OFF", "", "on or off", &A::on_or_off, Check::kChoice, {"on", "off"}, true}},
      {"weftctl record on"},
      run_record};
}

Command plans() {
  return {
      "plans",
      "show a recording",
      "One line per step of a file that weftctl record made: rows of prompts and of answers, page copies, "
      "and which request ran under which grouping. Equal decode steps that follow each other are one line. "
      "With -o json, every plan whole (proto/worker.proto). Needs no daemon.",
      {{"FILE", "", "the recording", &A::file, Check::kNone, {}, true},
       {"--all", "", "a line for every step", &A::all}},
      {"weftctl plans ~/.local/state/weft/plans-1718000000000.bin"},
      run_plans};
}

Command stop() {
  return {"stop",
          "stop the daemon and its workers",
          "Streams end with the reason \"cancelled\". Waits until the daemon's process is gone.",
          {{"--no-wait", "", "return as soon as the daemon has agreed", &A::no_wait}},
          {"weftctl stop"},
          run_stop};
}

Command help() {
  return {"help",
          "help on a command, or the whole reference",
          "The reference page docs/weftctl.md is the output of weftctl help --markdown.",
          {{"COMMAND", "", "the command", &A::topic},
           {"--markdown", "", "the whole reference as Markdown", &A::markdown}},
          {"weftctl help regroup"},
          run_help};
}

}  // namespace

const std::vector<Command>& commands() {
  static const std::vector<Command> table = {
      status(),  generate(), requests(), explain(), regroup(), cancel(), pin(),  unpin(), pins(),
      workers(), drain(),    history(),  version(), record(),  plans(),  stop(), help()};
  return table;
}

const std::vector<Option>& global_options() {
  static const std::vector<Option> table = {
      {"-o,--output",
       "FORM",
       "table (default, for people) or json (one document, with a schema number)",
       &A::output,
       Check::kChoice,
       {"table", "json"}},
      {"--state-dir", "FOLDER", "the state folder that the daemon was started with: finds both sockets",
       &A::state_dir},
      {"--control-socket", "PATH",
       "the daemon's control socket; default: control.sock in the state or run folder", &A::control_socket},
      {"--client", "ENDPOINT",
       "the daemon's client endpoint (ipc://… or tcp://…); default: as the daemon says", &A::client_endpoint},
      {"--timeout", "SECONDS",
       "give up after this long; 0: never. Default 10, 30 for stop, 600 for changes of workers and for "
       "status --wait once the daemon listens, none for generate",
       &A::timeout_s}};
  return table;
}

const Command* find_command(const std::string& name) {
  for (const Command& command : commands()) {
    if (command.name == name) return &command;
  }
  return nullptr;
}

}  // namespace weft::ctl
