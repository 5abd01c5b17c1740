// The hash model as pure arithmetic: what it stores of a token, and which token follows.
//
// A model whose answers are an oracle of the cache. An entry is a hash of (salt, layer, part, position,
// token); row t of a layer adds up, for each query head, the entries 0 … t that it may see, each once or
// twice (the *weight*: one bit of the entry's key word, and the query chooses which), and counts them with
// the same weights. The next token is a hash of the sums and counts of all layers and heads. So an entry that
// is missing, stale, there twice, or another one's, a query that is another one's, or a partial that is lost
// or merged twice, changes that token, and with it all later ones.
//
// The salt stands for the namespace, which workers do not know: it is the request's sampling seed.
//
// The worker (attention_hash.cc) keeps words as digits of 3 bits, one to a column, so that float32 adds them
// exactly in any order; sums here are of the same words, modulo 2^64. Everything else is equal by definition.
// Depends on the vocabulary only: workers, tests and the simulation include it. Stateless.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "proto/vocab/random.h"

namespace weft::worker::hash_model {

inline constexpr int kDigitBits = 3;
inline constexpr int kDigitsMax = 21;   // 63 bits
inline constexpr int kKeyBitsMax = 64;  // columns among which a query chooses
// Sums of digits, each at most 7 and counted at most twice, stay below 2^24.
inline constexpr int64_t kContextMax = int64_t{1} << 20;

struct Shape {
  int layers = 1, heads = 1;
  int parts = 1;      // of an entry: KV heads; query head i reads part i / (heads / parts)
  int digits = 14;    // of an entry's word, and of a head's
  int key_bits = 16;  // of an entry's key word
  uint32_t vocabulary = 4096;
  // By layer: a row sees its last so many keys; 0, or nothing here: all.
  std::vector<int64_t> windows;
  // With an indexer a row reads the index_topk entries of the best scores instead. By layer: the index layer
  // whose selection it reads; empty: every row sees all.
  std::vector<int> selection;
  int64_t index_topk = 0;
  int index_heads = 0, index_width = 0;
  int part_of(int head) const { return head / (heads / parts); }
};

// ---- words ---------------------------------------------------------------------------------------------

enum class Use : uint64_t { kEntry = 1, kQuery, kHead, kToken, kIndexKey, kIndexQuery };

constexpr uint64_t fold(uint64_t hash, uint64_t next) { return mix64(hash ^ mix64(next)); }
constexpr uint64_t digits_of(uint64_t hash, int digits) {
  return hash & ((uint64_t{1} << (digits * kDigitBits)) - 1);
}
constexpr int digit(uint64_t word, int index) { return static_cast<int>(word >> (index * kDigitBits) & 7); }

// Where something is: layer, and the part or head in it.
constexpr uint64_t at_place(Use use, uint64_t salt, int layer, int place) {
  return fold(fold(mix64(salt), static_cast<uint64_t>(use)),
              static_cast<uint64_t>(layer) << 32 | static_cast<uint64_t>(place));
}
constexpr uint64_t at_token(uint64_t hash, int64_t position, uint32_t token) {
  return fold(hash, static_cast<uint64_t>(position) << 32 | token);
}

// What one layer stores for one token in one part.
struct Entry {
  uint64_t value = 0;  // the word that is added up
  uint64_t key = 0;    // its bits are the weights, less 1
  int64_t weight(int column) const { return 1 + static_cast<int64_t>(key >> column & 1); }
};
inline Entry entry(const Shape& shape, uint64_t salt, int layer, int part, int64_t position, uint32_t token) {
  const uint64_t hash = at_token(at_place(Use::kEntry, salt, layer, part), position, token);
  return {digits_of(hash, shape.digits), mix64(hash)};
}

// Which bit of the key words decides the weights for a row's query head.
inline int query_column(const Shape& shape, uint64_t salt, int layer, int head, int64_t position,
                        uint32_t token) {
  const uint64_t hash = at_token(at_place(Use::kQuery, salt, layer, head), position, token);
  return static_cast<int>(hash % static_cast<uint64_t>(shape.key_bits));
}

// What a query head sees.
struct Sums {
  uint64_t sum = 0, count = 0;
  void add(const Entry& entry, int column) {
    const auto weight = static_cast<uint64_t>(entry.weight(column));
    sum += weight * entry.value;
    count += weight;
  }
};
inline uint64_t head_word(const Shape& shape, int layer, int head, const Sums& sums) {
  return digits_of(fold(fold(at_place(Use::kHead, 0, layer, head), sums.sum), sums.count), shape.digits);
}

// From the sum of all layers' and heads' words.
constexpr uint32_t token_of(uint64_t words, uint32_t vocabulary) {
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint32_t>(
      static_cast<Wide>(fold(static_cast<uint64_t>(Use::kToken), words)) * vocabulary >> 64);
}

// ---- selections ----------------------------------------------------------------------------------------

// An index key's column: 0 … 7. A query's: −1 … 2; its heads weigh 1 … 4. Scores are exact integers.
inline int index_key(uint64_t salt, int index_layer, int64_t position, uint32_t token, int column) {
  const uint64_t hash = at_token(at_place(Use::kIndexKey, salt, index_layer, 0), position, token);
  return static_cast<int>(fold(hash, static_cast<uint64_t>(column)) & 7);
}
inline int index_query(uint64_t salt, int index_layer, int head, int64_t position, uint32_t token,
                       int column) {
  const uint64_t hash = at_token(at_place(Use::kIndexQuery, salt, index_layer, head), position, token);
  return static_cast<int>(fold(hash, static_cast<uint64_t>(column)) & 3) - 1;
}
constexpr int index_weight(int head) { return 1 + head % 4; }

// ---- the oracle ----------------------------------------------------------------------------------------

// The positions that the last of `tokens` reads in a layer, ascending: slow and obvious.
inline std::vector<int64_t> seen(const Shape& shape, uint64_t salt, std::span<const uint32_t> tokens,
                                 int layer) {
  const auto row = static_cast<int64_t>(tokens.size()) - 1;
  const int64_t window = shape.windows.empty() ? 0 : shape.windows[static_cast<size_t>(layer)];
  std::vector<int64_t> positions;
  for (int64_t u = window == 0 ? 0 : std::max<int64_t>(0, row + 1 - window); u <= row; ++u)
    positions.push_back(u);
  if (shape.selection.empty() || row + 1 <= shape.index_topk) return positions;
  const int index_layer = shape.selection[static_cast<size_t>(layer)];
  std::vector<int64_t> score(tokens.size(), 0);
  for (int64_t u = 0; u <= row; ++u) {
    for (int head = 0; head < shape.index_heads; ++head) {
      int64_t dot = 0;
      for (int column = 0; column < shape.index_width; ++column) {
        dot += int64_t{index_query(salt, index_layer, head, row, tokens.back(), column)} *
               index_key(salt, index_layer, u, tokens[static_cast<size_t>(u)], column);
      }
      score[static_cast<size_t>(u)] += index_weight(head) * std::max<int64_t>(0, dot);
    }
  }
  std::stable_sort(positions.begin(), positions.end(), [&](int64_t a, int64_t b) {
    return score[static_cast<size_t>(a)] > score[static_cast<size_t>(b)];
  });
  positions.resize(static_cast<size_t>(shape.index_topk));
  std::sort(positions.begin(), positions.end());
  return positions;
}

// The token after a context of at least one token: slow and obvious.
inline uint32_t next_token(const Shape& shape, uint64_t salt, std::span<const uint32_t> tokens) {
  const auto row = static_cast<int64_t>(tokens.size()) - 1;
  uint64_t words = 0;
  for (int layer = 0; layer < shape.layers; ++layer) {
    const std::vector<int64_t> positions = seen(shape, salt, tokens, layer);
    for (int head = 0; head < shape.heads; ++head) {
      const int column = query_column(shape, salt, layer, head, row, tokens.back());
      Sums sums;
      for (const int64_t u : positions) {
        sums.add(entry(shape, salt, layer, shape.part_of(head), u, tokens[static_cast<size_t>(u)]), column);
      }
      words += head_word(shape, layer, head, sums);
    }
  }
  return token_of(words, shape.vocabulary);
}

// The same for a context that grows, in time that does not grow with it; of shapes without windows and
// selections.
class Context {
 public:
  Context(const Shape& shape, uint64_t salt)
      : shape_(shape),
        salt_(salt),
        sums_(static_cast<size_t>(shape.layers) * static_cast<size_t>(shape.parts) *
              static_cast<size_t>(shape.key_bits)) {}

