#include "tests/simulation/traffic.h"

#include <algorithm>

namespace weft::simulation {

Traffic::Traffic(Core& core) : core_(core) {
  Draw draw(mix64(core.setup.seed) ^ 0xd0c5);
  for (int i = 0; i < 4; ++i) {
    std::vector<uint32_t>& text = documents_.emplace_back();
    for (int64_t n = 0; n < core.setup.limits.max_context; ++n)
      text.push_back(static_cast<uint32_t>(draw.below(kVocabulary)));
  }
}

RequestArrived Traffic::arrival(Draw& draw) {
  const Limits& limits = core_.setup.limits;
  RequestArrived arrival;
  arrival.request = RequestId{++requests_};
  const int64_t place = draw.below(100);
  arrival.context = place < core_.setup.on_host                           ? ContextPlace::kHost
                    : place < core_.setup.on_host + core_.setup.on_device ? ContextPlace::kDevice
                                                                          : ContextPlace::kAuto;
  arrival.use_prefix_cache = draw.chance(arrival.context == ContextPlace::kHost ? 96 : 80);
  std::vector<uint32_t> text =
      requests_ > 1 && draw.chance(core_.setup.turns) ? turn(draw, arrival) : new_prompt(draw, arrival);
  const int64_t length = std::ssize(text);
  arrival.max_tokens = 1 + draw.below(draw.chance(core_.setup.short_answers) ? 10 : 40);
  if (draw.chance(90))
    arrival.max_tokens = std::clamp<int64_t>(limits.max_context - length, 1, arrival.max_tokens);
  if (draw.chance(50)) {
    for (int i = 0; i < 2; ++i) arrival.stop_tokens.push_back(static_cast<uint32_t>(draw.below(kVocabulary)));
  }
  arrival.grouping = wish(draw);
  arrival.digest = draw.chance(20);
  if (draw.chance(30)) arrival.priority = static_cast<int>(draw.below(3)) - 1;
  if (draw.chance(core_.setup.with_deadline))
    arrival.deadline =
        Duration(1 + draw.below(core_.setup.tick.count() * draw.one_of(std::array{100, 600, 3000})));
  const int64_t nan_row = draw.chance(core_.setup.nan) ? length - 1 + draw.below(arrival.max_tokens) : -1;
  Truth truth = truth_of(limits.geometry, arrival.sampling.seed, std::move(text), arrival.max_tokens,
                         arrival.stop_tokens, nan_row);
  if (draw.chance(core_.setup.poison)) truth.poison_row = draw.below(truth.rows());
  truth.poison_loads = draw.chance(core_.setup.poison);
  arrival.speculation = speculation(draw, truth);
  core_.workers.add(arrival.request, std::move(truth));
  const auto context = core_.plane.context(arrival.parent);
  const bool unknown = number(arrival.parent) != 0 && (!context || context->root != arrival.root);
  core_.ledger.arrived(arrival, core_.now, unknown);
  return arrival;
}

namespace {
// The hash model's salt is the tenant's.
void set_salt(RequestArrived& arrival, uint64_t salt) {
  arrival.sampling.seed = salt;
  arrival.root = kv::namespace_hash("m", "f", std::to_string(salt));
}
}  // namespace

std::vector<uint32_t> Traffic::new_prompt(Draw& draw, RequestArrived& arrival) const {
  const Limits& limits = core_.setup.limits;
  const auto& text = documents_[static_cast<size_t>(draw.below(4))];
  int64_t length = 1 + draw.below(limits.max_context * draw.one_of(std::array{3, 5, 7, 7, 10}) / 10);
  if (draw.chance(40))
    length = round_up(length, limits.geometry.block_tokens);  // full prefix hits need these
  length = std::min(length, limits.max_context);
  arrival.prompt.assign(text.begin(), text.begin() + length);
  if (draw.chance(40)) {
    for (int64_t i = draw.below(length); i < length; ++i)
      arrival.prompt[static_cast<size_t>(i)] = static_cast<uint32_t>(draw.below(kVocabulary));
  }
  set_salt(arrival, static_cast<uint64_t>(draw.below(2)));
  if (arrival.use_prefix_cache || draw.chance(50))
    arrival.hashes = kv::block_hashes(arrival.root, arrival.prompt, limits.geometry.block_tokens);
  return arrival.prompt;
}

// It goes on from one of the latest requests, which may still run, have failed or be forgotten.
std::vector<uint32_t> Traffic::turn(Draw& draw, RequestArrived& arrival) const {
  const Limits& limits = core_.setup.limits;
  const int64_t earlier = std::min<int64_t>(static_cast<int64_t>(requests_) - 1, 30);
  for (int i = 0; i < 5; ++i) {
    arrival.parent = RequestId{requests_ - 1 - static_cast<uint64_t>(draw.below(earlier))};
    if (core_.plane.context(arrival.parent)) break;
  }
  arrival.prompt.resize(static_cast<size_t>(1 + draw.below(12)));
  for (uint32_t& token : arrival.prompt) token = static_cast<uint32_t>(draw.below(kVocabulary));
  const Truth& before = core_.workers.truth(arrival.parent);
  set_salt(arrival, draw.chance(90) ? before.salt : 1 - before.salt);
  const auto context = core_.plane.context(arrival.parent);
  if (!context) return arrival.prompt;
  core_.verdict.expect(Checker::kTokens, context->tokens <= before.rows(), "the context of request ",
                       number(arrival.parent), " is longer than it can be");
  std::vector<uint32_t> rest = context->rest;
  rest.insert(rest.end(), arrival.prompt.begin(), arrival.prompt.end());
  arrival.hashes = kv::block_hashes(context->last, rest, limits.geometry.block_tokens);
  std::vector<uint32_t> text(before.tokens.begin(), before.tokens.begin() + context->tokens);
  text.insert(text.end(), arrival.prompt.begin(), arrival.prompt.end());
  return text;
}

Speculation Traffic::speculation(Draw& draw, const Truth& truth) const {
  Speculation out;
  out.source = static_cast<DraftSource>(draw.below(4));
  if (out.on()) out.draft_tokens = 1 + draw.below(6);
  if (out.source != DraftSource::kForced) return out;
  // The answer as it will be, with some guesses wrong, and perhaps more than there will be.
  out.forced.assign(truth.tokens.begin() + truth.prompt, truth.tokens.end());
  const int64_t wrong = draw.one_of(std::array{0, 10, 40, 100});
  for (uint32_t& token : out.forced) {
    if (draw.chance(wrong)) token = static_cast<uint32_t>(draw.below(kVocabulary));
  }
  for (int64_t more = draw.below(4); more > 0; --more) out.forced.push_back(0);
  return out;
}

GroupingWish Traffic::wish(Draw& draw) const {
  const int ranks = core_.plane.limits().places();
  GroupingWish wish;
  wish.prefill = static_cast<kv::Split>(draw.below(kv::kSplits));
  const std::vector<kv::DecodeWish> wishes = kv::decode_wishes(ranks);
  wish.decode = wishes[static_cast<size_t>(draw.below(std::ssize(wishes)))];
  int c = 0;
  if (draw.chance(50)) {
    do {
      c = 1 + static_cast<int>(draw.below(ranks));
    } while (ranks % c != 0);
  }
  wish.index = {static_cast<kv::IndexKind>(draw.below(2)), c};
  return wish;
}

RegroupRequested Traffic::regroup(Draw& draw, RequestId request) {
  RegroupRequested out{++commands_, request, draw.chance(30), draw.chance(80), draw.chance(40),
                       wish(draw),  false};
  // A tree needs powers of two.
  const int ranks = core_.plane.limits().places();
  const bool tree = (ranks & (ranks - 1)) == 0;
  if (draw.chance(30)) out.mechanisms = tree ? "query=replicated,partials=tree" : "context=pass-q";
  return out;
}

std::optional<RequestId> Traffic::any(Draw& draw) const {
  const auto& live = core_.ledger.live();
  if (live.empty()) return std::nullopt;
  return std::next(live.begin(), draw.below(std::ssize(live)))->first;
}

RequestId Traffic::any_ever(Draw& draw) const {
  const int64_t latest = std::min<int64_t>(static_cast<int64_t>(requests_), 20);
  return RequestId{requests_ + 1 - static_cast<uint64_t>(draw.below(latest + 1))};
}

}  // namespace weft::simulation
