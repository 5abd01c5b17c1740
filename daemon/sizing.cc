#include "daemon/sizing.h"

#include <algorithm>

#include "daemon/field_error.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

kv::CacheGeometry geometry_of(const Options& options, const wire::ModelDescription& model) {
  kv::CacheGeometry geometry;
  geometry.block_tokens = options.block_tokens;
  geometry.streams[0] = {static_cast<int64_t>(model.layers()), static_cast<int64_t>(model.entry_bytes()),
                         static_cast<int>(model.entry_parts())};
  geometry.streams[1] = {static_cast<int64_t>(model.index_layers()),
                         static_cast<int64_t>(model.index_key_bytes())};
  geometry.heads = static_cast<int64_t>(model.heads());
  return geometry;
}

// Pages for as many blocks, of each stream, as the room holds with all their parts in one place.
Result<kv::PoolPages> pool_pages(const Options& options, const kv::CacheGeometry& geometry) {
  const kv::StreamGeometry& keys = geometry.stream(kv::Stream::kIndexKeys);
  if (options.index_pool_tokens > 0 && keys.used_parts() == 0)
    return bad_option("index-pool-tokens", "the model has no indexer");
  // Index keys of so many blocks come first, if they are set apart; else a block has both.
  const int64_t key_blocks = ceil_div(options.index_pool_tokens, options.block_tokens);
  const int64_t key_bytes = key_blocks * geometry.block_tokens * keys.token_bytes();
  const int64_t block_bytes =
      geometry.block_tokens * (geometry.token_bytes() - (key_blocks > 0 ? keys.token_bytes() : 0));
  int64_t blocks = ceil_div(options.pool_tokens, options.block_tokens);
  if (options.pool_tokens == 0) {
    blocks = (options.pool_bytes - key_bytes) / block_bytes;
    if (options.pool_bytes - key_bytes < block_bytes) {
      return bad_option("pool-bytes",
                        human_bytes(options.pool_bytes) + " do not hold " +
                            (key_blocks > 0 ? human_bytes(key_bytes) + " of index keys and " : "") +
                            "one block of " + human_bytes(block_bytes));
    }
  }
  if (blocks >= static_cast<int64_t>(number(kNoPage)) / geometry.stream(kv::Stream::kEntries).parts) {
    return bad_field(pool_option_of(options), "more than 2^32 pages");
  }
  return kv::PoolPages{blocks * geometry.stream(kv::Stream::kEntries).used_parts(),
                       (key_blocks > 0 ? key_blocks : blocks) * keys.used_parts()};
}

// The same for the host pool; none: empty.
Result<kv::PoolPages> host_pages(const Options& options, const kv::CacheGeometry& geometry) {
  if (options.host_bytes == 0) return kv::PoolPages{};
  const int64_t block_bytes = geometry.block_tokens * geometry.token_bytes();
  const int64_t blocks = options.host_bytes / block_bytes;
  if (blocks < 1) {
    return bad_option("host-pool", human_bytes(options.host_bytes) + " do not hold one block of " +
                                       human_bytes(block_bytes));
  }
  if (blocks >= static_cast<int64_t>(number(kNoPage)) / geometry.stream(kv::Stream::kEntries).parts) {
    return bad_option("host-pool", "more than 2^32 pages");
  }
  return kv::PoolPages{blocks * geometry.stream(kv::Stream::kEntries).used_parts(),
                       blocks * geometry.stream(kv::Stream::kIndexKeys).used_parts()};
}

kv::ControlLimits control_limits(const controlplane::Limits& limits) {
  kv::ControlLimits control;
  control.rank_count = limits.rank_count;
  control.block_tokens = limits.geometry.block_tokens;
  control.parts = limits.geometry.parts();
  control.table_count = limits.table_count;
  control.table_blocks = limits.table_blocks();
  if (limits.host_pages[0] > 0 && limits.index_topk > 0) {
    control.host_parts = limits.geometry.stream(kv::Stream::kEntries).used_parts();
    control.hot_pages = ceil_div(limits.hot_tokens, limits.geometry.block_tokens) * control.host_parts;
  }
  control.max_samples = limits.max_samples;
  // Upper bounds of the serialised messages: a span's fixed fields are below 160 bytes, a token 5, a copy 40;
  // a sample is below 32, a digest 64, a span's meter 160 bytes. Untouched pages of a ring cost nothing.
  const int64_t spans = 2 * limits.max_running;
  const int64_t copies = limits.host_pages[0] > 0 ? 3 : 1;  // between ranks, to the host and from it
  control.plan_bytes_max = 4096 + spans * 160 + limits.max_step_rows * 5 + limits.max_copies() * copies * 40;
  control.result_bytes_max =
      4096 + limits.max_samples * 32 + limits.max_step_rows * 64 + (spans + limits.max_running) * 160;
  return control;
}

