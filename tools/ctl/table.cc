#include "tools/ctl/table.h"

#include <algorithm>
#include <cstdio>

#include "proto/command_line.h"
#include "proto/vocab/check.h"
#include "proto/vocab/units.h"

namespace weft::ctl {
namespace {

using command_line::character_count;

constexpr size_t kGap = 2;        // blanks between columns
constexpr size_t kNarrowest = 8;  // a flexible column keeps this much
constexpr char kEllipsis[] = "\u2026";

const char* escape_of(Style style) {
  switch (style) {
    case Style::kPlain:
      return "";
    case Style::kBold:
      return "\033[1m";
    case Style::kDim:
      return "\033[2m";
    case Style::kGood:
      return "\033[32m";
    case Style::kWarning:
      return "\033[33m";
    case Style::kBad:
      return "\033[31m";
  }
  return "";
}

std::string shortened(const std::string& text, size_t width) {
  if (character_count(text) <= width) return text;
  size_t bytes = 0;
  for (size_t kept = 0; kept + 1 < width; ++kept) {
    ++bytes;
    while (bytes < text.size() && (static_cast<unsigned char>(text[bytes]) & 0xC0u) == 0x80u) ++bytes;
  }
  return text.substr(0, bytes) + kEllipsis;
}

std::string printed(const char* format, double value) {
  char text[48];
  std::snprintf(text, sizeof text, format, value);
  return text;
}

}  // namespace

std::string styled(const std::string& text, Style style, const Terminal& terminal) {
  if (!terminal.colors || style == Style::kPlain || text.empty()) return text;
  return escape_of(style) + text + "\033[0m";
}

void Table::add(std::vector<Cell> row) {
  CHECK_EQ(row.size(), columns_.size());
  rows_.push_back(std::move(row));
}

std::vector<size_t> Table::widths(const Terminal& terminal) const {
  std::vector<size_t> widths;
  size_t total = 0;
  for (size_t c = 0; c < columns_.size(); ++c) {
    size_t width = character_count(columns_[c].title);
    for (const auto& row : rows_) width = std::max(width, character_count(row[c].text));
    widths.push_back(width);
    total += width + (c == 0 ? 0 : kGap);
  }
  const auto limit = static_cast<size_t>(terminal.width);
  for (size_t c = 0; c < columns_.size() && limit > 0 && total > limit; ++c) {
    if (!columns_[c].flexible || widths[c] <= kNarrowest) continue;
    const size_t less = std::min(total - limit, widths[c] - kNarrowest);
    widths[c] -= less;
    total -= less;
  }
  return widths;
}

std::string Table::text(const Terminal& terminal) const {
  const std::vector<size_t> widths = this->widths(terminal);
  std::string out;
  const auto put_row = [&](const std::vector<Cell>& row) {
    std::string line;
    size_t blanks = 0;  // owed before the next text, so that no line ends in blanks
    for (size_t c = 0; c < row.size(); ++c) {
      const std::string text = shortened(row[c].text, widths[c]);
      const size_t padding = widths[c] - character_count(text);
      if (columns_[c].right) blanks += padding;
      if (!text.empty()) {
        line += std::string(blanks, ' ') + styled(text, row[c].style, terminal);
        blanks = 0;
      }
      blanks += kGap + (columns_[c].right ? 0 : padding);
    }
    out += line + "\n";
  };
  std::vector<Cell> titles;
  bool titled = false;
  for (const Column& column : columns_) {
    titles.emplace_back(column.title, Style::kBold);
    titled = titled || !column.title.empty();
  }
  if (titled) put_row(titles);
  for (const auto& row : rows_) put_row(row);
  return out;
}

std::string human_time(uint64_t ns) {
  const double seconds = static_cast<double>(ns) * 1e-9;
  if (ns < 1'000'000) return printed("%.0f \u00b5s", seconds * 1e6);
  if (seconds < 1) return printed("%.0f ms", seconds * 1e3);
  if (seconds < 60) return printed("%.2f s", seconds);
  const uint64_t whole = ns / 1'000'000'000;
  char text[48];
  if (whole < 3600) {
    std::snprintf(text, sizeof text, "%d min %02d s", static_cast<int>(whole / 60),
                  static_cast<int>(whole % 60));
  } else {
    std::snprintf(text, sizeof text, "%d h %02d min", static_cast<int>(whole / 3600),
                  static_cast<int>(whole / 60 % 60));
  }
  return text;
}

std::string human_rate(uint64_t tokens, uint64_t ns) {
  if (ns == 0 || tokens == 0) return "-";
  const double rate = static_cast<double>(tokens) * 1e9 / static_cast<double>(ns);
  return rate < 100 ? printed("%.1f", rate) : human_count(static_cast<int64_t>(rate + 0.5));
}

}  // namespace weft::ctl
