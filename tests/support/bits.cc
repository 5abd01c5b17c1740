#include "tests/support/bits.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>

#include "proto/vocab/random.h"

namespace weft::test {

std::string BitsCase::name() const {
  return "W=" + std::to_string(ranks) + " prefill=" + kv::split_name(prefill) +
         " decode=" + kv::decode_name(decode) + " index=" + kv::index_name(index) +
         " chunk=" + (chunk == 0 ? "all" : std::to_string(chunk)) + (regrouped ? " regrouped" : "") +
         (mechanisms == kv::Mechanisms{} ? "" : " " + kv::mechanisms_name(mechanisms)) +
         std::array{"", " all drafts", " some drafts", " no draft"}[static_cast<size_t>(drafts)];
}

std::vector<BitsCase> mechanisms_of(int ranks, int64_t chunk, bool with_index) {
  std::vector<BitsCase> out;
  if (ranks == 1) return out;
  for (const kv::DecodeWish& decode : kv::decode_wishes(ranks)) {
    BitsCase plain{ranks, kv::Split::kZigzag, decode, {}, chunk, false};
    const auto add = [&](const auto& change) { change(out.emplace_back(plain)); };
    add([](BitsCase& one) { one.prefill = kv::Split::kContiguous; });
    for (const kv::Split split : {kv::Split::kZigzag, kv::Split::kInterleave}) {
      add([&](BitsCase& one) {
        one.prefill = split;
        one.mechanisms.context = kv::ContextPath::kPassQ;
      });
      add([&](BitsCase& one) {
        one.prefill = split;
        one.mechanisms.context = kv::ContextPath::kPassKv;
        one.mechanisms.fetch = kv::FetchPath::kCopies;
      });
    }
    add([](BitsCase& one) { one.mechanisms.context = kv::ContextPath::kPassKv; });
    for (const char* text : {"query=replicated", "partials=tree", "query=replicated,partials=tree"}) {
      if (decode.c == 1) continue;
      const kv::Mechanisms mechanisms = kv::parse_mechanisms(text, {}).value();
      if (!kv::validate_mechanisms(mechanisms, decode)) continue;
      add([&](BitsCase& one) { one.mechanisms = mechanisms; });
    }
    for (int c = 2; c <= ranks && with_index; c *= 2) {
      add([&](BitsCase& one) { one.index = {kv::IndexKind::kCopied, c}; });
      add([&](BitsCase& one) { one.index = {kv::IndexKind::kSplit, c}; });
    }
  }
  for (size_t i = 0; i < out.size(); i += 3) out[i].regrouped = true;
  return out;
}

std::vector<BitsCase> cases_of(int ranks, int64_t chunk, bool with_index) {
  std::vector<BitsCase> out;
  for (const kv::Split prefill : {kv::Split::kShared, kv::Split::kZigzag, kv::Split::kInterleave}) {
    for (const kv::DecodeWish& decode : kv::decode_wishes(ranks)) {
      for (const kv::IndexKind index : {kv::IndexKind::kCopied, kv::IndexKind::kSplit}) {
        if ((index == kv::IndexKind::kSplit && !with_index) || decode.width > 1) continue;
        for (const bool regrouped : {false, true}) {
          if (ranks == 1 && (prefill != kv::Split::kShared || regrouped)) continue;
          out.push_back({ranks, prefill, decode, index, chunk, regrouped});
        }
      }
    }
  }
  return out;
}

BitsHarness::BitsHarness(const BitsModel& model)
    : model_(model),
      weights_(local_model(model.folder, model.weight_dtype, model.draft_layers, model.split_experts)) {
  SplitMix64 random(41);
  for (int64_t i = 0; i < model_.prompt_tokens; ++i) {
    prompt_.push_back(static_cast<uint32_t>(random.below(static_cast<uint64_t>(weights_.config.vocabulary))));
  }
  // The context must reach every shard, or the comparison proves less than it says.
  unsigned shards = 0;
  for (int64_t block = 0; block * model_.block_tokens < model_.prompt_tokens; ++block) {
    shards |= 1u << kv::residue_class(block, kv::kShards);
  }
  CHECK_EQ(shards, 0xffu);

  BitsCase plain;
  plain.decode = {kv::DecodeKind::kTp, 1};
  EngineOptions on_device = engine_options(1, 0, 1);
  on_device.workers.pool.entries = on_device.workers.pool.index_keys * weights_.config.kv_heads;
  LocalEngine engine(weights_, on_device);
  RequestOptions reference = request_options(plain, false);
  reference.context = controlplane::ContextPlace::kDevice;
  const RequestId request = engine.submit(prompt_, reference);
  engine.run_all();
  CHECK(engine.outcome(request).finished);
  reference_tokens_ = engine.outcome(request).tokens;
  CHECK_EQ(std::ssize(reference_tokens_), model_.answer_tokens);
  for (int64_t position = 0; position < model_.prompt_tokens + model_.answer_tokens - 1; ++position) {
    reference_.push_back(engine.workers().logits().at({number(request), position}));
  }
  reference_notice_ = engine.outcome(request).notice;
  for (const auto& [key, logits] : engine.workers().guesses())
    reference_guesses_[{std::get<1>(key), std::get<2>(key)}] = logits;
  CHECK_EQ(reference_guesses_.empty(), !model_.draft_layers);
}

EngineOptions BitsHarness::engine_options(int ranks, int64_t chunk, int64_t requests) const {
  const int64_t tokens = model_.prompt_tokens + model_.answer_tokens;
  const int64_t blocks = (tokens + model_.block_tokens) / model_.block_tokens + 1;
  EngineOptions options;
  options.workers.rank_count = ranks;
  options.workers.cache = model_.cache;
  options.workers.block_tokens = model_.block_tokens;
  options.workers.max_step_rows = std::max<int64_t>(model_.prompt_tokens, 512);
  const int64_t pages = 2 * blocks * requests;
  options.workers.pool = {pages * weights_.config.kv_heads, pages};
  if (model_.on_host) {
    options.hot_tokens = model_.hot_tokens;
    if (model_.draft_layers) options.host_window = 16;  // a narrow one leaves no room for some guesses
    const int64_t window = options.host_window + ceil_div(model_.hot_tokens, model_.block_tokens);
    options.workers.pool.entries = requests * window;
    options.workers.host = {pages, pages};
  }
  options.workers.table_count = 2 * requests + 4;
  options.workers.threads = ranks == 2 ? 2 : 1;  // the reference has one
  options.max_chunk_rows = chunk;
  options.max_context = round_up(tokens + model_.block_tokens, model_.block_tokens);
  return options;
}

RequestOptions BitsHarness::request_options(const BitsCase& one, bool prefix_cache) const {
  RequestOptions options;
  options.grouping = {one.prefill, one.decode, one.index, one.mechanisms};
  options.max_tokens = model_.answer_tokens;
  options.sampling = model_.sampling;
  options.use_prefix_cache = prefix_cache;
  if (model_.on_host) {
    options.context = controlplane::ContextPlace::kHost;
    if (!prefix_cache) options.salt = one.name();  // it shares with nobody
    options.use_prefix_cache = true;
  }
  if (model_.draft_layers) options.speculation = {controlplane::DraftSource::kMtp, 3, {}};
  if (one.drafts == Drafts::kOff) return options;
  options.speculation = {controlplane::DraftSource::kForced, 5, reference_tokens_};
  for (size_t i = 0; i < reference_tokens_.size(); ++i) {
    if (one.drafts == Drafts::kNone || (one.drafts == Drafts::kSome && i % 3 == 2))
      options.speculation.forced[i] ^= 1;
  }
  return options;
}

void BitsHarness::drive(LocalEngine& engine, const std::vector<std::pair<RequestId, BitsCase>>& requests) {
  // After 2 tokens: the next grouping in the list (thinner or wider); after 7: one that differs again; then
  // back.
  std::vector<size_t> sent(requests.size(), 0);
  const int64_t turns[] = {2, 7, 10};
  do {
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto& [request, one] = requests[i];
      if (!one.regrouped || sent[i] >= std::size(turns)) continue;
      if (std::ssize(engine.outcome(request).tokens) < turns[sent[i]]) continue;
      const std::vector<kv::DecodeWish> decodes = kv::decode_wishes(one.ranks);
      const size_t at =
          static_cast<size_t>(std::find(decodes.begin(), decodes.end(), one.decode) - decodes.begin());
      ++sent[i];
      const kv::DecodeWish next =
          sent[i] == std::size(turns) ? one.decode : decodes[(at + sent[i]) % decodes.size()];
      const bool split = sent[i] % 2 == 1 && one.index.kind == kv::IndexKind::kCopied;
      engine.regroup(request, next, {split ? kv::IndexKind::kSplit : kv::IndexKind::kCopied, one.index.c});
    }
  } while (engine.step());
  for (const auto& [request, one] : requests) {
    const RequestOutcome& outcome = engine.outcome(request);
    EXPECT_TRUE(outcome.finished) << one.name();
    expect_drafts(engine, request, one);
    if (!one.regrouped) continue;
    EXPECT_EQ(outcome.regroups.size(), std::size(turns)) << one.name();
    for (const auto& notice : outcome.regroups)
      EXPECT_EQ(notice.error.code, ErrorCode::kOk) << notice.error.text();
  }
}