// What makes page tables, or the messages that carry them, larger than an arena can be.
Result<void> check_control(const kv::ControlLimits& control) {
  const Result<void> valid = kv::validate(control);
  if (valid) return {};
  const Error& wrong = valid.error();
  return bad_option(wrong.field == "hot_pages" ? "hot-tokens" : "max-context",
                    "too many for blocks of " + std::to_string(control.block_tokens) + " tokens and " +
                        std::to_string(control.rank_count) + " workers: " + wrong.field + " " +
                        wrong.message);
}

}  // namespace

Result<Sizing> size_everything(const Options& options, const wire::ModelDescription& model) {
  Sizing sizing;
  const auto model_context = static_cast<int64_t>(model.max_context());
  if (options.max_context > model_context) {
    return bad_option("max-context", std::to_string(options.max_context) + " is beyond the model's own " +
                                         std::to_string(model_context));
  }
  if (options.index_cache_option != nullptr && model.index_layers() == 0) {
    return bad_option(options.index_cache_option, model.model_type() + " has no indexer");
  }
  controlplane::Limits& limits = sizing.limits;
  limits.rank_count = options.rank_count();
  limits.topology = kv::Topology::of_all(options.workers);
  limits.geometry = geometry_of(options, model);
  TRY_VOID(kv::validate(limits.geometry));
  limits.query_bytes = static_cast<int64_t>(model.query_bytes());
  limits.value_width = static_cast<int64_t>(model.value_width());
  limits.index_topk = static_cast<int64_t>(model.index_topk());
  limits.window = static_cast<int64_t>(model.window());
  limits.window_layers = static_cast<int64_t>(model.window_layers());
  limits.draft_layers = static_cast<int64_t>(model.draft_layers());
  limits.max_context = options.max_context > 0 ? options.max_context : model_context;
  limits.max_running = options.max_running;
  limits.max_waiting = options.max_waiting;
  limits.eviction = options.eviction;
  limits.on_pressure = options.on_pressure;
  limits.max_step_rows = options.max_step_rows;
  // Every row of a decode span is sampled.
  limits.max_samples =
      std::min(options.max_running * (1 + controlplane::kDraftTokensMax), options.max_step_rows);
  // Two for a sequence that changes its table, and as many again for those whose old table waits for
  // acknowledgements.
  limits.table_count = 3 * options.max_running;
  TRY(const kv::PoolPages pages, pool_pages(options, limits.geometry));
  limits.pool_pages.assign(static_cast<size_t>(options.rank_count()), {pages.entries, pages.index_keys});
  TRY(const kv::PoolPages host, host_pages(options, limits.geometry));
  limits.host_pages = {host.entries, host.index_keys};
  limits.host_write = options.host_write;
  limits.copy_plan_bytes = options.copy_bytes;
  if (options.hot_tokens && limits.index_topk == 0)
    return bad_option("hot-tokens",
                      model.model_type() + " has no indexer: no context of it can lie on the host");
  if (host.entries > 0) limits.hot_tokens = options.hot_tokens.value_or(2 * limits.index_topk);
  // The rows of two steps, and as many that are on their way to the host.
  limits.host_window = 4 * ceil_div(limits.max_step_rows, limits.geometry.block_tokens) + 2;
  TRY_VOID(controlplane::validate(limits));

  sizing.arenas.control = control_limits(limits);
  TRY_VOID(check_control(sizing.arenas.control));
  sizing.arenas.weight_bytes = static_cast<int64_t>(model.weight_arena_bytes());
  sizing.arenas.mailbox_bytes = static_cast<int64_t>(model.mailbox_bytes());
  sizing.arenas.geometry = limits.geometry;
  sizing.arenas.host_pages = host;
  sizing.arenas.pool_pages.assign(static_cast<size_t>(options.rank_count()), pages);
  const bool mostly_keys = pages.index_keys * limits.geometry.page_bytes(kv::Stream::kIndexKeys) >
                           pages.entries * limits.geometry.page_bytes(kv::Stream::kEntries);
  sizing.pool_option =
      options.index_pool_tokens > 0 && mostly_keys ? "--index-pool-tokens" : pool_option_of(options);

  sizing.model.name = options.model_name;
  sizing.model.model_type = model.model_type();
  sizing.model.vocabulary = static_cast<int64_t>(model.vocabulary());
  sizing.model.max_context = limits.max_context;
  sizing.model.speculation = options.speculation;
  sizing.model.eos_tokens.assign(model.eos_tokens().begin(), model.eos_tokens().end());
  sizing.cache_format = std::string(cache_dtype_name(options.cache.entries)) + "/" +
                        options.cache.index_name() + "/" + std::to_string(options.block_tokens);
  return sizing;
}

}  // namespace weft::daemon
