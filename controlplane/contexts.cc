#include "controlplane/contexts.h"

#include <set>
#include <utility>

namespace weft::controlplane {

void Contexts::keep(RequestId id, Context context) {
  CHECK(!by_id_.contains(id), "request ", number(id), " ended twice");
  context.tokens = context.tokens.share();  // all frozen
  count_pieces(context, +1);
  by_use_.push_back({id, std::move(context)});
  by_id_.emplace(id, std::prev(by_use_.end()));
  while (count() > most_ || (tokens_ > most_tokens_ && count() > 0)) drop_first();
}

Context* Contexts::find(RequestId id) {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return nullptr;
  by_use_.splice(by_use_.end(), by_use_, found->second);
  return &found->second->context;
}

const Context* Contexts::look(RequestId id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &found->second->context;
}

void Contexts::drop_first() {
  count_pieces(by_use_.front().context, -1);
  by_id_.erase(by_use_.front().id);
  by_use_.pop_front();
}

void Contexts::count_pieces(const Context& context, int64_t sign) {
  context.tokens.for_each_piece([&](const void* piece, int64_t elements) {
    const auto at = pieces_.try_emplace(piece, 0).first;
    if (at->second == 0) tokens_ += elements;
    at->second += sign;
    if (at->second > 0) return;
    tokens_ -= elements;
    pieces_.erase(at);
  });
}

void Contexts::check_invariants() const {
  CHECK_EQ(by_use_.size(), by_id_.size());
  CHECK_LE(count(), most_);
  std::set<const void*> seen;
  int64_t tokens = 0;
  for (const Kept& kept : by_use_) {
    kept.context.tokens.for_each_piece([&](const void* piece, int64_t elements) {
      if (seen.insert(piece).second) tokens += elements;
    });
  }
  CHECK_EQ(tokens, tokens_);
  CHECK_EQ(seen.size(), pieces_.size());
  CHECK_LE(tokens_, most_tokens_);
}

}  // namespace weft::controlplane