// The script did what it was to do.
void BitsHarness::expect_drafts(LocalEngine& engine, RequestId request, const BitsCase& one) {
  const controlplane::FinishedNotice& notice = engine.outcome(request).notice;
  if (model_.draft_layers && one.drafts == Drafts::kOff) {
    EXPECT_EQ(notice.drafted_tokens, reference_notice_.drafted_tokens) << one.name();
    EXPECT_EQ(notice.accepted_tokens, reference_notice_.accepted_tokens) << one.name();
    return;
  }
  EXPECT_EQ(notice.drafted_tokens > 0, one.drafts != Drafts::kOff) << one.name();
  EXPECT_EQ(notice.accepted_tokens > 0, one.drafts == Drafts::kAll || one.drafts == Drafts::kSome)
      << one.name();
  EXPECT_EQ(notice.accepted_tokens == notice.drafted_tokens,
            one.drafts == Drafts::kAll || one.drafts == Drafts::kOff)
      << one.name();
}

int64_t BitsHarness::compare_guesses(LocalEngine& engine, RequestId request, int64_t from) {
  int64_t bad = 0;
  for (const auto& [key, expected] : reference_guesses_) {
    if (key.first < from) continue;
    const auto found = engine.workers().guesses().find({number(request), key.first, key.second});
    ++guesses_compared_;
    if (found == engine.workers().guesses().end() ||
        std::memcmp(found->second.data(), expected.data(), expected.size() * sizeof(float)) != 0)
      ++bad;
  }
  return bad;
}

