#include "worker/describe.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <optional>

#include "kernels/features.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "worker/comm/exchange.h"
#include "worker/model/tree_sum.h"
#include "worker/model/weights.h"
#include "worker/step_runner.h"

namespace weft::worker {
namespace {

constexpr uint32_t kThreadsMax = 1024;
constexpr uint32_t kStepRowsMax = 1 << 20;

Result<void> in_range(const char* field, uint64_t value, uint64_t min, uint64_t max) {
  if (value >= min && value <= max) return {};
  return error(ErrorCode::kInvalidArgument,
               std::to_string(value) + " is not in " + std::to_string(min) + " … " + std::to_string(max),
               field);
}

// Layouts that the model's entries and index keys do not fit.
Result<void> check_cache_format(const ModelConfig& config, const CacheFormat& cache) {
  const auto refuse = [](const char* field, const std::string& what) {
    return error(ErrorCode::kInvalidArgument, what, field);
  };
  if (cache.entries == CacheDType::kFp8DsMla && config.attention != AttentionKind::kMla) {
    return refuse("cache_dtype", "fp8_ds_mla is a layout of latent entries (MLA), and " + config.model_type +
                                     " caches K and V: fp8 is what it can have");
  }
  if (cache.index_keys == CacheDType::kFp8DsMla) {
    return refuse("index_cache_dtype", "fp8_ds_mla is no layout of index keys");
  }
  if (config.index_layers() == 0) return {};
  if (config.hash && (cache.index_float_scales || cache.index_hadamard)) {
    return refuse(cache.index_hadamard ? "index_hadamard" : "index_scales",
                  "index keys of a hash model are small integers, to be stored exactly");
  }
  const std::string width = std::to_string(config.index_width);
  if (cache.index_keys != CacheDType::kF32 && config.index_width % 2 != 0) {
    return refuse("index_cache_dtype", "index_head_dim " + width + " is odd: its index keys can only be f32");
  }
  if (cache.index_keys == CacheDType::kFp8 && config.index_width > kernels::kFp8Group) {
    return refuse("index_cache_dtype", "index_head_dim " + width + " is beyond the " +
                                           std::to_string(kernels::kFp8Group) + " of FP8 index keys");
  }
  if (cache.index_hadamard && !std::has_single_bit(static_cast<uint64_t>(config.index_width))) {
    return refuse("index_hadamard", "index_head_dim " + width + " is not a power of two");
  }
  return {};
}

uint32_t mask_of_segments(const SegmentPresence& presence) {
  uint32_t mask = 0;
  for (size_t segment = 0; segment < presence.size(); ++segment)
    mask |= (presence[segment] ? 1u : 0u) << segment;
  return mask;
}

}  // namespace

Result<WorkerSettings> read_settings(const wire::Describe& request) {
  if (request.protocol_version() != kWorkerProtocol) {
    return error(ErrorCode::kUnsupported, "protocol version " + std::to_string(request.protocol_version()) +
                                              "; this worker speaks " + std::to_string(kWorkerProtocol));
  }
  TRY_VOID(in_range("rank_count", request.rank_count(), 1, kMaxRanks));
  TRY_VOID(in_range("rank", request.rank(), 0, request.rank_count() - 1));
  TRY_VOID(in_range("packers", request.packers(), 0, request.rank_count()));
  std::optional<DType> weight_dtype;  // empty: as stored
  if (request.weight_dtype() != wire::DTYPE_UNSET) {
    TRY(weight_dtype, from_wire(request.weight_dtype(), "weight_dtype"));
  }
  CacheFormat cache;
  TRY(cache.entries, from_wire(request.cache_dtype(), "cache_dtype"));
  TRY(cache.index_keys, from_wire(request.index_cache_dtype(), "index_cache_dtype"));
  cache.index_hadamard = request.index_hadamard();
  cache.index_float_scales = request.index_float_scales();
  TRY_VOID(in_range("block_tokens", request.block_tokens(), 8, 256));
  if (!std::has_single_bit(request.block_tokens())) {
    return error(ErrorCode::kInvalidArgument,
                 std::to_string(request.block_tokens()) + " is not a power of two", "block_tokens");
  }
  TRY_VOID(in_range("max_step_rows", request.max_step_rows(), 1, kStepRowsMax));
  TRY_VOID(in_range("threads", request.threads(), 1, kThreadsMax));

  WorkerSettings settings;
  settings.rank = static_cast<int>(request.rank());
  settings.rank_count = static_cast<int>(request.rank_count());
  settings.packers = request.packers() == 0 ? settings.rank_count : static_cast<int>(request.packers());
  settings.model_path = request.model_path();
  settings.block_tokens = request.block_tokens();
  settings.max_step_rows = request.max_step_rows();
  settings.threads = static_cast<int>(request.threads());
  settings.spare = request.spare();
  settings.cores.assign(request.cores().begin(), request.cores().end());
  TRY(settings.config, read_model_config(settings.model_path, request.draft_layers()));
  settings.weight_dtype = weight_dtype.value_or(settings.config.checkpoint_dtype);
  settings.cache = cache;
  TRY_VOID(check_cache_format(settings.config, cache));
  settings.config.split_experts = request.split_experts();
  TRY_VOID(kv::validate(settings.geometry()));
  if (request.max_context() != 0) {
    TRY_VOID(in_range("max_context", request.max_context(), 1,
                      static_cast<uint64_t>(settings.config.max_context)));
  }
  return settings;
}

wire::ModelDescription describe_model(const WorkerSettings& settings, uint64_t max_context) {
  const ModelConfig& config = settings.config;
  const kv::CacheGeometry geometry = settings.geometry();
  auto count = [](int64_t value) { return static_cast<uint64_t>(value); };
  std::filesystem::path folder(settings.model_path);
  if (!folder.has_filename()) folder = folder.parent_path();  // a path that ends in '/'

  wire::ModelDescription out;
  out.set_protocol_version(kWorkerProtocol);
  out.set_model_type(config.model_type);
  out.set_name(folder.filename().string());
  out.set_hidden(count(config.hidden));
  out.set_layers(config.layers.size());
  out.set_index_layers(count(config.index_layers()));
  out.set_heads(count(config.heads));
  out.set_vocabulary(count(config.vocabulary));
  out.set_max_context(max_context == 0 ? count(config.max_context) : max_context);
  for (uint32_t token : config.eos_tokens) out.add_eos_tokens(token);
  out.set_entry_bytes(count(geometry.stream(kv::Stream::kEntries).bytes_per_token));
  out.set_entry_parts(static_cast<uint32_t>(geometry.stream(kv::Stream::kEntries).parts));
  const kv::StreamGeometry& index_keys = geometry.stream(kv::Stream::kIndexKeys);
  out.set_index_key_bytes(index_keys.layers == 0 ? 0 : count(index_keys.bytes_per_token));
  out.set_weight_arena_bytes(count(weight_arena_bytes(config, settings.weight_dtype)));
  out.set_mailbox_bytes(mailbox_bytes(
      outbox_bytes(config, settings.cache.query_dtype(), settings.rank_count, settings.max_step_rows)));
  out.set_weight_dtype(to_wire(settings.weight_dtype));
  out.set_weight_format(coding_name(config.quantisation.coding));
  out.set_index_topk(config.index_layers() == 0 ? 0 : count(config.index_topk));
  out.set_window(count(config.window()));
  out.set_window_layers(count(config.window_layers()));
  out.set_draft_layers(count(config.draft_layers));
  out.set_query_bytes(count(config.key_width()) * dtype_bytes(settings.cache.query_dtype()));
  out.set_value_width(count(config.value_width()));
  out.set_instruction_set(kernels::instruction_set());
  out.set_dense_layers(count(std::count_if(config.layers.begin(), config.layers.end(), [](const auto& layer) {
    return layer.feed_forward == FeedForward::kDense;
  })));
  out.set_dense_segments(mask_of_segments(feed_forward_segments(config, FeedForward::kDense)));
  out.set_moe_segments(mask_of_segments(feed_forward_segments(config, FeedForward::kMoe)));
  return out;
}

}  // namespace weft::worker