  int64_t size() const { return size_; }
  void append(uint32_t token) {
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int part = 0; part < shape_.parts; ++part) {
        const Entry stored = entry(shape_, salt_, layer, part, size_, token);
        for (int column = 0; column < shape_.key_bits; ++column)
          sums(layer, part, column).add(stored, column);
      }
    }
    last_ = token;
    ++size_;
  }
  // Of a context that is not empty.
  uint32_t next() const {
    uint64_t words = 0;
    for (int layer = 0; layer < shape_.layers; ++layer) {
      for (int head = 0; head < shape_.heads; ++head) {
        const int column = query_column(shape_, salt_, layer, head, size_ - 1, last_);
        words += head_word(shape_, layer, head, sums(layer, shape_.part_of(head), column));
      }
    }
    return token_of(words, shape_.vocabulary);
  }

 private:
  size_t index(int layer, int part, int column) const {
    return static_cast<size_t>((layer * shape_.parts + part) * shape_.key_bits + column);
  }
  Sums& sums(int layer, int part, int column) { return sums_[index(layer, part, column)]; }
  const Sums& sums(int layer, int part, int column) const { return sums_[index(layer, part, column)]; }

  Shape shape_;
  uint64_t salt_;
  std::vector<Sums> sums_;
  int64_t size_ = 0;
  uint32_t last_ = 0;
};

}  // namespace weft::worker::hash_model
