#include "tests/bench/layer_world.h"

#include <cmath>
#include <cstring>

#include "kernels/entry.h"
#include "kernels/indexer.h"
#include "proto/vocab/check.h"
#include "proto/vocab/random.h"
#include "worker/model/weight_plan.h"

namespace weft::bench {
namespace {

constexpr int kRanks = kLayerRanks;
constexpr int64_t kBlock = kLayerBlock;
constexpr int64_t kVocabulary = 256;

worker::ModelConfig config_of(const LayerShape& shape) {
  worker::ModelConfig c;
  c.model_type = "glm_moe_dsa";
  c.checkpoint_dtype = DType::kBF16;
  c.hidden = shape.hidden, c.heads = shape.heads, c.vocabulary = kVocabulary;
  c.max_context = shape.context + kBlock;
  c.layers = {{worker::FeedForward::kDense, worker::Indexer::kFull}};
  c.latent = shape.latent, c.rope = shape.rope, c.nope = shape.nope, c.value = shape.value;
  c.q_lora_rank = shape.q_lora;
  c.scale = 1 / std::sqrt(static_cast<float>(shape.nope + shape.rope));
  for (int64_t i = 0; i < shape.rope / 2; ++i) {
    c.inverse_frequency.push_back(
        std::pow(1e6, -2.0 * static_cast<double>(i) / static_cast<double>(shape.rope)));
  }
  c.index_heads = shape.index_heads, c.index_width = shape.index_width, c.index_topk = shape.top_k;
  c.dense_width = shape.dense_width;
  return c;
}

kv::Mapping shared(size_t bytes) {
  const kv::Descriptor memory = kv::create_memory("bench", bytes).value();
  return kv::Mapping::map(memory.get(), bytes).value();
}

float centred(SplitMix64& random) { return static_cast<float>(2 * random.uniform() - 1); }

// Random values as large as keep what a product gives as large as what went in. The order within a panel does
// not matter to them.
void fill_place(const worker::WeightPlace& place, std::byte* arena, SplitMix64& random) {
  const bool vector = place.form == worker::WeightForm::kVector;
  const float size =
      place.form == worker::WeightForm::kPacked ? std::sqrt(3 / static_cast<float>(place.k)) : 1;
  const DType dtype = vector ? DType::kF32 : place.dtype;
  const auto bytes = static_cast<int64_t>(dtype_bytes(dtype));
  for (int64_t at = 0; at < place.bytes; at += bytes) {
    const float value = vector ? 1 : size * centred(random);
    kernels::convert(&value, 1, dtype, arena + place.offset + at);
  }
}

}  // namespace

LayerWorld::LayerWorld(const LayerRun& run)
    : run(run),
      config(config_of(run.shape)),
      geometry(config.cache_geometry(run.cache, kBlock)),
      results_(shared(sizeof(Outcome) * kRanks * groupings.size() * static_cast<size_t>(run.rounds))),
      steps_(shared(sizeof(Step) * kRanks * groupings.size())) {
  const worker::WeightPlan plan = worker::plan_weights(config, DType::kBF16, weights);
  memory_.push_back(shared(static_cast<size_t>(plan.arena_bytes)));
  SplitMix64 random(1);
  for (const worker::WeightPlace& place : plan.places) fill_place(place, memory_.back().data(), random);
  worker::set_views(plan, memory_.back().data());

  kv::ControlLimits limits;
  limits.rank_count = kRanks;
  limits.block_tokens = kBlock;
  limits.parts = geometry.parts();
  limits.table_count = std::ssize(groupings) * run.rows;
  limits.table_blocks = blocks();
  limits.max_samples = run.rows;
  limits.plan_bytes_max = limits.result_bytes_max = 1 << 16;
  control = std::make_unique<kv::ControlArena>(
      kv::ControlArena::format(shared(kv::control_arena_bytes(limits)), limits).value());
  mailbox = worker::mailbox_bytes(worker::outbox_bytes(config, run.cache.query_dtype(), kRanks, run.rows));
  const kv::PoolPages pages{blocks() * run.rows, blocks() * run.rows};
  for (int rank = 0; rank < kRanks; ++rank) {
    mailboxes.push_back(memory_.emplace_back(shared(mailbox)).data());
    pools.emplace_back(memory_.emplace_back(shared(kv::pool_bytes(geometry, pages))).data(), geometry, pages);
  }
  fill_pools();
  write_tables();
}

// The same on both ranks: which pages a rank reads is the tables' business.
void LayerWorld::fill_pools() {
  const kernels::EntryFormat format = config.entry_format(run.cache.entries);
  const int64_t entry_bytes = geometry.stream(kv::Stream::kEntries).bytes_per_token;
  SplitMix64 random(2);
  std::vector<float> values(static_cast<size_t>(std::max(format.width, config.index_width)));
  for (int64_t page = 0; page < pools[0].pages().entries; ++page) {
    const PageId id{static_cast<uint32_t>(page)};
    std::byte* entries = pools[0].layer(kv::Stream::kEntries, id, 0);
    std::byte* keys = pools[0].layer(kv::Stream::kIndexKeys, id, 0);
    for (int64_t slot = 0; slot < kBlock; ++slot) {
      for (float& value : values) value = centred(random);
      kernels::store_entry(format, values.data(), entries + slot * entry_bytes);
      for (float& value : values) value = centred(random);
      if (run.cache.index_keys == CacheDType::kFp8) {
        kernels::store_fp8_index_key(values.data(), config.index_width, true, kBlock, slot, keys);
      } else {
        kernels::store_index_key(values.data(), config.index_width, run.cache.index_query_dtype(), kBlock,
                                 slot, keys);
      }
    }
  }
  const kv::PoolPages& pages = pools[0].pages();
  std::memcpy(pools[1].page(kv::Stream::kEntries, PageId{0}), pools[0].page(kv::Stream::kEntries, PageId{0}),
              kv::pool_bytes(geometry, pages));
}

void LayerWorld::write_tables() {
  for (size_t g = 0; g < groupings.size(); ++g) {
    for (int64_t sequence = 0; sequence < run.rows; ++sequence) {
      const kv::Residency residency = kv::residency_of(ranks_of(g, sequence), groupings[g].index, kRanks);
      std::vector<PageId> pages;
      for (int64_t block = 0; block < blocks(); ++block) {
        for (int part = 0; part < geometry.parts(); ++part) {
          const RankMask holders = kv::part_holders(geometry, residency, block, part, 0, kRanks);
          const PageId page{static_cast<uint32_t>(sequence * blocks() + block)};
          for (int rank = 0; rank < kRanks; ++rank) pages.push_back(holds(holders, rank) ? page : kNoPage);
        }
      }
      control->write_table(table(g, sequence), 0, pages);
      control->set_table_version(table(g, sequence), 1);
    }
  }
}

// One decode row of each sequence, always at the same position.
void LayerWorld::write_plan(wire::StepPlan& plan, size_t grouping, int64_t step) const {
  plan.set_step(static_cast<uint64_t>(step) + 1);
  for (int64_t sequence = 0; sequence < run.rows; ++sequence) {
    const kv::Grouping ranks = ranks_of(grouping, sequence);
    wire::Span* span = plan.add_spans();
    span->set_request(static_cast<uint64_t>(sequence) + 1);
    span->set_table(number(table(grouping, sequence)));
    span->set_table_version(1);
    span->set_start(static_cast<uint64_t>(run.shape.context));
    span->set_rows(1);
    span->set_group_base(static_cast<uint32_t>(ranks.base));
    span->set_group_width(static_cast<uint32_t>(ranks.width));
    span->set_group_c(static_cast<uint32_t>(ranks.c));
    span->set_index_c(static_cast<uint32_t>(kv::index_parts(ranks, groupings[grouping].index)));
    span->set_index_copied(groupings[grouping].index.kind == kv::IndexKind::kCopied);
    span->set_sample_rows(1);
    span->set_sample_index(static_cast<uint32_t>(sequence));
    span->add_tokens(
        static_cast<uint32_t>(mix64(static_cast<uint64_t>(step * run.rows + sequence)) % kVocabulary));
  }
}

}  // namespace weft::bench
