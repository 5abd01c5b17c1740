#include "worker/model/expanded.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numbers>

#include "kernels/attention.h"
#include "kernels/elementwise.h"

namespace weft::worker {

// One shard of a context, and one head of it at a time.
struct Expanded::Context {
  std::vector<int64_t> positions;     // ascending
  std::vector<float> latent;          // [positions][latent]
  const void* operand = nullptr;      // the same in the weights' dtype
  std::vector<float> wide;            // [positions][nope | rope | value]: of one head; rope is of all
  std::vector<std::byte> entries;     // the same in the cache's dtype
  std::vector<const void*> pointers;  // into it
};

// The matrix as it is packed, read out by multiplying with the identity, and packed the other way round.
const kernels::PackedMatrix& Expanded::key_weights(int64_t layer) {
  const ModelConfig& config = state_.config;
  key_weights_.resize(config.layers.size());
  KeyWeights& own = key_weights_[static_cast<size_t>(layer)];
  if (own.matrix.data != nullptr) return own.matrix;
  const DType dtype = state_.weights.dtype;
  const int64_t nope = config.nope, latent = config.latent;
  constexpr size_t kAlign = 64;
  own.memory.resize(kernels::packed_bytes(dtype, config.heads, nope, latent) + kAlign);
  void* data = own.memory.data();
  size_t space = own.memory.size();
  data = std::align(kAlign, space - kAlign, data, space);
  std::vector<float> identity(static_cast<size_t>(nope * nope), 0.0f);
  for (int64_t i = 0; i < nope; ++i) identity[static_cast<size_t>(i * nope + i)] = 1.0f;
  Operand operand;
  const void* x = operand.of(state_.parallel, dtype, identity.data(), nope * nope);
  std::vector<float> rows(static_cast<size_t>(nope * latent));
  for (int64_t head = 0; head < config.heads; ++head) {
    kernels::Gemm p;
    p.weights = state_.weights.layers[static_cast<size_t>(layer)].w_uk;
    p.group_begin = head;
    p.group_end = head + 1;
    p.rows = nope;
    p.x = x;
    p.x_stride = nope;
    p.y = rows.data();
    p.y_stride = latent;
    kernels::gemm(p, state_.parallel);
    const kernels::PackSource source{DType::kF32, rows.data() - head * nope * latent, nope * latent, latent,
                                     1};
    kernels::pack_matrix(dtype, config.heads, nope, latent, source, data, head, head + 1);
  }
  own.matrix = {dtype, config.heads, nope, latent, data};
  return own.matrix;
}

// Latents and turned parts of the entries of a shard before position `end`.
void Expanded::gather(const SpanRoute& span, int64_t layer, int shard, int64_t end, Context& context) {
  const ModelConfig& config = state_.config;
  const CacheView& view = state_.views[static_cast<size_t>(span.index)];
  const CacheView::Part& part = view.entries.front();
  const int64_t P = state_.setup.block_tokens,
                layer_offset = layer * state_.geometry.layer_bytes(kv::Stream::kEntries);
  const int64_t bytes = state_.geometry.stream(kv::Stream::kEntries).bytes_per_token;
  const kernels::EntryFormat format = config.entry_format(state_.setup.cache.entries);
  const DType dtype = format.dtype;
  const auto& all = view.shard_positions[static_cast<size_t>(shard)];
  context.positions.assign(all.begin(), std::lower_bound(all.begin(), all.end(), end));
  const int64_t n = std::ssize(context.positions);
  scratch(context.latent, n * config.latent);
  scratch(context.wide, n * entry_width());
  scratch(context.entries, n * entry_width() * static_cast<int64_t>(dtype_bytes(dtype)));
  context.pointers.clear();
  for (int64_t i = 0; i < n; ++i) {
    context.pointers.push_back(context.entries.data() +
                               i * entry_width() * static_cast<int64_t>(dtype_bytes(dtype)));
  }
  for_rows(state_.parallel, n, 64, [&](int64_t first, int64_t last) {
    std::vector<uint16_t> loaded(static_cast<size_t>(format.width));
    for (int64_t i = first; i < last; ++i) {
      const int64_t position = context.positions[static_cast<size_t>(i)];
      const std::byte* entry =
          part.page[static_cast<size_t>(position / P)] + layer_offset + position % P * bytes;
      if (format.fp8.elements() > 0) {
        kernels::load_fp8_entry(format, entry, loaded.data());
        entry = reinterpret_cast<const std::byte*>(loaded.data());
      }
      kernels::convert_to_f32(entry, dtype, config.latent, context.latent.data() + i * config.latent);
      kernels::convert_to_f32(entry + config.latent * static_cast<int64_t>(dtype_bytes(dtype)), dtype,
                              config.rope, context.wide.data() + i * entry_width() + config.nope);
    }
  });
  context.operand =
      latent_operand_.of(state_.parallel, state_.weights.dtype, context.latent.data(), n * config.latent);
  int64_t remote = 0, host = 0;
  for (const int64_t position : context.positions) {
    remote += part.remote[static_cast<size_t>(position / P)];
    host += position / P < part.host_blocks ? 1 : 0;
  }
  state_.count(span.index, kv::CrossKind::kEntries, remote * bytes);
  state_.count(span.index, kv::CrossKind::kHost, host * bytes);
}

void Expanded::expand_head(int64_t layer, int64_t head, Context& context) {
  const ModelConfig& config = state_.config;
  const int64_t n = std::ssize(context.positions);
  const auto product = [&](const kernels::PackedMatrix& weights, float* y) {
    kernels::Gemm p;
    p.weights = weights;
    p.group_begin = head;
    p.group_end = head + 1;
    p.rows = n;
    p.x = context.operand;
    p.x_stride = config.latent;
    p.y = y;
    p.y_stride = entry_width();
    kernels::gemm(p, state_.parallel);
  };
  product(key_weights(layer), context.wide.data());
  product(state_.weights.layers[static_cast<size_t>(layer)].w_uv, context.wide.data() + key_width());
  const DType dtype = state_.setup.cache.query_dtype();
  for_rows(state_.parallel, n, 256, [&](int64_t first, int64_t last) {
    kernels::convert(
        context.wide.data() + first * entry_width(), (last - first) * entry_width(), dtype,
        context.entries.data() + first * entry_width() * static_cast<int64_t>(dtype_bytes(dtype)));
  });
}

void Expanded::attend_span(const SpanRoute& span, int64_t layer, const std::byte* queries, float* out) {
  const ModelConfig& config = state_.config;
  const kv::Range own = state_.layout.owned_rows(span, state_.rank);
  const int64_t count = own.size(), heads = config.heads, whole = own.begin - state_.layout.wide_count();
  const int64_t words = kernels::partial_words(config.value);
  const auto position = [&](int64_t row) {
    return state_.home()[static_cast<size_t>(own.begin + row)].position;
  };
  const int64_t query_bytes =
      key_width() * static_cast<int64_t>(dtype_bytes(state_.setup.cache.query_dtype()));
  static thread_local std::vector<float> buffer;
  float* const partials = scratch(buffer, kTreeLevels * count * heads * words);
  const auto partial = [&](int64_t level, int64_t row, int64_t head) {
    return partials + ((level * count + row) * heads + head) * words;
  };
  static thread_local Context context;
  Context& shard = context;
  int64_t level = 0;
  for (int i = 0; i < kv::kShards; ++i) {
    gather(span, layer, kTreeOrder[static_cast<size_t>(i)], position(count - 1) + 1, shard);
    for (int64_t head = 0; head < heads; ++head) {
      if (!shard.positions.empty()) expand_head(layer, head, shard);
      for_rows(state_.parallel, count, 64, [&](int64_t first, int64_t last) {
        std::vector<kernels::AttentionRow> rows;
        for (int64_t row = first; row < last; ++row) {
          const auto seen = std::upper_bound(shard.positions.begin(), shard.positions.end(), position(row));
          rows.push_back({queries + ((whole + row) * heads + head) * query_bytes,
                          seen - shard.positions.begin(), partial(level, row, head)});
        }
        kernels::attend({.dtype = state_.setup.cache.query_dtype(),
                         .shape = {key_width(), key_width(), config.value},
                         .heads = 1,
                         .query_stride = key_width(),
                         .rows = rows,
                         .entries = shard.pointers.data(),
                         .scale_log2 = config.scale * std::numbers::log2e_v<float>});
      });
    }
    for (int merges = std::countr_zero(static_cast<unsigned>(i + 1)); merges > 0; --merges, --level) {
      for_rows(state_.parallel, count * heads, 64, [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; ++at) {
          kernels::merge_partial(partial(level - 1, 0, 0) + at * words, partial(level, 0, 0) + at * words,
                                 config.value);
        }
      });
    }
    ++level;
  }
  for_rows(state_.parallel, count * heads, 64, [&](int64_t first, int64_t last) {
    for (int64_t at = first; at < last; ++at) {
      kernels::finish_partial(partials + at * words, config.value, out + (whole * heads + at) * config.value);
    }
  });
}

void Expanded::attend(int64_t layer, const std::byte* queries, float* out) {
  for (const SpanRoute& span : state_.layout.spans()) {
    if (!state_.expands(span) || state_.layout.owned_rows(span, state_.rank).empty()) continue;
    attend_span(span, layer, queries, out);
  }
}

}  // namespace weft::worker
