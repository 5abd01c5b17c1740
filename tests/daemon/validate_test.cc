// Each bad field of a GenerateRequest gives an error with the right code, field and limit; good ones pass
// unchanged.
#include "daemon/validate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace weft::daemon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

ModelFacts model() { return {"toy", "deepseek_v3", 1000, 4096, {2, 3}, true, {}}; }

wire::GenerateRequest good() {
  wire::GenerateRequest request;
  request.mutable_tokens()->add_ids(5);
  return request;
}

Result<CheckedRequest> check(const wire::GenerateRequest& request) {
  return validate_request(request, model(), {}, 4);
}

TEST(Validate, DefaultsOfAnEmptyRequest) {
  auto checked = check(good());
  ASSERT_TRUE(checked.has_value()) << checked.error().text();
  EXPECT_EQ(checked->max_tokens, 16);
  EXPECT_EQ(checked->sampling.temperature, 0);
  EXPECT_EQ(checked->sampling.top_p, 1);
  EXPECT_THAT(checked->stop_tokens, ElementsAre(2, 3));
  EXPECT_TRUE(checked->use_prefix_cache);
  EXPECT_EQ(checked->grouping.prefill, kv::Split::kZigzag);
}

TEST(Validate, EveryFieldIsCarried) {
  wire::GenerateRequest request = good();
  request.set_model("toy");
  request.set_max_tokens(7);
  request.set_temperature(0.5f);
  request.set_top_k(40);
  request.set_top_p(0.9f);
  request.set_seed(11);
  request.set_ignore_eos(true);
  request.add_stop_tokens(9);
  request.set_prefill("interleave");
  request.set_decode("dcp(4)");
  request.set_index("split");
  request.set_digest(true);
  request.set_no_prefix_cache(true);
  request.set_cache_salt("tenant");
  request.set_credit(3);
  request.set_speculative("forced");
  request.set_draft_tokens(5);
  request.add_forced_drafts(8);
  auto checked = check(request);
  ASSERT_TRUE(checked.has_value()) << checked.error().text();
  EXPECT_EQ(checked->max_tokens, 7);
  EXPECT_EQ(checked->sampling.top_k, 40u);
  EXPECT_EQ(checked->sampling.seed, 11u);
  EXPECT_THAT(checked->stop_tokens, ElementsAre(9));
  EXPECT_EQ(checked->grouping.prefill, kv::Split::kInterleave);
  EXPECT_EQ(checked->grouping.decode, (kv::DecodeWish{kv::DecodeKind::kDcp, 4}));
  EXPECT_EQ(checked->grouping.index, kv::IndexKind::kSplit);
  EXPECT_TRUE(checked->digest);
  EXPECT_FALSE(checked->use_prefix_cache);
  EXPECT_EQ(checked->cache_salt, "tenant");
  EXPECT_EQ(checked->credit, 3u);
  EXPECT_EQ(checked->speculation, (controlplane::Speculation{controlplane::DraftSource::kForced, 5, {8}}));
}

struct BadCase {
  const char* name;
  std::function<void(wire::GenerateRequest&)> spoil;
  ErrorCode code;
  const char* field;
  const char* says;
};

class BadField : public testing::TestWithParam<BadCase> {};

TEST_P(BadField, IsNamed) {
  wire::GenerateRequest request = good();
  GetParam().spoil(request);
  auto checked = check(request);
  ASSERT_FALSE(checked.has_value());
  EXPECT_EQ(error_code_name(checked.error().code), std::string(error_code_name(GetParam().code)));
  EXPECT_EQ(checked.error().field, GetParam().field);
  EXPECT_THAT(checked.error().message, HasSubstr(GetParam().says));
}

