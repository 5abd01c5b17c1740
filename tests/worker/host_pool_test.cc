// Goal: a block that goes through the host pool has the bits of one that never left, whatever the grouping it
// was spilled under and the one it is loaded under; and a page that is read before it is there is found out.
// Method: real runners in one process and hand-made plans. A prompt runs under one way, every part of its
// blocks is spilled by one holder, all device pages are filled with NaN, and the sequence goes on under
// another way, whose holders load what they hold in the very step that reads it. Logits are compared with
// those of one rank that has no host pool; bytes with the pages of the plan.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>

#include "tests/worker/ways.h"

namespace weft::test {
namespace {

constexpr int64_t kBlockTokens = 8;
constexpr int64_t kPrompt = 64;  // full blocks
constexpr int64_t kRows = 21;    // of the step that loads

LocalOptions options_of(const LocalModel& model, int ranks, CacheFormat cache, bool host) {
  LocalOptions options;
  options.rank_count = ranks;
  options.cache = cache;
  options.block_tokens = kBlockTokens;
  options.max_step_rows = 64;
  options.pool = {16 * model.config.kv_heads, 16};
  if (host) options.host = {9 * model.config.kv_heads, 9};
  options.table_count = 1;
  options.table_blocks = 16;
  return options;
}

// Calls each(stream, rank, page, host page) for every holder of every part of the prompt's blocks. In the
// host pool a part lies elsewhere than in any device pool.
void for_pages(const LocalWorkers& workers, const kv::CostSpan& span,
               const std::function<void(int part, kv::Stream, int rank, PageId, PageId)>& each) {
  const kv::CacheGeometry& geometry = workers.geometry();
  const int ranks = workers.options().rank_count;
  for (int64_t block = 0; block < kPrompt / kBlockTokens; ++block) {
    for (int part = 0; part < geometry.parts(); ++part) {
      const kv::Stream stream = geometry.stream_of(part);
      const auto page =
          static_cast<uint32_t>(block * geometry.stream(stream).parts + part - geometry.first_part(stream));
      const auto last = static_cast<uint32_t>(workers.options().host.count(stream) - 1);
      const RankMask holders = kv::part_holders(geometry, span.residency, block, part, span.origin, ranks);
      for (int rank = 0; rank < ranks; ++rank) {
        if (holds(holders, rank)) each(part, stream, rank, PageId{page}, PageId{last - page});
      }
    }
  }
}

void fill(wire::HostCopy* copy, kv::Stream stream, int rank, PageId page, PageId host_page) {
  copy->set_stream(static_cast<uint32_t>(stream));
  copy->set_rank(static_cast<uint32_t>(rank));
  copy->set_page(number(page));
  copy->set_host_page(number(host_page));
  copy->set_request(1);
}

// Each part once, by its last holder.
void add_spills(wire::StepPlan& plan, const LocalWorkers& workers, const kv::CostSpan& span) {
  wire::HostCopy* last = nullptr;
  PageId spilled = kNoPage;
  int spilled_part = -1;
  for_pages(workers, span, [&](int part, kv::Stream stream, int rank, PageId page, PageId host_page) {
    if (host_page != spilled || part != spilled_part) last = plan.add_spills();
    spilled = host_page;
    spilled_part = part;
    fill(last, stream, rank, page, host_page);
  });
}

void add_loads(wire::StepPlan& plan, const LocalWorkers& workers, const kv::CostSpan& span) {
  for_pages(workers, span, [&](int, kv::Stream stream, int rank, PageId page, PageId host_page) {
    fill(plan.add_loads(), stream, rank, page, host_page);
  });
}

std::vector<int64_t> host_bytes(const LocalWorkers& workers, const wire::StepPlan& plan) {
  std::vector<int64_t> bytes(static_cast<size_t>(workers.options().rank_count));
  for (const auto* copies : {&plan.spills(), &plan.loads()}) {
    for (const wire::HostCopy& copy : *copies) {
      bytes[copy.rank()] += workers.geometry().page_bytes(static_cast<kv::Stream>(copy.stream()));
    }
  }
  return bytes;
}

void poison(LocalWorkers& workers) {
  for (int rank = 0; rank < workers.options().rank_count; ++rank) {
    std::memset(workers.pool(rank).page(kv::Stream::kEntries, PageId{0}), 0xff,
                kv::pool_bytes(workers.geometry(), workers.options().pool));
  }
}

// Runs it and checks the bytes that go to and from the host pool.
void run(LocalWorkers& workers, const wire::StepPlan& plan) {
  const auto results = workers.run(plan).value();
  const std::vector<int64_t> expected = host_bytes(workers, plan);
  for (size_t rank = 0; rank < results.size(); ++rank) {
    EXPECT_EQ(measured(results[rank])[kv::CrossKind::kHost], expected[rank]);
  }
}

wire::StepPlan rows(kv::CostSpan span, const Way& way, int64_t start, int64_t count, uint64_t step,
                    const LocalModel& model) {
  span.start = start;
  span.rows = span.head_rows = count;
  span.split = count == 1 ? kv::Split::kShared : way.split;
  return plan_of(span, step, start >= kPrompt, model.config.vocabulary);
}

using Logits = std::map<std::pair<uint64_t, int64_t>, std::vector<float>>;

Logits without_host(const LocalModel& model, CacheFormat cache) {
  LocalWorkers workers(model, options_of(model, 1, cache, false));
  const Way way{1, {0, 1, 1}, kv::IndexKind::kCopied, kv::Split::kShared, 0};
  write_table(workers, span_of(way), 1);
  run(workers, rows(span_of(way), way, 0, kPrompt, 1, model));
  run(workers, rows(span_of(way), way, kPrompt, kRows, 2, model));
  run(workers, rows(span_of(way), way, kPrompt + kRows, 1, 3, model));
  return workers.logits();
}

void check_trip(LocalWorkers& workers, const Way& from, const Way& to, const Logits& expected) {
  SCOPED_TRACE(from.name() + " → " + to.name());
  const LocalModel& model = workers.model();
  workers.clear_logits();
  poison(workers);
  write_table(workers, span_of(from), from.ranks);
  run(workers, rows(span_of(from), from, 0, kPrompt, 1, model));
  wire::StepPlan spill;
  spill.set_step(2);
  add_spills(spill, workers, span_of(from));
  run(workers, spill);

  poison(workers);
  write_table(workers, span_of(to), to.ranks);
  wire::StepPlan load = rows(span_of(to), to, kPrompt, kRows, 3, model);
  add_loads(load, workers, span_of(to));
  run(workers, load);
  run(workers, load);  // a repeat
  run(workers, rows(span_of(to), to, kPrompt + kRows, 1, 4, model));
  for (const auto& [key, row] : expected) {
    if (key.second < kPrompt) continue;
    const auto found = workers.logits().find(key);
    ASSERT_NE(found, workers.logits().end()) << "position " << key.second;
    ASSERT_EQ(std::memcmp(found->second.data(), row.data(), row.size() * sizeof(float)), 0)
        << "position " << key.second;
  }
}

// Every way loads once, after a spill under another.
void check_model(const std::string& name, CacheFormat cache, bool draft_layers = false) {
  const LocalModel& model =
      local_model(std::string(WEFT_GOLDEN_FOLDER "/") + name, DType::kF32, draft_layers, false);
  const Logits expected = without_host(model, cache);
  ASSERT_EQ(std::ssize(expected), kRows + 2);  // one row of the prompt samples
  for (int ranks : {1, 2, 4, 8}) {
    LocalWorkers workers(model, options_of(model, ranks, cache, true));
    const std::vector<Way> ways = all_ways(ranks, model.config.index_layers() == 0);
    for (size_t i = 0; i < ways.size(); ++i) {
      check_trip(workers, ways[(i * 7 + ways.size() / 2) % ways.size()], ways[i], expected);
    }
  }
}

TEST(HostPool, KeepsTheBitsOfASparseModel) { check_model("deepseek_v32", DType::kF32); }
TEST(HostPool, KeepsTheBitsOfSharedSelections) { check_model("glm_moe_dsa", CacheDType::kFp8DsMla); }
TEST(HostPool, KeepsTheBitsOfGroupedQueries) { check_model("qwen3_moe", DType::kBF16); }
TEST(HostPool, KeepsTheBitsOfADraftLayer) { check_model("glm_moe_dsa_draft", DType::kF32, true); }

// What is loaded ahead, by a plan without rows, and spilled once more meanwhile is the same.
TEST(HostPool, LoadsAheadOfTheRows) {
  const LocalModel& model = local_model(WEFT_GOLDEN_FOLDER "/qwen3_moe", DType::kF32);
  const Logits expected = without_host(model, DType::kF32);
  for (int ranks : {1, 4}) {
    LocalWorkers workers(model, options_of(model, ranks, DType::kF32, true));
    const Way way{ranks, {0, ranks, ranks}, kv::IndexKind::kSplit, kv::Split::kZigzag, 0};
    write_table(workers, span_of(way), ranks);
    wire::StepPlan first = rows(span_of(way), way, 0, kPrompt, 1, model);
    run(workers, first);
    wire::StepPlan spill = rows(span_of(way), way, kPrompt, kRows, 2, model);  // beside rows
    add_spills(spill, workers, span_of(way));
    run(workers, spill);
    poison(workers);
    wire::StepPlan load;
    load.set_step(3);
    add_loads(load, workers, span_of(way));
    run(workers, load);
    workers.clear_logits();
    run(workers, rows(span_of(way), way, kPrompt, kRows, 4, model));
    for (int64_t position = kPrompt; position < kPrompt + kRows; ++position) {
      EXPECT_EQ(workers.logits().at({1, position}), expected.at({1, position})) << position;
    }
  }
}

TEST(HostPool, APlanForOneThatIsNotThereIsRefused) {
  const LocalModel& model = local_model(WEFT_GOLDEN_FOLDER "/qwen3_moe", DType::kF32);
  LocalWorkers workers(model, options_of(model, 2, DType::kF32, false));
  wire::StepPlan plan;
  plan.set_step(1);
  fill(plan.add_loads(), kv::Stream::kEntries, 1, PageId{0}, PageId{0});
  const auto refused = workers.run(plan);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(refused.error().field, "plan");
}

}  // namespace
}  // namespace weft::test
