// The top-k of keys that are split over ranks, proved without reading all that every rank offers.
//
// A rank offers its own best top_k keys of a row (all, if it has fewer): first its very best, somewhat more
// than its share of top_k, then the rest, both ascending in position, and a head that names the best key of
// the rest. A reader reads the heads and the scores of the first parts. Let t be the top_k-th of these keys.
// If the best key of every rank's rest comes after t, no rest holds a chosen key: the result is proved. Else
// the reader reads the scores of that rank's rest, too. That is a second read of the same offer, not a second
// exchange: an offer lies whole where all ranks can see it, and only what is read crosses.
//
// Positions are read only of keys whose score is t's, and only where not all of these are chosen; and of
// chosen keys by a reader that wants them. The order is that of kernels/indexer.h. Exact: every reader finds
// the same keys, whatever the lengths of the first parts.
//
// Scores count as score + 0.0 and are no NaN (index_select makes them so). Flush-to-zero on. A SplitTopK
// belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/indexer.h"

namespace weft::kernels {

struct OfferHead {
  int32_t count = 0;  // keys offered
  int32_t first = 0;  // of them, in the first part
  Candidate next;     // the best of the rest, if there is one
};

// Of one rank and row.
struct Offer {
  const OfferHead* head = nullptr;
  const float* scores = nullptr;       // [count]
  const int32_t* positions = nullptr;  // [count]
};

// Lays out `best`, ascending in position, with the best `first` in front.
void write_offer(std::span<const Candidate> best, int64_t first, OfferHead* head, float* scores,
                 int32_t* positions);

struct SplitTopK {
  float last_score = 0;      // of the top_k-th key; every key above it is chosen
  bool by_position = false;  // of those that have it only `ties` are chosen; else all
  struct Tie {
    int32_t position;
    int32_t offer;
  };
  std::vector<Tie> ties;  // ascending in position
  struct Read {
    int64_t scores = 0;  // how many of the offer's scores, from the front
    int64_t chosen = 0;  // keys
    int64_t bytes = 0;   // head, scores, positions
  };
  std::vector<Read> reads;    // by offer
  bool second_read = false;   // of some offer the rest was read
  std::vector<float> scores;  // scratch: all scores read
  struct Segment {
    int32_t offer;
    int64_t from, begin, count;  // place in the offer, place in `scores`, length
  };
  std::vector<Segment> segments;  // scratch
};

// All offers of a row together have at least top_k keys.
void find_split_top_k(std::span<const Offer> offers, int64_t top_k, SplitTopK& out);

// Reads the positions of the chosen keys of one offer into `out`, in no order; returns how many.
int64_t read_chosen(const Offer& offer, int64_t number, SplitTopK& found, int32_t* out);

}  // namespace weft::kernels
