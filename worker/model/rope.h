// How config.json says that positions turn queries and keys: the one place that knows the kinds of scaling.
//
// Read in both spellings: rope_theta + rope_scaling (with `type` or `rope_type`), or rope_parameters with
// rope_theta inside. Kinds: default, linear, llama3, yarn; any other is kUnsupported. Whoever reads a model's
// attention says how wide the rotated part of a head is and decides what to do with the result. All
// arithmetic is in double.
#pragma once

#include <cstdint>
#include <vector>

#include "worker/model/field_reader.h"

namespace weft::worker {

struct Rope {
  std::vector<double> inverse_frequency;  // [width / 2], scaling applied
  double factor = 1;                      // A: multiplies cosines and sines
  // MLA's softmax scale grows by this: the square of the magnitude for mscale_all_dim, whatever the kind of
  // scaling; 1 without that field.
  double score_growth = 1;
};

// `width` is even; `max_context` stands in for a missing original_max_position_embeddings. A failure sticks
// to `f`, as for every field; the result is then of no use, but harmless.
Rope read_rope(FieldReader& f, int64_t width, int64_t max_context);
// How much of a head turns, 0 to 1 (partial_rotary_factor, in either place); below 1 is kUnsupported where
// `partial` is false.
double read_rotary_share(FieldReader& f, double missing, bool partial);

}  // namespace weft::worker
