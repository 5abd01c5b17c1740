// Plan → bytes → Plan gives the same plan, for random plans: no field is lost. Equal plans give equal bytes.
#include "daemon/plan_codec.h"

#include <gtest/gtest.h>

#include "proto/vocab/random.h"

namespace weft::daemon {
namespace {

using controlplane::Plan;
using controlplane::Span;

Span random_span(SplitMix64& random) {
  Span span;
  span.request = RequestId{random.next()};
  span.table = TableId{static_cast<uint32_t>(random.below(1000))};
  span.table_version = static_cast<uint32_t>(random.next());
  span.start = static_cast<int64_t>(random.below(1 << 30));
  span.split = static_cast<kv::Split>(random.below(3));
  span.grouping = {static_cast<int>(random.below(4)), 4, 1 << random.below(3)};
  span.origin = static_cast<int>(random.below(8));
  span.index_c = 1 + static_cast<int>(random.below(8));
  span.index_copied = random.below(2) == 0;
  span.host_blocks = static_cast<int64_t>(random.below(1000));
  span.no_write = random.below(2) == 1;
  span.prefill = random.below(2) == 1;
  if (random.below(2) == 1) {
    span.rows = 1;
    span.has_input_ref = true;
    span.input_ref = {StepId{random.next()}, static_cast<uint32_t>(random.below(64))};
  } else {
    span.rows = static_cast<int64_t>(1 + random.below(50));
    for (int64_t i = 0; i < span.rows; ++i) span.tokens.push_back(static_cast<uint32_t>(random.next()));
  }
  span.sample_rows = static_cast<int64_t>(random.below(4));
  span.draft_tokens = static_cast<int64_t>(random.below(4));
  for (uint64_t i = random.below(3); i > 0; --i) {
    span.next_tokens.push_back(static_cast<uint32_t>(random.below(1000)));
  }
  if (span.sample_rows > 0) {
    span.sample_index = static_cast<uint32_t>(random.below(64));
    span.sampler_rank = static_cast<int>(random.below(8));
  }
  span.sampling = {static_cast<float>(random.uniform()), static_cast<uint32_t>(random.below(100)),
                   static_cast<float>(random.uniform()), random.next()};
  span.digest = random.below(2) == 1;
  return span;
}

Plan random_plan(SplitMix64& random) {
  Plan plan;
  plan.step = StepId{random.next()};
  for (uint64_t i = random.below(5); i > 0; --i) {
    plan.copies.push_back({static_cast<kv::Stream>(random.below(2)), static_cast<int>(random.below(8)),
                           PageId{static_cast<uint32_t>(random.next())}, static_cast<int>(random.below(8)),
                           PageId{static_cast<uint32_t>(random.next())}, RequestId{random.next()}});
  }
  for (auto* copies : {&plan.spills, &plan.loads}) {
    for (uint64_t i = random.below(4); i > 0; --i) {
      copies->push_back({static_cast<kv::Stream>(random.below(2)), static_cast<int>(random.below(8)),
                         PageId{static_cast<uint32_t>(random.next())},
                         PageId{static_cast<uint32_t>(random.next())}, RequestId{random.next()}});
    }
  }
  for (uint64_t i = random.below(8); i > 0; --i) plan.spans.push_back(random_span(random));
  plan.padded = {static_cast<uint32_t>(random.below(4096)), static_cast<uint32_t>(random.below(64)),
                 static_cast<uint32_t>(random.below(64))};
  return plan;
}

Span decode_span(const wire::Span& from) {
  Span to;
  to.request = RequestId{from.request()};
  to.table = TableId{from.table()};
  to.table_version = from.table_version();
  to.start = static_cast<int64_t>(from.start());
  to.rows = from.rows();
  to.split = static_cast<kv::Split>(from.split());
  to.grouping = {static_cast<int>(from.group_base()), static_cast<int>(from.group_width()),
                 static_cast<int>(from.group_c())};
  to.origin = static_cast<int>(from.origin());
  to.index_c = static_cast<int>(from.index_c());
  to.index_copied = from.index_copied();
  to.host_blocks = from.host_blocks();
  to.no_write = from.no_write();
  to.prefill = from.prefill();
  to.tokens.assign(from.tokens().begin(), from.tokens().end());
  to.has_input_ref = from.has_input();
  if (from.has_input()) to.input_ref = {StepId{from.input().step()}, from.input().sample_index()};
  to.sample_rows = from.sample_rows();
  to.draft_tokens = from.draft_tokens();
  to.next_tokens.assign(from.next_tokens().begin(), from.next_tokens().end());
  to.sample_index = from.sample_index();
  to.sampler_rank = static_cast<int>(from.sampler_rank());
  if (from.has_sampling()) {
    to.sampling = {from.sampling().temperature(), from.sampling().top_k(), from.sampling().top_p(),
                   from.sampling().seed()};
  }
  to.digest = from.digest();
  return to;
}

Plan decode(const wire::StepPlan& message) {
  Plan plan;
  plan.step = StepId{message.step()};
  for (const wire::PageCopy& from : message.copies()) {
    plan.copies.push_back({static_cast<kv::Stream>(from.stream()), static_cast<int>(from.from_rank()),
                           PageId{from.from_page()}, static_cast<int>(from.to_rank()), PageId{from.to_page()},
                           RequestId{from.request()}});
  }
  const auto host_copy = [](const wire::HostCopy& from) {
    return controlplane::HostCopy{static_cast<kv::Stream>(from.stream()), static_cast<int>(from.rank()),
                                  PageId{from.page()}, PageId{from.host_page()}, RequestId{from.request()}};
  };
  for (const wire::HostCopy& from : message.spills()) plan.spills.push_back(host_copy(from));
  for (const wire::HostCopy& from : message.loads()) plan.loads.push_back(host_copy(from));
  for (const wire::Span& from : message.spans()) plan.spans.push_back(decode_span(from));
  plan.padded = {message.padded().prefill(), message.padded().decode(), message.padded().head()};
  return plan;
}

void expect_equal(const std::vector<controlplane::HostCopy>& a,
                  const std::vector<controlplane::HostCopy>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(std::tie(a[i].stream, a[i].rank, a[i].page, a[i].host_page, a[i].request),
              std::tie(b[i].stream, b[i].rank, b[i].page, b[i].host_page, b[i].request));
  }
}

void expect_equal(const Plan& a, const Plan& b) {
  EXPECT_EQ(a.step, b.step);
  ASSERT_EQ(a.copies.size(), b.copies.size());
  for (size_t i = 0; i < a.copies.size(); ++i) {
    const auto &x = a.copies[i], &y = b.copies[i];
    EXPECT_EQ(std::tie(x.stream, x.from_rank, x.from_page, x.to_rank, x.to_page, x.request),
              std::tie(y.stream, y.from_rank, y.from_page, y.to_rank, y.to_page, y.request));
  }
  expect_equal(a.spills, b.spills);
  expect_equal(a.loads, b.loads);
  ASSERT_EQ(a.spans.size(), b.spans.size());
  for (size_t i = 0; i < a.spans.size(); ++i) {
    const Span &x = a.spans[i], &y = b.spans[i];
    EXPECT_EQ(
        std::tie(x.request, x.table, x.table_version, x.start, x.rows, x.split, x.grouping, x.origin,
                 x.index_c, x.index_copied, x.host_blocks, x.no_write, x.prefill, x.tokens, x.has_input_ref,
                 x.sample_rows, x.draft_tokens, x.next_tokens, x.sample_index, x.sampler_rank, x.digest),
        std::tie(y.request, y.table, y.table_version, y.start, y.rows, y.split, y.grouping, y.origin,
                 y.index_c, y.index_copied, y.host_blocks, y.no_write, y.prefill, y.tokens, y.has_input_ref,
                 y.sample_rows, y.draft_tokens, y.next_tokens, y.sample_index, y.sampler_rank, y.digest));
    EXPECT_EQ(std::tie(x.input_ref.step, x.input_ref.sample_index),
              std::tie(y.input_ref.step, y.input_ref.sample_index));
    EXPECT_EQ(std::tie(x.sampling.temperature, x.sampling.top_k, x.sampling.top_p, x.sampling.seed),
              std::tie(y.sampling.temperature, y.sampling.top_k, y.sampling.top_p, y.sampling.seed));
  }
  EXPECT_EQ(std::tie(a.padded.prefill, a.padded.decode, a.padded.head),
            std::tie(b.padded.prefill, b.padded.decode, b.padded.head));
}

TEST(PlanCodec, RoundTripOfRandomPlans) {
  const uint64_t seed = 7;
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  SplitMix64 random(seed);
  for (int i = 0; i < 300; ++i) {
    const Plan plan = random_plan(random);
    const std::string bytes = plan_bytes(plan, std::chrono::seconds(7));
    EXPECT_EQ(bytes, plan_bytes(plan, std::chrono::seconds(7)));
    wire::StepPlan message;
    ASSERT_TRUE(message.ParseFromString(bytes));
    EXPECT_EQ(message.wait_ms(), 7000u);
    expect_equal(plan, decode(message));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft::daemon