int64_t BitsHarness::compare(LocalEngine& engine, RequestId request, const std::string& what, int64_t from) {
  int64_t bad = 0;
  for (int64_t position = from; position < std::ssize(reference_); ++position) {
    const auto found = engine.workers().logits().find({number(request), position});
    if (found == engine.workers().logits().end()) {
      ++bad;
      continue;
    }
    ++rows_compared_;
    const std::vector<float>& expected = reference_[static_cast<size_t>(position)];
    if (std::memcmp(found->second.data(), expected.data(), expected.size() * sizeof(float)) != 0) ++bad;
  }
  if (engine.outcome(request).tokens != reference_tokens_) ++bad;
  bad += compare_guesses(engine, request, from);
  if (bad != 0 && reported_++ < 20) {
    std::printf("  %lld rows differ: %s\n", static_cast<long long>(bad), what.c_str());
  }
  return bad;
}

int64_t BitsHarness::mismatches_alone(const BitsCase& one) {
  LocalEngine engine(weights_, engine_options(one.ranks, one.chunk, 2));
  const RequestId first = engine.submit(prompt_, request_options(one, true));
  drive(engine, {{first, one}});
  int64_t bad = compare(engine, first, one.name(), 0);
  // The same prompt again: its full blocks come from the prefix cache.
  const RequestId second = engine.submit(prompt_, request_options(one, true));
  drive(engine, {{second, one}});
  const int64_t cached = engine.outcome(second).notice.cached_tokens;
  EXPECT_EQ(cached, model_.prompt_tokens / model_.block_tokens * model_.block_tokens) << one.name();
  bad += compare(engine, second, one.name() + " (prefix hit)", cached);
  return bad;
}

int64_t BitsHarness::mismatches_batched(const std::vector<BitsCase>& cases) {
  LocalEngine engine(weights_, engine_options(cases[0].ranks, cases[0].chunk, std::ssize(cases)));
  std::vector<std::pair<RequestId, BitsCase>> requests;
  for (const BitsCase& one : cases)
    requests.emplace_back(engine.submit(prompt_, request_options(one, false)), one);
  drive(engine, requests);
  int64_t bad = 0;
  for (const auto& [request, one] : requests) bad += compare(engine, request, one.name() + " (batched)", 0);
  return bad;
}

}  // namespace weft::test
