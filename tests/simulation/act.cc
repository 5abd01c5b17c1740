#include "tests/simulation/act.h"

#include <fstream>
#include <ostream>

namespace weft::simulation {
namespace {

constexpr std::array<const char*, kActKinds> kNames = {
    "arrive",      "cancel",       "pause",   "resume",  "regroup",     "price",      "pin",       "unpin",
    "deadline",    "plan",         "publish", "collect", "deliver",     "reorder",    "duplicate", "late",
    "drain",       "join",         "wait",    "work",    "rush",        "load",       "abort",     "reap",
    "stop-worker", "start-worker", "kill",    "stall",   "spawn-fails", "lose-memory"};

}  // namespace

const char* act_name(ActKind kind) { return kNames[static_cast<size_t>(kind)]; }

void write(std::ostream& out, const Script& script) {
  out << "seed " << script.seed << "\n";
  for (const Act& act : script.acts) out << act_name(act.kind) << " " << act.draw << "\n";
}

Result<Script> read_script(const std::string& path) {
  std::ifstream in(path);
  if (!in) return error(ErrorCode::kNotFound, "cannot read '" + path + "'");
  Script script;
  std::string word;
  for (int64_t line = 1; in >> word; ++line) {
    uint64_t draw = 0;
    if (!(in >> draw))
      return error(ErrorCode::kInvalidArgument, path + ": no number in line " + std::to_string(line));
    if (word == "seed") {
      script.seed = draw;
      continue;
    }
    size_t kind = 0;
    while (kind < kNames.size() && word != kNames[kind]) ++kind;
    if (kind == kNames.size())
      return error(ErrorCode::kInvalidArgument,
                   path + ": '" + word + "' in line " + std::to_string(line) + " is no act");
    script.acts.push_back({static_cast<ActKind>(kind), draw});
  }
  return script;
}

}  // namespace weft::simulation
