#include "tests/bench/figures.h"

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "proto/vocab/check.h"

namespace weft::bench {
namespace {

// Three or more significant digits, no exponent.
std::string number(double value) {
  const int decimals = value >= 1000 ? 0 : value >= 100 ? 1 : value >= 10 ? 2 : 3;
  char text[48];
  std::snprintf(text, sizeof text, "%.*f", decimals, value);
  return text;
}

constexpr const char* kColumns = "%-10s %-76s %9s %-8s  %-18s  %-42s %5s  %s\n";

}  // namespace

Summary summarize(std::vector<double> values) {
  CHECK(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {(values[(n - 1) / 2] + values[n / 2]) / 2, values.front(), values.back(), n};
}

std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b) {
  CHECK_EQ(a.size(), b.size());
  std::vector<double> out;
  for (size_t i = 0; i < a.size(); ++i) out.push_back(a[i] / b[i]);
  return out;
}

std::optional<double> Figure::share() const {
  if (!ceiling || ceiling->value <= 0 || summary.median <= 0) return std::nullopt;
  return ceiling->is_time ? ceiling->value / summary.median : summary.median / ceiling->value;
}

void Report::print_header() const {
  for (const auto& [name, value] : run_.items()) {
    std::printf("%-11s %s\n", name.c_str(),
                value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
  }
  std::printf("\n");
  std::printf(kColumns, "group", "figure", "value", "unit", "min .. max", "ceiling of this run", "share", "");
  std::fflush(stdout);
}

double Report::add(Figure figure) {
  const Summary& s = figure.summary;
  const std::string range = s.count > 1 ? number(s.min) + " .. " + number(s.max) : "";
  const std::string ceiling =
      figure.ceiling ? figure.ceiling->name + " " + number(figure.ceiling->value) : std::string();
  char share[16] = "";
  if (const auto value = figure.share()) std::snprintf(share, sizeof share, "%.2f", *value);
  std::printf(kColumns, figure.group.c_str(), figure.name.c_str(), number(s.median).c_str(),
              figure.unit.c_str(), range.c_str(), ceiling.c_str(), share, figure.note.c_str());
  std::fflush(stdout);
  figures_.push_back(std::move(figure));
  return figures_.back().summary.median;
}

Result<void> Report::write_json(const std::string& path) const {
  nlohmann::ordered_json all = {
      {"weft_bench", 1}, {"run", run_}, {"figures", nlohmann::ordered_json::array()}};
  for (const Figure& figure : figures_) {
    nlohmann::ordered_json line = {{"group", figure.group},        {"name", figure.name},
                                   {"unit", figure.unit},          {"value", figure.summary.median},
                                   {"min", figure.summary.min},    {"max", figure.summary.max},
                                   {"count", figure.summary.count}};
    if (figure.ceiling) {
      line["ceiling"] = {{"name", figure.ceiling->name},
                         {"value", figure.ceiling->value},
                         {"is_time", figure.ceiling->is_time}};
    }
    if (const auto share = figure.share()) line["share"] = *share;
    if (!figure.note.empty()) line["note"] = figure.note;
    all["figures"].push_back(std::move(line));
  }
  std::ofstream file(path, std::ios::trunc);
  file << all.dump(2) << "\n";
  file.close();
  if (!file) return error(ErrorCode::kIo, "cannot write '" + path + "'", "--json");
  return {};
}

}  // namespace weft::bench
