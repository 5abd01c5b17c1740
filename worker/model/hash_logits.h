// The hash model's head: from a row's sum of words to logits that can only draw its token.
#pragma once

#include "kv/layout.h"
#include "worker/model/hash_math.h"

namespace weft::worker {

// hidden: a normed row of the residual, whose first column was 1 and whose next ones were the digits of the
// sum of all layers' and heads' words. Writes columns [begin, end) of the logits: 0 for the token, very low
// for all others. Not finite where the row is not.
void hash_logits(const hash_model::Shape& shape, const float* hidden, kv::Range columns, float* out);

}  // namespace weft::worker
