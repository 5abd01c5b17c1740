// Goal: rows that read entries from the host pool, straight or through the hot buffer, have the bits of rows
// that read them in device pools, whatever the grouping; and what they fetch is counted, each entry once.
// Method: real runners in one process and hand-made plans. A prompt runs, every part of its blocks is
// spilled, all entries on devices are filled with NaN, and the sequence goes on with its table naming host
// pages. Logits are compared with those of one rank that has no host pool.
#include <gtest/gtest.h>

#include <cstring>

#include "tests/worker/ways.h"

namespace weft::test {
namespace {

constexpr int64_t kBlockTokens = 8;
constexpr int64_t kPrompt = 64;  // full blocks
constexpr int64_t kBlocks = kPrompt / kBlockTokens;
constexpr int64_t kRows = 21;    // of the chunk that reads the host
constexpr int64_t kDecoded = 6;  // rows, one a step
constexpr int64_t kTableBlocks = 16;

LocalOptions options_of(int ranks, CacheFormat cache, bool host, int64_t hot_pages) {
  LocalOptions options;
  options.rank_count = ranks;
  options.cache = cache;
  options.block_tokens = kBlockTokens;
  options.max_step_rows = 64;
  options.pool = {kTableBlocks + hot_pages, kTableBlocks};
  if (host) options.host = {kBlocks + 1, kBlocks + 1};
  options.hot_pages = hot_pages;
  options.table_count = 1;
  options.table_blocks = kTableBlocks;
  return options;
}

PageId host_page(int64_t block) { return PageId{static_cast<uint32_t>(kBlocks - block)}; }

// Entries alone, each block by its last holder.
wire::StepPlan spill(const kv::CostSpan& span, int ranks, const kv::CacheGeometry& geometry) {
  wire::StepPlan plan;
  plan.set_step(2);
  for (int64_t block = 0; block < kBlocks; ++block) {
    const RankMask holders = kv::part_holders(geometry, span.residency, block, 0, span.origin, ranks);
    wire::HostCopy* copy = plan.add_spills();
    copy->set_stream(static_cast<uint32_t>(kv::Stream::kEntries));
    for (int rank = 0; rank < ranks; ++rank) {
      if (holds(holders, rank)) copy->set_rank(static_cast<uint32_t>(rank));
    }
    copy->set_page(static_cast<uint32_t>(block));
    copy->set_host_page(number(host_page(block)));
  }
  return plan;
}

// From now on the table names no device page for entries of the prompt, and there is nothing in them.
void move_to_host(LocalWorkers& workers, int64_t hot_pages) {
  const int ranks = workers.options().rank_count;
  std::vector<PageId> host, hot;
  for (int64_t block = 0; block < kBlocks; ++block) {
    std::vector<PageId> pages(static_cast<size_t>(ranks), kNoPage);
    const auto index = workers.control().pages(TableId{0}, block, 1);
    pages.insert(pages.end(), index.begin(), index.end());
    workers.control().write_table(TableId{0}, block, pages);
    host.push_back(host_page(block));
    for (int rank = 0; rank < ranks; ++rank) {
      std::memset(workers.pool(rank).page(kv::Stream::kEntries, PageId{static_cast<uint32_t>(block)}), 0xff,
                  static_cast<size_t>(workers.geometry().page_bytes(kv::Stream::kEntries)));
    }
  }
  for (int64_t i = 0; i < hot_pages * ranks; ++i)
    hot.push_back(PageId{static_cast<uint32_t>(kTableBlocks + i / ranks)});
  workers.control().write_host_table(TableId{0}, 0, host);
  workers.control().write_hot_pages(TableId{0}, hot);
  workers.control().set_table_version(TableId{0}, 2);
}

wire::StepPlan rows(kv::CostSpan span, const Way& way, int64_t start, int64_t count, uint64_t step,
                    const LocalModel& model, bool on_host) {
  span.start = start;
  span.rows = span.head_rows = count;
  span.split = count == 1 ? kv::Split::kShared : way.split;
  wire::StepPlan plan = plan_of(span, step, start >= kPrompt, model.config.vocabulary);
  if (on_host) plan.mutable_spans(0)->set_host_blocks(kBlocks);
  if (on_host) plan.mutable_spans(0)->set_table_version(2);
  return plan;
}

using Logits = std::map<std::pair<uint64_t, int64_t>, std::vector<float>>;

Logits on_device(const LocalModel& model, CacheFormat cache) {
  LocalWorkers workers(model, options_of(1, cache, false, 0));
  const Way way{1, {0, 1, 1}, kv::IndexKind::kCopied, kv::Split::kShared, 0};
  write_table(workers, span_of(way), 1);
  (void)workers.run(rows(span_of(way), way, 0, kPrompt, 1, model, false)).value();
  (void)workers.run(rows(span_of(way), way, kPrompt, kRows, 2, model, false)).value();
  for (int64_t i = 0; i < kDecoded; ++i)
    (void)workers.run(rows(span_of(way), way, kPrompt + kRows + i, 1, 3, model, false)).value();
  return workers.logits();
}

struct HotCounts {
  int64_t hits = 0, misses = 0, host_bytes = 0;
};
HotCounts counted(const std::vector<wire::StepResult>& results) {
  HotCounts out;
  for (const wire::StepResult& result : results) {
    out.host_bytes += measured(result)[kv::CrossKind::kHost];
    for (const wire::SpanMeter& meter : result.meters()) {
      out.hits += static_cast<int64_t>(meter.hot_hits());
      out.misses += static_cast<int64_t>(meter.hot_misses());
    }
  }
  return out;
}

void check_way(LocalWorkers& workers, const Way& way, int64_t hot_pages, const Logits& expected) {
  SCOPED_TRACE(way.name() + ", hot pages " + std::to_string(hot_pages));
  const LocalModel& model = workers.model();
  workers.begin_epoch(kv::Topology::of_all(way.ranks));  // what other ways left in hot buffers is forgotten
  workers.clear_logits();
  write_table(workers, span_of(way), way.ranks);
  (void)workers.run(rows(span_of(way), way, 0, kPrompt, 1, model, false)).value();
  (void)workers.run(spill(span_of(way), way.ranks, workers.geometry())).value();
  move_to_host(workers, hot_pages);
  const HotCounts chunk =
      counted(workers.run(rows(span_of(way), way, kPrompt, kRows, 3, model, true)).value());
  EXPECT_GT(chunk.host_bytes, 0);
  EXPECT_EQ(chunk.hits + chunk.misses, 0) << "a chunk does not go through the hot buffer";
  const int64_t entry = workers.geometry().stream(kv::Stream::kEntries).bytes_per_token;
  int64_t chosen = 0, found = 0;
  for (int64_t i = 0; i < kDecoded; ++i) {
    const wire::StepPlan step =
        rows(span_of(way), way, kPrompt + kRows + i, 1, static_cast<uint64_t>(4 + i), model, true);
    const HotCounts first = counted(workers.run(step).value());
    const HotCounts again = counted(workers.run(step).value());  // a repeat
    if (hot_pages == 0) {
      EXPECT_GT(first.host_bytes, 0);
      EXPECT_EQ(again.host_bytes, first.host_bytes);
      continue;
    }
    EXPECT_EQ(first.host_bytes, first.misses * entry);
    EXPECT_EQ(again.host_bytes, again.misses * entry);
    EXPECT_EQ(again.hits + again.misses, first.hits + first.misses);
    if (hot_pages * kBlockTokens >= model.config.index_topk) {
      EXPECT_EQ(again.misses, 0);
    }
    chosen += first.hits + first.misses;
    found += first.hits;
  }
  if (hot_pages * kBlockTokens >= kPrompt) {
    EXPECT_GT(found, 0);
  }
  EXPECT_EQ(chosen > 0, hot_pages > 0);
  for (const auto& [key, row] : expected) {
    if (key.second < kPrompt) continue;
    const auto computed = workers.logits().find(key);
    ASSERT_NE(computed, workers.logits().end()) << "position " << key.second;
    ASSERT_EQ(std::memcmp(computed->second.data(), row.data(), row.size() * sizeof(float)), 0)
        << "position " << key.second;
  }
}

// Every way, with no hot buffer, one smaller than a selection, and one that holds the whole context.
void check_model(const std::string& name, CacheFormat cache, bool draft_layers = false) {
  const LocalModel& model =
      local_model(std::string(WEFT_GOLDEN_FOLDER "/") + name, DType::kF32, draft_layers, false);
  const Logits expected = on_device(model, cache);
  ASSERT_EQ(std::ssize(expected), kRows + kDecoded + 1);  // one row of the prompt samples
  for (int ranks : {1, 2, 4, 8}) {
    const std::vector<Way> ways = all_ways(ranks, false);
    for (const int64_t hot_pages : {0, 1, 8}) {
      LocalWorkers workers(model, options_of(ranks, cache, true, hot_pages));
      // Many threads take long: of eight ranks, each way with one size of the buffer.
      const size_t first = ranks == 8 ? static_cast<size_t>(hot_pages % 3) : 0, stride = ranks == 8 ? 3 : 1;
      for (size_t i = first; i < ways.size(); i += stride) check_way(workers, ways[i], hot_pages, expected);
    }
  }
}

TEST(HostContext, KeepsTheBitsOfASparseModel) { check_model("deepseek_v32", DType::kF32); }
TEST(HostContext, KeepsTheBitsOfSharedSelections) { check_model("glm_moe_dsa", CacheDType::kFp8DsMla); }
TEST(HostContext, KeepsTheBitsOfAnFp8Cache) { check_model("deepseek_v32", CacheDType::kFp8); }
TEST(HostContext, KeepsTheBitsOfADraftLayer) { check_model("glm_moe_dsa_draft", DType::kF32, true); }

TEST(HostContext, APlanThatWouldWriteToTheHostIsRefused) {
  const LocalModel& model = local_model(WEFT_GOLDEN_FOLDER "/deepseek_v32", DType::kF32);
  for (const bool host : {false, true}) {
    LocalWorkers workers(model, options_of(1, DType::kF32, host, 0));
    const Way way{1, {0, 1, 1}, kv::IndexKind::kCopied, kv::Split::kShared, 0};
    write_table(workers, span_of(way), 1);
    (void)workers.run(rows(span_of(way), way, 0, kPrompt, 1, model, false)).value();
    wire::StepPlan plan = rows(span_of(way), way, host ? kPrompt - 1 : kPrompt, 1, 2, model, true);
    plan.mutable_spans(0)->set_table_version(1);
    const auto refused = workers.run(plan);
    ASSERT_FALSE(refused);
    EXPECT_EQ(refused.error().code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(refused.error().field, "plan");
  }
}

}  // namespace
}  // namespace weft::test
