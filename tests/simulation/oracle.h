// What a request must come to, whatever happens on the way: the hash model, computed from the tokens alone.
//
// Two layers. An entry of the first is worker/model/hash_math.h's hash of (salt, part, position, token). A
// row adds up what its query heads see of it; from these sums comes its entry of the second layer, which so
// knows the row's whole history; and from the sums of both layers the next token. Index keys, where there are
// some, are one part more, whose sum enters the word of every head. Simulated workers (workers.h) reach the
// same numbers through pages, tables, holders, copies and partials.
//
// Pure values; knows no rank and no page.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "controlplane/plan.h"
#include "kv/layout.h"
#include "worker/model/hash_math.h"

namespace weft::simulation {

using namespace controlplane;
namespace hash = worker::hash_model;

inline constexpr int kLayers = 2;
inline constexpr int kColumns = 4;  // weights of an entry, among which a query chooses
inline constexpr uint32_t kVocabulary = 50;

hash::Shape shape_of(const kv::CacheGeometry& geometry);

// Sums over the first rows of a sequence, [part][column]; of some blocks only, where the cache is split.
class PartSums {
 public:
  explicit PartSums(int parts) : sums_(static_cast<size_t>(parts * kColumns)) {}
  void add(int part, const hash::Entry& entry) {
    for (int column = 0; column < kColumns; ++column) at(part, column).add(entry, column);
  }
  hash::Sums& at(int part, int column) { return sums_[static_cast<size_t>(part * kColumns + column)]; }
  const hash::Sums& at(int part, int column) const {
    return sums_[static_cast<size_t>(part * kColumns + column)];
  }

 private:
  std::vector<hash::Sums> sums_;
};

// What a query head of a row makes of its sums and of those of the index keys (zeros without such).
uint64_t word_of(const hash::Shape& shape, int layer, int head, const hash::Sums& sums,
                 const hash::Sums& index);
hash::Entry first_entry(const hash::Shape& shape, uint64_t salt, int part, int64_t position, uint32_t token);
// `words`: the sum of the row's words of the first layer.
hash::Entry second_entry(const hash::Shape& shape, uint64_t words, int part, int64_t position);

struct Truth {
  uint64_t salt = 0;
  std::vector<uint32_t> tokens;  // prompt and the whole answer
  int64_t prompt = 0;
  FinishReason reason = FinishReason::kLength;
  int64_t nan_row = -1;       // the sample after this row is not finite
  int64_t poison_row = -1;    // a plan with this row kills a worker, always
  bool poison_loads = false;  // so does one that loads its copies from the host
  int parts = 1;
  std::vector<std::array<hash::Entry, kLayers>> entries;  // [position][part]

  int64_t rows() const { return std::ssize(tokens); }
  uint32_t token(int64_t position) const { return tokens[static_cast<size_t>(position)]; }
  const hash::Entry& entry(int64_t position, int part, int layer) const {
    return entries[static_cast<size_t>(position * parts + part)][static_cast<size_t>(layer)];
  }
};
Truth truth_of(const kv::CacheGeometry& geometry, uint64_t salt, std::vector<uint32_t> prompt,
               int64_t max_tokens, const std::vector<uint32_t>& stop_tokens, int64_t nan_row);

}  // namespace weft::simulation
