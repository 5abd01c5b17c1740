// The "model" part of tokenizer.json: byte-level byte-pair encoding.
//
// A token of the vocabulary is a byte string. Encoding starts from one token per byte and merges the pair
// with the lowest rank, leftmost on ties, until no pair is left: O(n log n) for a piece of n bytes, linear
// without merges. Bytes that have no token (released vocabularies lack some that no common text holds) are
// left out, as the `tokenizers` package leaves them out; a file that has a token for them instead is
// kUnsupported. Immutable; thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "proto/vocab/result.h"

namespace weft::daemon {

class Bpe {
 public:
  // `model` is the value of "model".
  static Result<Bpe> parse(const nlohmann::json& model);

  // Appends the tokens of one piece.
  void encode(std::string_view piece, std::vector<uint32_t>& tokens) const;

  // The bytes of each token id; empty for ids that the vocabulary does not use.
  const std::vector<std::string>& token_bytes() const { return bytes_; }

 private:
  struct Merge {
    uint32_t rank = 0, token = 0;
  };
  static uint64_t pair_key(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }
  const Merge* find_merge(uint32_t left, uint32_t right) const;
  Result<void> read_vocabulary(const nlohmann::json& model, std::unordered_map<std::string, uint32_t>& ids);
  Result<void> read_merges(const nlohmann::json& model, const std::unordered_map<std::string, uint32_t>& ids);
  void merge_all(std::string_view piece, std::vector<uint32_t>& tokens) const;

  std::vector<std::string> bytes_;
  std::array<uint32_t, 256> byte_token_{};
  std::unordered_map<uint64_t, Merge> merges_;
  std::unordered_map<std::string, uint32_t> whole_;  // byte string → token; filled only for ignore_merges
};

}  // namespace weft::daemon
