#include "tools/ctl/plans.h"

#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/util/delimited_message_util.h>

#include <filesystem>
#include <fstream>
#include <ostream>
#include <utility>
#include <vector>

#include "proto/vocab/units.h"
#include "tools/ctl/json.h"
#include "tools/ctl/table.h"

namespace weft::ctl {
namespace {

// As kv::Split counts them.
std::string split_text(uint32_t split) {
  constexpr const char* kNames[] = {"none", "zigzag", "interleave", "contiguous"};
  return split < std::size(kNames) ? kNames[split] : "split " + std::to_string(split);
}

std::string grouping_text(const wire::Span& span) {
  std::string index;
  if (span.index_c() > 1) {
    const uint32_t usual = span.group_c() == 1 ? span.group_width() : span.group_c();
    index = span.index_copied() ? ", index copied" : ", index split";
    if (span.index_copied() || span.index_c() != usual) index += "(" + std::to_string(span.index_c()) + ")";
  }
  if (span.group_width() == 1) return "rank " + std::to_string(span.group_base());
  return (span.group_c() > 1 ? "dcp(" + std::to_string(span.group_c()) + ")" : "tp") + index;
}

// Prefill spans one by one; decode spans by grouping: "prefill 7: 2048 rows from 4096, zigzag; tp: 1 2 3".
std::string spans_text(const wire::StepPlan& plan) {
  std::string text;
  std::vector<std::pair<std::string, std::string>> decoding;  // grouping, requests
  for (const wire::Span& span : plan.spans()) {
    const std::string request = std::to_string(span.request()), grouping = grouping_text(span);
    if (span.prefill()) {
      text += (text.empty() ? "" : "; ") + ("prefill " + request) + ": " + std::to_string(span.rows()) +
              " rows from " + std::to_string(span.start()) + ", " + split_text(span.split()) + ", " +
              grouping;
      continue;
    }
    auto line = decoding.begin();
    while (line != decoding.end() && line->first != grouping) ++line;
    if (line == decoding.end()) line = decoding.insert(line, {grouping, ""});
    line->second += " " + request;
  }
  for (const auto& [grouping, requests] : decoding) {
    text += (text.empty() ? "" : "; ") + grouping + ":" + requests;
  }
  return text;
}

struct Line {
  int64_t prefill = 0, decode = 0, copies = 0;  // rows, rows, pages
  std::string spans;
  friend bool operator==(const Line&, const Line&) = default;
};

Line line_of(const wire::StepPlan& plan) {
  Line line;
  for (const wire::Span& span : plan.spans()) (span.prefill() ? line.prefill : line.decode) += span.rows();
  line.copies = plan.copies_size();
  line.spans = spans_text(plan);
  return line;
}

// Whether `next` is one more decode step like `plan`, whose line is given.
bool goes_on(const Line& line, const wire::StepPlan& plan, const wire::StepPlan& next) {
  return line.prefill == 0 && line.copies == 0 && next.step() == plan.step() + 1 && line_of(next) == line;
}

}  // namespace

Result<void> read_plans(const std::string& path, const std::function<void(wire::StepPlan)>& take) {
  std::error_code code;
  if (!std::filesystem::exists(path, code)) return error(ErrorCode::kNotFound, "no file " + path, "FILE");
  std::ifstream file(path, std::ios::binary);
  if (!file || std::filesystem::is_directory(path, code)) {
    return error(ErrorCode::kIo, "cannot read " + path, "FILE");
  }
  google::protobuf::io::IstreamInputStream stream(&file);
  for (int64_t number = 1;; ++number) {
    wire::StepPlan plan;
    bool at_end = false;
    if (google::protobuf::util::ParseDelimitedFromZeroCopyStream(&plan, &stream, &at_end)) {
      // Other files can parse by chance; a plan has a number and something to run.
      if (plan.step() == 0 || plan.spans().empty()) {
        return error(ErrorCode::kBadMessage, path + " is no recording of plans", "FILE");
      }
      take(std::move(plan));
    } else if (at_end) {
      return {};
    } else {
      return error(ErrorCode::kBadMessage,
                   number == 1 ? path + " is no recording of plans"
                               : path + " breaks off within plan " + std::to_string(number),
                   "FILE");
    }
  }
}

std::string plans_view(const std::vector<wire::StepPlan>& plans, bool all, const Terminal& terminal) {
  if (plans.empty()) return "no plans\n";
  Table table(
      {{"step", true}, {"prefill", true}, {"decode", true}, {"copies", true}, {"spans", false, true}});
  for (size_t first = 0; first < plans.size();) {
    const Line line = line_of(plans[first]);
    size_t last = first;
    while (!all && last + 1 < plans.size() && goes_on(line, plans[last], plans[last + 1])) ++last;
    std::string steps = std::to_string(plans[first].step());
    if (last > first) steps += "\u2013" + std::to_string(plans[last].step());
    table.add({std::move(steps), human_count(line.prefill), human_count(line.decode),
               human_count(line.copies), line.spans});
    first = last + 1;
  }
  return table.text(terminal);
}

Result<void> run_plans(Context& context) {
  const std::string& path = context.arguments.file;
  std::vector<wire::StepPlan> plans;
  const auto whole = read_plans(path, [&](wire::StepPlan plan) { plans.push_back(std::move(plan)); });
  if (whole || !plans.empty()) {  // what there was before a break is worth a look
    if (context.arguments.json()) {
      Json steps = Json::array();
      for (const wire::StepPlan& plan : plans) steps.push_back(to_json(plan));
      context.result = document("plans", {{"file", path}, {"steps", std::move(steps)}});
    } else {
      context.out << plans_view(plans, context.arguments.all, context.terminal) << std::flush;
    }
  }
  return whole;
}

}  // namespace weft::ctl
