// Goal: which ranks take part in a step shows in no bit of its logits. Method: one sequence, prompt and
// answer, whose steps run on changing sets of ranks; every row of logits against one rank alone, bit by bit.
#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/local_engine.h"

namespace weft::test {
namespace {

constexpr int64_t kPrompt = 45, kBlock = 8, kBlocks = 8;

// Under tp every rank that takes part stores every token; page b of each holds block b. (Models with one KV
// head: of several, a rank stores some.)
class Ways : public ::testing::TestWithParam<const char*> {
 protected:
  const LocalModel& model_ = local_model(std::string(WEFT_GOLDEN_FOLDER) + "/" + GetParam(), DType::kF32);

  LocalOptions options(int ranks) const {
    LocalOptions options;
    options.rank_count = ranks;
    options.block_tokens = kBlock;
    options.max_step_rows = kPrompt;
    const int parts = model_.config.cache_geometry(options.cache, kBlock).stream(kv::Stream::kEntries).parts;
    options.pool = {kBlocks * parts, kBlocks};
    options.table_blocks = kBlocks;
    return options;
  }
  void write_table(LocalWorkers& workers) const {
    const kv::CacheGeometry& geometry = workers.geometry();
    std::vector<PageId> pages;
    for (uint32_t block = 0; block < kBlocks; ++block) {
      for (int part = 0; part < geometry.parts(); ++part) {
        const auto first = static_cast<uint32_t>(part - geometry.first_part(geometry.stream_of(part)));
        const PageId page{first * static_cast<uint32_t>(kBlocks) + block};
        pages.insert(pages.end(), static_cast<size_t>(workers.options().rank_count), page);
      }
    }
    workers.control().write_table(TableId{0}, 0, pages);
    workers.control().set_table_version(TableId{0}, 1);
  }
  // Rows [start, start + rows) of the sequence.
  wire::StepPlan plan(const kv::Topology& topology, int64_t start, int64_t rows) {
    wire::StepPlan plan;
    plan.set_step(++step_);
    plan.set_ranks(topology.ranks());
    wire::Span* span = plan.add_spans();
    span->set_request(1);
    span->set_table_version(1);
    span->set_start(static_cast<uint64_t>(start));
    span->set_rows(static_cast<uint32_t>(rows));
    const bool owned = rows > 1 && topology.count() > 1;
    span->set_split(static_cast<uint32_t>(owned ? kv::Split::kZigzag : kv::Split::kShared));
    span->set_group_width(static_cast<uint32_t>(topology.count()));
    span->set_group_c(1);
    span->set_index_c(1);
    span->set_index_copied(true);
    span->set_prefill(rows > 1);
    for (int64_t position = start; position < start + rows; ++position) {
      span->add_tokens(static_cast<uint32_t>(position * 7 % model_.config.vocabulary));
    }
    span->set_digest(true);
    span->set_sampler_rank(static_cast<uint32_t>(step_) % static_cast<uint32_t>(topology.count()));
    return plan;
  }
  // Every page from one rank to another; who takes part in the step copies.
  wire::StepPlan copy(const LocalWorkers& workers, const kv::Topology& topology, int from, int to) {
    wire::StepPlan plan;
    plan.set_step(++step_);
    plan.set_ranks(topology.ranks());
    for (const kv::Stream stream : kv::kAllStreams) {
      const kv::StreamGeometry& geometry = workers.geometry().stream(stream);
      for (int page = 0; page < kBlocks * geometry.used_parts(); ++page) {
        wire::PageCopy* copy = plan.add_copies();
        copy->set_stream(static_cast<uint32_t>(stream));
        copy->set_from_rank(static_cast<uint32_t>(from));
        copy->set_to_rank(static_cast<uint32_t>(to));
        copy->set_from_page(static_cast<uint32_t>(page));
        copy->set_to_page(static_cast<uint32_t>(page));
      }
    }
    return plan;
  }
  uint64_t step_ = 0;
};

TEST_P(Ways, AnyRanksInAnyOrderOfChanges) {
  const int64_t end = kPrompt + 12;
  LocalWorkers alone(model_, options(1));
  write_table(alone);
  ASSERT_TRUE(alone.run(plan(kv::Topology::of_all(1), 0, kPrompt)));
  for (int64_t row = kPrompt; row < end; ++row) {
    ASSERT_TRUE(alone.run(plan(kv::Topology::of_all(1), row, 1)));
  }
  LocalWorkers workers(model_, options(4));
  write_table(workers);
  int64_t row = 0;
  kv::Topology before = kv::Topology::of_all(4);
  for (const RankMask ranks : {0b1111u, 0b0111u, 0b0101u, 0b1010u, 0b1000u, 0b1111u}) {
    const kv::Topology topology(ranks);
    // Who comes in gets all pages first: copied by those who were there, and who need not be there now.
    for (int place = 0; place < topology.count(); ++place) {
      const int rank = topology.rank(place);
      if (before.contains(rank)) continue;
      const auto copied = workers.run(copy(workers, before, before.rank(0), rank));
      ASSERT_TRUE(copied) << copied.error().text();
      EXPECT_EQ(copied->front().exchanges(), before.count() > 1 ? 1u : 0u);
    }
    workers.begin_epoch(topology);
    for (int i = 0; i < 2; ++i) {
      const int64_t rows = row == 0 ? kPrompt : 1;
      const auto ran = workers.run(plan(topology, row, rows));
      ASSERT_TRUE(ran) << ran.error().text();
      EXPECT_EQ(ran->size(), static_cast<size_t>(topology.count()));
      row += rows;
    }
    before = topology;
  }
  int64_t bad = 0;
  for (const auto& [key, logits] : workers.logits()) {
    const std::vector<float>& expected = alone.logits().at(key);
    bad += std::memcmp(logits.data(), expected.data(), logits.size() * sizeof(float)) == 0 ? 0 : 1;
  }
  EXPECT_EQ(bad, 0);
  EXPECT_EQ(workers.logits().size(), static_cast<size_t>(row));
}

TEST_P(Ways, APlanOfOtherRanksThanTheEpochsIsRefused) {
  LocalWorkers workers(model_, options(2));
  write_table(workers);
  const auto ran = workers.run(plan(kv::Topology(0b01), 0, 4));
  ASSERT_FALSE(ran);
  EXPECT_EQ(ran.error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(ran.error().message, "ranks 0 take part, but in this epoch 0, 1 do");
}

// ---- the control plane changes the ranks while requests run

struct Model {
  const char* name;
  DType dtype;
};
std::string model_name(const ::testing::TestParamInfo<Model>& info) {
  return std::string(info.param.name) + "_" + dtype_name(info.param.dtype);
}

class Changes : public ::testing::TestWithParam<Model> {
 protected:
  const LocalModel& model_ =
      local_model(std::string(WEFT_GOLDEN_FOLDER) + "/" + GetParam().name, GetParam().dtype);

  EngineOptions options() const {
    EngineOptions options;
    options.workers.rank_count = 4;
    options.workers.cache = GetParam().dtype;
    options.workers.block_tokens = kBlock;
    options.workers.max_step_rows = 96;
    options.workers.table_count = 40;
    const int parts = model_.config.cache_geometry(options.workers.cache, kBlock).parts();
    options.workers.pool = {int64_t{600} * parts, 600};
    options.max_context = 256;
    options.max_chunk_rows = 40;
    return options;
  }
  std::vector<RequestId> submit(LocalEngine& engine) const {
    std::vector<RequestId> ids;
    int64_t length = 30;
    for (const char* decode : {"tp", "dcp(4)", "dcp(2)", "dp", "dp(2)xdcp(2)", "dp(2)xtp"}) {
      for (const char* index : {"copied", "split", "split(2)"}) {
        RequestOptions request;
        request.grouping.prefill = static_cast<kv::Split>(length % kv::kSplits);
        request.grouping.decode = kv::parse_decode(decode, 4).value();
        request.grouping.index = kv::parse_index(index, 4).value();
        request.max_tokens = 30;
        std::vector<uint32_t> prompt;
        for (int64_t i = 0; i < length; ++i) {
          prompt.push_back(static_cast<uint32_t>((i * 7 + length) % model_.config.vocabulary));
        }
        ids.push_back(engine.submit(prompt, request));
        length += 7;
      }
    }
    return ids;
  }
};

TEST_P(Changes, RequestsGoOnWithTheSameBitsAndTokens) {
  LocalEngine still(model_, options());
  const std::vector<RequestId> ids = submit(still);
  still.run_all();

  LocalEngine engine(model_, options());
  submit(engine);
  const std::vector<std::pair<int, bool>> changes = {{3, false}, {1, false}, {3, true}, {0, false},
                                                     {2, false}, {1, true},  {2, true}, {0, true}};
  for (const auto& [rank, joins] : changes) {
    for (int step = 0; step < 2; ++step) engine.step();
    engine.change(rank, joins);
    const size_t before = engine.changes().size();
    while (engine.changes().size() == before) ASSERT_TRUE(engine.step());
    const controlplane::TopologyNotice& notice = engine.changes().back();
    ASSERT_EQ(notice.error.code, ErrorCode::kOk) << notice.error.text();
    EXPECT_GT(notice.bytes_moved, 0);
  }
  engine.run_all();
  for (const RequestId id : ids) {
    ASSERT_TRUE(engine.outcome(id).finished);
    EXPECT_EQ(engine.outcome(id).tokens, still.outcome(id).tokens) << "request " << number(id);
  }
  int64_t bad = 0;
  for (const auto& [key, logits] : still.workers().logits()) {
    const auto found = engine.workers().logits().find(key);
    const bool equal = found != engine.workers().logits().end() &&
                       std::memcmp(found->second.data(), logits.data(), logits.size() * sizeof(float)) == 0;
    bad += equal ? 0 : 1;
  }
  EXPECT_EQ(bad, 0);
  std::printf("%zu rows compared\n", still.workers().logits().size());
}

INSTANTIATE_TEST_SUITE_P(Models, Changes,
                         ::testing::Values(Model{"glm_moe_dsa", DType::kF32},
                                           Model{"glm_moe_dsa", DType::kBF16},
                                           Model{"deepseek_v3", DType::kF32}, Model{"qwen3_moe", DType::kF32},
                                           Model{"qwen2_window", DType::kBF16}),
                         model_name);

INSTANTIATE_TEST_SUITE_P(Models, Ways, ::testing::Values("glm4_moe_lite", "glm_moe_dsa", "deepseek_v2"));

}  // namespace
}  // namespace weft::test
