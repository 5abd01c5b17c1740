// What the command lines of all programs share: help that reads well, limits said in words, and errors with a
// hint where a word was misspelt.
//
// A program declares its options with CLI11 (a type_name is what the help calls the value), limits them with
// between(), at_least() and one_of(), and calls parse_words(), which lets no exception of CLI11 out. Numbers
// are decimal digits only; lengths of text count characters.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::command_line {

// Limits of an option's value. Their descriptions stand in the help.
CLI::Validator between(int64_t low, int64_t high);
CLI::Validator between(double low, double high);
CLI::Validator at_least(int64_t low);
CLI::Validator one_of(std::vector<std::string> choices);  // two at least
// Bytes, as 65536, 512MiB or 4GiB; for transform(), which leaves the plain number.
CLI::Validator byte_size();

// Any number that fits the type. CLI11 alone reads as strtoull does: "-1" wraps around, "0x10" and " 7" pass.
template <typename Number>
CLI::Validator decimal();

enum class Asked { kRun, kHelp, kVersion };
// `words` without the program's name. kInvalidArgument: what is wrong, of which option, and where to look.
Result<Asked> parse_words(CLI::App& app, const std::vector<std::string>& words);

// The help of a program without subcommands.
std::string help_text(const CLI::App& app);

// The word of `words` that `word` was probably meant to be; empty if none is near.
std::string nearest_word(std::string_view word, const std::vector<std::string>& words);

size_t character_count(std::string_view text);
// Words wrapped at 100 columns, the first line after `indent` columns that are already written. Ends the
// line.
std::string wrapped(const std::string& text, size_t indent);
// Rows of two columns, the right one wrapped. `left_width`: of the left column at least.
std::string two_columns(const std::vector<std::pair<std::string, std::string>>& rows, size_t left_width = 0);

}  // namespace weft::command_line
