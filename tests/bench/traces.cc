#include "tests/bench/traces.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <unordered_set>

namespace weft::bench {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMooncakeBlock = 512, kAgentBlock = 64;

TracePrompt prompt(int64_t tokens, int64_t cached) { return {tokens, std::min(cached, tokens - 1)}; }

void add_mooncake(const Json& line, std::unordered_set<int64_t>& seen, std::vector<TracePrompt>& out) {
  int64_t blocks = 0;
  bool hit = true;
  for (const auto& id : line.at("hash_ids")) {
    hit = !seen.insert(id.get<int64_t>()).second && hit;
    blocks += hit ? 1 : 0;
  }
  out.push_back(prompt(line.at("input_length"), blocks * kMooncakeBlock));
}

void add_session(const Json& line, std::unordered_set<std::string>& groups, std::vector<TracePrompt>& out) {
  if (line.contains("group") && !groups.insert(line.at("group").get<std::string>()).second) return;
  constexpr size_t kTokens = 1, kCommonBlocks = 3, kRefBlocks = 9;
  for (const auto& request : line.at("requests")) {
    int64_t blocks = request.at(kCommonBlocks);
    if (request.size() > kRefBlocks) blocks = std::max<int64_t>(blocks, request.at(kRefBlocks));
    out.push_back(prompt(request.at(kTokens), blocks * kAgentBlock));
  }
}

// A value between two neighbours of an even grid of quantiles.
int64_t between(const std::vector<int64_t>& quantiles, double at) {
  const double place = at * static_cast<double>(quantiles.size() - 1);
  const auto below = static_cast<size_t>(place);
  const auto low = static_cast<double>(quantiles[below]), high = static_cast<double>(quantiles[below + 1]);
  return std::llround(low + (high - low) * (place - static_cast<double>(below)));
}

}  // namespace

TracePrompt Trace::draw(SplitMix64& random) const {
  if (!prompts_.empty()) return prompts_[random.below(prompts_.size())];
  const int64_t tokens = between(lengths_, random.uniform());
  return prompt(tokens, tokens - std::min(tokens, between(new_ones_, random.uniform())));
}

Result<std::vector<Trace>> read_traces(const std::string& folder) {
  std::vector<std::filesystem::path> files;
  std::error_code failed;
  for (const auto& file : std::filesystem::directory_iterator(folder, failed)) {
    if (file.path().extension() == ".jsonl") files.push_back(file.path());
  }
  if (files.empty()) return error(ErrorCode::kNotFound, "no *.jsonl in '" + folder + "'", "--traces");
  std::sort(files.begin(), files.end());
  std::vector<Trace> traces;
  for (const auto& path : files) {
    Trace& trace = traces.emplace_back(path.stem().string());
    std::unordered_set<int64_t> seen;
    std::unordered_set<std::string> groups;
    std::ifstream file(path);
    int64_t number = 0;
    for (std::string text; std::getline(file, text);) {
      ++number;
      try {
        const Json line = Json::parse(text);
        if (trace.name_.starts_with("agent")) {
          add_session(line, groups, trace.prompts_);
        } else {
          add_mooncake(line, seen, trace.prompts_);
        }
      } catch (const Json::exception& bad) {
        return error(ErrorCode::kBadMessage, path.string() + ":" + std::to_string(number) + ": " + bad.what(),
                     "--traces");
      }
    }
    const bool whole = std::all_of(trace.prompts_.begin(), trace.prompts_.end(),
                                   [](const TracePrompt& p) { return p.tokens > 0 && p.cached >= 0; });
    if (trace.prompts_.empty() || !whole) {
      return error(ErrorCode::kBadMessage, path.string() + " holds no prompts, or empty ones", "--traces");
    }
  }
  return traces;
}

// In steps of 5 %, of the three traces that docs/benchmarks.md names.
std::vector<Trace> trace_shapes() {
  struct Shape {
    const char* name;
    std::vector<int64_t> lengths, new_ones;
  };
  const std::vector<Shape> shapes = {
      {"conversation",
       {891,  901,  964,   1261,  1662,  2307,  3263,  4250,  4993,  5871,  6909,
        8186, 9570, 11239, 13196, 15366, 17869, 21467, 27367, 39549, 126195},
       {1,    370,  388,  422,  512,  609,   712,   835,   988,   1333,  2470,
        3708, 4558, 5570, 7084, 8816, 11243, 14598, 19012, 29431, 125683}},
      {"synthetic",
       {13,    22,    30,    45,    88,    277,   913,   2777,  4365,  6657,  11587,
        14730, 16289, 17642, 19407, 23175, 28430, 34305, 38615, 48835, 191378},
       {1,   1,   22,  30,  41,   70,    112,   172,   236,   302,   374,
        431, 501, 606, 937, 1491, 11181, 15983, 19177, 28679, 191374}},
      {"agent sessions",
       {8974,   29926,  41500,  49784,  57136,  64353,  71333,  79012,  85804,  92680, 100198,
        107575, 114633, 121875, 128844, 136847, 145338, 158212, 218969, 309190, 894371},
       {31,  184,  223,  269,  317,  367,  421,  482,  548,   630,   733,
        856, 1007, 1212, 1503, 1871, 2421, 3346, 5198, 10792, 851858}}};
  std::vector<Trace> traces;
  for (const Shape& shape : shapes) {
    Trace& trace = traces.emplace_back(shape.name);
    trace.lengths_ = shape.lengths;
    trace.new_ones_ = shape.new_ones;
  }
  return traces;
}

}  // namespace weft::bench
