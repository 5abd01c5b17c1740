// Where the last tokens of a text stand further up in it: what drafts by look-up ask for, step by step.
//
// Keeps, for every run of 2 … 8 tokens that something follows, where its latest occurrence ends: one hash
// table of positions for each length, 4 bytes a slot, at most half full (some 60 to 110 bytes a token of the
// text in all). Runs are compared token by token, so a hash decides nothing. The text belongs to the caller,
// who gives the same one each time, longer; a token costs a fixed number of probes, once. Belongs to one
// thread; nothing fails.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace weft::controlplane {

class LookupIndex {
 public:
  static constexpr int64_t kShortest = 2, kLongest = 8;

  // Takes in what of the text is new.
  void extend(std::span<const uint32_t> text);
  // Where the latest earlier occurrence of the text's last tokens ends, of as many of them as there are any
  // for; 0: of not even two. Of the text as it was last extended.
  int64_t find(std::span<const uint32_t> text) const;

 private:
  struct Table {
    std::vector<uint32_t> slots;  // ends of runs; 0: empty. A power of two
    uint64_t used = 0;
  };
  using Hashes = std::array<uint64_t, kLongest + 1>;  // by length

  Table& table(int64_t length) { return tables_[static_cast<size_t>(length - kShortest)]; }
  const Table& table(int64_t length) const { return tables_[static_cast<size_t>(length - kShortest)]; }
  void insert(std::span<const uint32_t> text, int64_t length, int64_t end, uint64_t hash);
  void grow(std::span<const uint32_t> text, int64_t length);

  std::array<Table, kLongest - kShortest + 1> tables_;
  int64_t known_ = 0;  // ends below this one are in
};

}  // namespace weft::controlplane
