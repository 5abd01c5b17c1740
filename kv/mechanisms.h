// Ways to do the same exchange: which bytes travel, and in how many exchange points. Bits do not depend on
// them.
//
// A wish of a request, or of the defaults; it changes between two steps and moves nothing. Where a mechanism
// has no meaning (partials, when the cache is not split) it is ignored. Values and their names; no state.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kv/layout.h"
#include "proto/vocab/result.h"

namespace weft::kv {

// Where the query heads of a c-group that splits the cache come from.
enum class QueryPath : uint8_t {
  kGathered = 0,    // each rank projects its own heads and sends them to the others
  kReplicated = 1,  // each rank projects the heads of the whole c-group: nothing is sent
};

// How the partials of a c-group reach the owners of the heads.
enum class PartialsPath : uint8_t {
  kAllToAll = 0,  // each rank sends every other its heads, at one exchange point; the owner merges
  kTree = 1,      // log2 c exchange points: partners send each other half of their heads and merge
};

// How owned rows (prefill split by token) meet the context that other ranks hold.
enum class ContextPath : uint8_t {
  kAuto = 0,    // whichever of the others moves fewer bytes for the chunk
  kPassKv = 1,  // each owner reads the entries where they lie
  kPassQ =
      2,  // queries go to the holders, who return partials; rows that select entries read them all the same
};

// How owned rows reach entries and index keys that only other ranks hold.
enum class FetchPath : uint8_t {
  kView = 0,    // read where they lie
  kCopies = 1,  // copied first: entries shard by shard, one ahead of the computation
};

// How MLA rows of a split prompt are computed. Expanded is outside the promise of equal bits: its blocks are
// shared with such requests only, and a request keeps the form it came with.
enum class AttentionForm : uint8_t {
  kAbsorbed = 0,  // queries and values in the latent space, as in decoding
  kExpanded = 1,  // keys and values of each head; fewer multiplications for long prompts
};

struct Mechanisms {
  QueryPath query = QueryPath::kGathered;
  PartialsPath partials = PartialsPath::kAllToAll;
  ContextPath context = ContextPath::kAuto;
  FetchPath fetch = FetchPath::kView;
  AttentionForm form = AttentionForm::kAbsorbed;
  friend bool operator==(const Mechanisms&, const Mechanisms&) = default;
};

// "query=replicated,partials=tree"; what is not named stays as in `base`. kInvalidArgument names the keys, or
// the values of a key.
Result<Mechanisms> parse_mechanisms(const std::string& text, Mechanisms base);
// Every value of every key, and whether it is about prompts (owned rows) or about decoding: "query=gathered",
// …
struct MechanismChoice {
  std::string text;
  bool prefill = false;
};
std::vector<MechanismChoice> mechanism_choices();
// What differs from the defaults, as parse_mechanisms() reads it; empty: nothing.
std::string mechanisms_name(const Mechanisms& mechanisms);
// partials=tree needs a c that is a power of two, else kInvalidArgument.
Result<void> validate_mechanisms(const Mechanisms& mechanisms, DecodeWish decode);

// With pass-Q: the rank that computes, for the rows of `owner`, the partials of one residue class of a part
// of the entries: the first holder round the ring from the owner on.
int class_reader(const CacheGeometry& geometry, const Grouping& grouping, int owner, int64_t part,
                 int residue, int origin, int rank_count);

}  // namespace weft::kv