constexpr auto kInvalid = ErrorCode::kInvalidArgument;
using G = wire::GenerateRequest;
INSTANTIATE_TEST_SUITE_P(
    All, BadField,
    testing::Values(
        BadCase{"model", [](G& g) { g.set_model("other"); }, ErrorCode::kNotFound, "model", "'other'"},
        BadCase{"no_prompt", [](G& g) { g.clear_prompt(); }, kInvalid, "prompt", "missing"},
        BadCase{"empty_text", [](G& g) { g.set_text(""); }, kInvalid, "text", "empty"},
        BadCase{"empty_tokens", [](G& g) { g.mutable_tokens()->clear_ids(); }, kInvalid, "tokens",
                "at least one"},
        BadCase{"cold", [](G& g) { g.set_temperature(-0.1f); }, kInvalid, "temperature", "-0.1"},
        BadCase{"hot", [](G& g) { g.set_temperature(101); }, kInvalid, "temperature", "100"},
        BadCase{"nan", [](G& g) { g.set_temperature(NAN); }, kInvalid, "temperature", "nan"},
        BadCase{"infinite", [](G& g) { g.set_temperature(INFINITY); }, kInvalid, "temperature", "inf"},
        BadCase{"top_p_zero", [](G& g) { g.set_top_p(0); }, kInvalid, "top_p", "above 0"},
        BadCase{"top_p_large", [](G& g) { g.set_top_p(1.5f); }, kInvalid, "top_p", "1.5"},
        BadCase{"top_p_nan", [](G& g) { g.set_top_p(NAN); }, kInvalid, "top_p", "nan"},
        BadCase{"top_k", [](G& g) { g.set_top_k(1001); }, kInvalid, "top_k", "1000"},
        BadCase{"stop_id", [](G& g) { g.add_stop_tokens(1000); }, kInvalid, "stop_tokens", "index 0"},
        BadCase{"stop_count",
                [](G& g) {
                  for (int i = 0; i < 65; ++i) g.add_stop_tokens(1);
                },
                ErrorCode::kTooLarge, "stop_tokens", "limit 64"},
        BadCase{"prefill", [](G& g) { g.set_prefill("zagzig"); }, kInvalid, "prefill", "zagzig"},
        BadCase{"decode", [](G& g) { g.set_decode("fast"); }, kInvalid, "decode", "fast"},
        BadCase{"dcp3", [](G& g) { g.set_decode("dcp(3)"); }, kInvalid, "decode", "3"},
        BadCase{"dcp8", [](G& g) { g.set_decode("dcp(8)"); }, kInvalid, "decode", "8"},
        BadCase{"index", [](G& g) { g.set_index("halved"); }, kInvalid, "index", "halved"},
        BadCase{"salt", [](G& g) { g.set_cache_salt(std::string(257, 'x')); }, ErrorCode::kTooLarge,
                "cache_salt", "limit 256"},
        BadCase{"drafts_by", [](G& g) { g.set_speculative("magic"); }, kInvalid, "speculative", "magic"},
        BadCase{"drafts_off", [](G& g) { g.set_draft_tokens(2); }, kInvalid, "draft_tokens", "source"},
        BadCase{"lax", [](G& g) { g.set_priority(1001); }, kInvalid, "priority", "1001"},
        BadCase{"urgent", [](G& g) { g.set_priority(-1001); }, kInvalid, "priority", "-1000"},
        BadCase{"many_drafts",
                [](G& g) {
                  g.set_speculative("lookup");
                  g.set_draft_tokens(17);
                },
                kInvalid, "draft_tokens", "at most 16"},
        BadCase{"no_script", [](G& g) { g.set_speculative("forced"); }, kInvalid, "forced_drafts", "missing"},
        BadCase{"script_unasked", [](G& g) { g.add_forced_drafts(1); }, kInvalid, "forced_drafts", "forced"},
        BadCase{"script_id",
                [](G& g) {
                  g.set_speculative("forced");
                  g.add_forced_drafts(1000);
                },
                kInvalid, "forced_drafts", "index 0"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Validate, DraftsAreTheDaemonsUnlessTheRequestSays) {
  ModelFacts facts = model();
  facts.speculation = {controlplane::DraftSource::kLookup, 6, {}};
  wire::GenerateRequest request = good();
  EXPECT_EQ(validate_request(request, facts, {}, 4)->speculation, facts.speculation);
  request.set_draft_tokens(2);
  EXPECT_EQ(validate_request(request, facts, {}, 4)->speculation.draft_tokens, 2);
  request.set_draft_tokens(0);
  request.set_speculative("off");
  EXPECT_FALSE(validate_request(request, facts, {}, 4)->speculation.on());
}

TEST(Validate, TheDraftLayerMustBeLoaded) {
  ModelFacts facts = model();
  wire::GenerateRequest request = good();
  request.set_speculative("mtp");
  const auto refused = validate_request(request, facts, {}, 4);
  ASSERT_FALSE(refused.has_value());
  EXPECT_EQ(refused.error().code, ErrorCode::kFailedPrecondition);
  EXPECT_EQ(refused.error().field, "speculative");
  facts.speculation = {controlplane::DraftSource::kMtp, 2, {}};
  EXPECT_EQ(validate_request(request, facts, {}, 4)->speculation, facts.speculation);
}

TEST(Validate, TextNeedsATokenizer) {
  ModelFacts facts = model();
  facts.has_tokenizer = false;
  wire::GenerateRequest request;
  request.set_text("hello");
  auto checked = validate_request(request, facts, {}, 4);
  ASSERT_FALSE(checked.has_value());
  EXPECT_EQ(checked.error().code, ErrorCode::kUnsupported);
}

TEST(Validate, PromptTokens) {
  EXPECT_TRUE(validate_prompt({0, 999}, "tokens", model()).has_value());
  const auto outside = validate_prompt({0, 1000}, "tokens", model());
  ASSERT_FALSE(outside.has_value());
  EXPECT_EQ(outside.error().field, "tokens");
  EXPECT_THAT(outside.error().message, HasSubstr("token id 1000 at index 1"));
  EXPECT_EQ(validate_prompt({}, "text", model()).error().field, "text");
}

}  // namespace
}  // namespace weft::daemon
