#include "worker/model/hash_logits.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace weft::worker {

// The norm scaled all columns alike, and rounded each: less than a half in what is divided out again, for
// sums of digits stay below 2^19 (config.cc).
void hash_logits(const hash_model::Shape& shape, const float* hidden, kv::Range columns, float* out) {
  constexpr float kOthers = -1e30f;
  const auto one = static_cast<double>(hidden[0]);
  uint64_t words = 0;
  bool sound = one > 0;
  for (int j = 0; j < shape.digits; ++j) {
    const double sum = static_cast<double>(hidden[1 + j]) / one;
    sound = sound && std::abs(sum) < 0x1p32;
    if (sound) words += static_cast<uint64_t>(std::llrint(sum)) << (j * hash_model::kDigitBits);
  }
  std::fill(out, out + columns.size(), sound ? kOthers : std::numeric_limits<float>::quiet_NaN());
  const int64_t token = hash_model::token_of(words, shape.vocabulary);
  if (sound && token >= columns.begin && token < columns.end) out[token - columns.begin] = 0;
}

}  // namespace weft::worker
