// What a benchmark run found out: one figure per line, each beside the ceiling of the same run.
//
// A figure's `share` is how close it came to its ceiling: value / ceiling for rates, ceiling / value for
// times; 1 is at the ceiling. Lines are printed as they are added, in columns of fixed width; JSON holds the
// same fields.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::bench {

// Of repeated measurements; not empty.
struct Summary {
  double median = 0, min = 0, max = 0;
  size_t count = 0;
};
Summary summarize(std::vector<double> values);
// a[i] / b[i]: measurements of the same round against each other.
std::vector<double> ratios(const std::vector<double>& a, const std::vector<double>& b);

struct Ceiling {
  std::string name;
  double value = 0;
  bool is_time = false;  // a floor: less is better
};

struct Figure {
  std::string group;  // "ceiling", "prefill", …
  std::string name;
  std::string unit;
  Summary summary;  // count 1: best of several, or one
  std::optional<Ceiling> ceiling = {};
  std::string note = {};
  std::optional<double> share() const;
};

class Report {
 public:
  explicit Report(nlohmann::ordered_json run) : run_(std::move(run)) {}
  void print_header() const;
  // Prints it, too; the value of the figure.
  double add(Figure figure);
  const std::vector<Figure>& figures() const { return figures_; }
  Result<void> write_json(const std::string& path) const;

 private:
  nlohmann::ordered_json run_;  // how and where the run was made
  std::vector<Figure> figures_;
};

}  // namespace weft::bench
