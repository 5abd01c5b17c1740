#include "tests/simulation/oracle.h"

#include <algorithm>

namespace weft::simulation {

hash::Shape shape_of(const kv::CacheGeometry& geometry) {
  hash::Shape shape;
  shape.layers = kLayers;
  shape.heads = static_cast<int>(geometry.heads);
  shape.parts = geometry.streams[0].used_parts();
  shape.key_bits = kColumns;
  shape.vocabulary = kVocabulary;
  return shape;
}

uint64_t word_of(const hash::Shape& shape, int layer, int head, const hash::Sums& sums,
                 const hash::Sums& index) {
  const uint64_t word = hash::head_word(shape, layer, head, sums);
  return index.count == 0 ? word : hash::fold(hash::fold(word, index.sum), index.count);
}

hash::Entry first_entry(const hash::Shape& shape, uint64_t salt, int part, int64_t position, uint32_t token) {
  return hash::entry(shape, salt, 0, part, position, token);
}

hash::Entry second_entry(const hash::Shape& shape, uint64_t words, int part, int64_t position) {
  const uint64_t hash =
      hash::fold(words, static_cast<uint64_t>(part) << 32 | static_cast<uint64_t>(position));
  return {hash::digits_of(hash, shape.digits), mix64(hash)};
}

namespace {

// One sequence, row by row.
class Row {
 public:
  Row(const kv::CacheGeometry& geometry, Truth& truth)
      : shape_(shape_of(geometry)), truth_(truth), sums_(kLayers, PartSums(truth.parts)) {}

  // Takes a token in, and returns the one that follows.
  uint32_t next(uint32_t token) {
    truth_.entries.resize(static_cast<size_t>((position_ + 1) * truth_.parts));
    uint64_t words = 0;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int part = 0; part < truth_.parts; ++part) {
        const hash::Entry entry = layer == 0 ? first_entry(shape_, truth_.salt, part, position_, token)
                                             : second_entry(shape_, words, part, position_);
        truth_.entries[static_cast<size_t>(position_ * truth_.parts + part)][static_cast<size_t>(layer)] =
            entry;
        sums_[static_cast<size_t>(layer)].add(part, entry);
      }
      words += layer_words(layer, token);
    }
    ++position_;
    return hash::token_of(words, kVocabulary);
  }

 private:
  uint64_t layer_words(int layer, uint32_t token) const {
    const PartSums& sums = sums_[static_cast<size_t>(layer)];
    const bool indexed = truth_.parts > shape_.parts;
    uint64_t words = 0;
    for (int head = 0; head < shape_.heads; ++head) {
      const int column = hash::query_column(shape_, truth_.salt, layer, head, position_, token);
      words += word_of(shape_, layer, head, sums.at(shape_.part_of(head), column),
                       indexed ? sums.at(shape_.parts, 0) : hash::Sums{});
    }
    return words;
  }

  hash::Shape shape_;
  Truth& truth_;
  std::vector<PartSums> sums_;
  int64_t position_ = 0;
};

}  // namespace

Truth truth_of(const kv::CacheGeometry& geometry, uint64_t salt, std::vector<uint32_t> prompt,
               int64_t max_tokens, const std::vector<uint32_t>& stop_tokens, int64_t nan_row) {
  Truth truth;
  truth.salt = salt;
  truth.prompt = std::ssize(prompt);
  truth.tokens = std::move(prompt);
  truth.nan_row = nan_row;
  truth.parts = geometry.parts();
  Row row(geometry, truth);
  uint32_t next = 0;
  for (const uint32_t token : std::vector<uint32_t>(truth.tokens)) next = row.next(token);
  for (int64_t i = 0; i < max_tokens; ++i) {
    if (truth.prompt + i - 1 == nan_row) {
      truth.reason = FinishReason::kError;
      break;
    }
    const uint32_t token = next;
    truth.tokens.push_back(token);
    next = row.next(token);
    if (std::count(stop_tokens.begin(), stop_tokens.end(), token) > 0) {
      truth.reason = FinishReason::kStop;
      break;
    }
  }
  return truth;
}

}  // namespace weft::simulation
