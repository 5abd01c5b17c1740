// The contexts of requests that have ended, for turns that go on from them: tokens, and what names their
// blocks.
//
// A turn shares its parent's tokens (shared_list.h), so that a conversation is kept once, however many turns
// it had. Bounded in contexts and in tokens, those shared counted once: what was used longest ago goes first.
// Only names and tokens are kept here; whether their blocks are still cached is the prefix cache's affair.
// One thread.
#pragma once

#include <cstdint>
#include <list>
#include <unordered_map>

#include "controlplane/shared_list.h"
#include "proto/vocab/ids.h"

namespace weft::controlplane {

struct Context {
  TokenList tokens;   // prompt and answer
  Identities hashes;  // of its first full blocks; the last ones may be missing
  kv::BlockHash root;
};

class Contexts {
 public:
  Contexts(int64_t most, int64_t most_tokens) : most_(most), most_tokens_(most_tokens) {}

  void keep(RequestId id, Context context);
  // Null: never kept, or forgotten. Counts as a use; valid until keep().
  Context* find(RequestId id);
  const Context* look(RequestId id) const;  // no use
  int64_t count() const { return std::ssize(by_use_); }
  int64_t tokens() const { return tokens_; }
  void check_invariants() const;

 private:
  struct Kept {
    RequestId id{};
    Context context;
  };
  using ByUse = std::list<Kept>;  // the longest ago first
  void count_pieces(const Context& context, int64_t sign);
  void drop_first();

  int64_t most_, most_tokens_;
  ByUse by_use_;
  std::unordered_map<RequestId, ByUse::iterator> by_id_;
  std::unordered_map<const void*, int64_t> pieces_;  // of tokens: contexts that share it
  int64_t tokens_ = 0;                               // in them
};

}  // namespace weft::controlplane
