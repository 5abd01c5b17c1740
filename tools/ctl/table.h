// Text for people: tables whose columns line up, and the few styles that weftctl uses.
//
// Widths count characters (code points), not bytes. A table that is wider than the terminal gives up width in
// the column marked `flexible`, never in a number. Styles appear only where colours are on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/ctl/context.h"

namespace weft::ctl {

enum class Style { kPlain, kBold, kDim, kGood, kWarning, kBad };

std::string styled(const std::string& text, Style style, const Terminal& terminal);

struct Cell {
  std::string text;
  Style style = Style::kPlain;
  Cell(std::string text, Style style = Style::kPlain) : text(std::move(text)), style(style) {}  // NOLINT
  Cell(const char* text) : text(text) {}                                                        // NOLINT
};

struct Column {
  std::string title;
  bool right = false;
  bool flexible = false;
};

class Table {
 public:
  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}
  void add(std::vector<Cell> row);
  std::string text(const Terminal& terminal) const;

 private:
  std::vector<size_t> widths(const Terminal& terminal) const;
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

// "1.25 s", "340 ms", "2 h 05 min": for people.
std::string human_time(uint64_t ns);
// "2,612": tokens per second, "-" where no time passed.
std::string human_rate(uint64_t tokens, uint64_t ns);

}  // namespace weft::ctl
