// The hash model (hash_math.h): queries, entries and index keys are words of the tokens themselves, so what a
// row sees depends on the cache alone, and nothing on the residual.
//
// A word is stored as digits of 3 bits, one to a column, which every cache format holds exactly; the column
// after them is 1, and the last one stays empty for the count (finish.h). A query is 1 in one column, whose
// key is a bit: the score is 0 or 1, and with the model's scale the weight 1 or 2. Sums of these are integers
// below 2^24, so float32 adds them exactly in any order, through every rescale and merge.
//
// Grouped queries: K holds the bits, V the digits. MLA: the rotary part holds the bits, the latent the
// digits.
#include <cmath>
#include <limits>

#include "worker/model/attention_ends.h"
#include "worker/model/cache_view.h"
#include "worker/model/hash_math.h"

namespace weft::worker {
namespace {

namespace hm = hash_model;

class Hash : public AttentionEnds {
 public:
  Hash(StepState& s, Selection& selection)
      : AttentionEnds(s), selection_(selection), shape_(*s.config.hash) {}

  void project(int64_t layer) override;
  void choose(int64_t layer) override;
  const void* head_outputs(const LayerWeights&, const float* z, int64_t rows, kv::Range heads) override;

 private:
  bool mla() const { return state.config.attention == AttentionKind::kMla; }
  bool owns_indexer(int64_t layer) const {
    return state.config.layers[static_cast<size_t>(layer)].indexer == Indexer::kFull;
  }
  int index_layer(int64_t layer) const { return shape_.selection[static_cast<size_t>(layer)]; }
  void write_queries(kv::Range home, kv::Range heads, std::byte* out);
  void write_entries(kv::Range home, kv::Range parts);
  void write_index_keys(int64_t layer, kv::Range home);
  void offer(int64_t layer);
  uint64_t word_of(int64_t head, const float* sums) const;

  // Of a home row.
  struct Row {
    uint64_t salt;
    int64_t position;
    uint32_t token;
  };
  Row row(int64_t home) const {
    const HomeRow& at = state.home()[static_cast<size_t>(home)];
    return {state.span_of(at).seed, at.position, state.tokens[static_cast<size_t>(home)]};
  }

  Selection& selection_;
  const hm::Shape& shape_;
  int64_t layer_ = 0;  // of the last project()
  std::vector<float> queries_, entries_, index_keys_, index_queries_, index_weights_, outputs_;
  Operand output_operand_;
};

// Of wide rows the parts that this rank stores, of whole rows all.
void Hash::project(int64_t layer) {
  layer_ = layer;
  for_queries([&](kv::Range home, kv::Range heads, std::byte* out) { write_queries(home, heads, out); });
  for (const int index : state.layout.wide_spans()) {
    const SpanRoute& span = state.layout.spans()[static_cast<size_t>(index)];
    if (state.attends(span))
      write_entries({span.first_wide, span.first_wide + span.rows}, state.parts_of(span));
  }
  write_entries({wide(), state.home_count()}, {0, state.config.kv_heads});
  if (!owns_indexer(layer)) return;
  for (const kv::Range& rows : state.attended()) write_index_keys(layer, rows);
  offer(layer);
}

void Hash::write_queries(kv::Range home, kv::Range heads, std::byte* out) {
  const int64_t width = state.config.key_width(), stride = heads.size() * width;
  const int64_t first_bit = mla() ? state.config.latent : 0;
  const DType dtype = state.setup.cache.query_dtype();
  float* queries = scratch(queries_, home.size() * stride);
  for_rows(state.parallel, home.size(), 16, [&](int64_t begin, int64_t end) {
    std::fill(queries + begin * stride, queries + end * stride, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      const Row at = row(home.begin + i);
      for (int64_t head = heads.begin; head < heads.end; ++head) {
        const int column = hm::query_column(shape_, at.salt, static_cast<int>(layer_), static_cast<int>(head),
                                            at.position, at.token);
        queries[i * stride + (head - heads.begin) * width + first_bit + column] = 1;
      }
    }
    kernels::convert(queries + begin * stride, (end - begin) * stride, dtype,
                     out + begin * stride * static_cast<int64_t>(dtype_bytes(dtype)));
  });
}

void Hash::write_entries(kv::Range home, kv::Range parts) {
  const ModelConfig& config = state.config;
  const int64_t width = config.entry_width(), stride = parts.size() * width;
  const int64_t values = config.entry_shape().value_offset, bits = mla() ? config.latent : 0;
  if (home.empty() || parts.empty()) return;
  float* entries = scratch(entries_, home.size() * stride);
  for_rows(state.parallel, home.size(), 16, [&](int64_t begin, int64_t end) {
    std::fill(entries + begin * stride, entries + end * stride, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      const Row at = row(home.begin + i);
      for (int64_t part = parts.begin; part < parts.end; ++part) {
        const hm::Entry entry = hm::entry(shape_, at.salt, static_cast<int>(layer_), static_cast<int>(part),
                                          at.position, at.token);
        float* out = entries + i * stride + (part - parts.begin) * width;
        for (int j = 0; j < shape_.key_bits; ++j) out[bits + j] = static_cast<float>(entry.weight(j) - 1);
        for (int j = 0; j < shape_.digits; ++j)
          out[values + j] = static_cast<float>(hm::digit(entry.value, j));
        out[values + shape_.digits] = 1;
      }
    }
  });
  for (int64_t part = parts.begin; part < parts.end; ++part) {
    store_entries(state, layer_,
                  {.part = static_cast<int>(part),
                   .home_begin = home.begin,
                   .count = home.size(),
                   .entries = entries + (part - parts.begin) * width,
                   .stride = stride});
  }
}

void Hash::write_index_keys(int64_t layer, kv::Range home) {
  const int64_t n = state.home_count(), heads = shape_.index_heads, width = shape_.index_width;
  const int at_layer = index_layer(layer);
  scratch(index_keys_, n * width);
  scratch(index_queries_, n * heads * width);
  scratch(index_weights_, n * heads);
  for_rows(state.parallel, home.size(), 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = home.begin + begin; i < home.begin + end; ++i) {
      const Row at = row(i);
      float* key = index_keys_.data() + i * width;
      for (int j = 0; j < width; ++j)
        key[j] = static_cast<float>(hm::index_key(at.salt, at_layer, at.position, at.token, j));
      for (int head = 0; head < heads; ++head) {
        float* query = index_queries_.data() + (i * heads + head) * width;
        for (int j = 0; j < width; ++j)
          query[j] = static_cast<float>(hm::index_query(at.salt, at_layer, head, at.position, at.token, j));
        index_weights_[static_cast<size_t>(i * heads + head)] = static_cast<float>(hm::index_weight(head));
      }
    }
  });
  store_index_keys(state, at_layer, home, index_keys_.data());
}

void Hash::offer(int64_t layer) {
  // Of rows that others attend to there is nothing in these two.
  scratch(index_queries_, state.home_count() * shape_.index_heads * shape_.index_width);
  scratch(index_weights_, state.home_count() * shape_.index_heads);
  selection_.offer(index_layer(layer), index_queries_.data(), index_weights_.data());
}

void Hash::choose(int64_t layer) {
  if (owns_indexer(layer)) selection_.choose(index_layer(layer));
}

// The columns must be whole numbers, and both counts equal, if nothing went wrong; if something did, the word
// is another one.
uint64_t Hash::word_of(int64_t head, const float* sums) const {
  hm::Sums out;
  for (int j = 0; j < shape_.digits; ++j)
    out.sum += static_cast<uint64_t>(std::llrint(sums[j])) << (j * hm::kDigitBits);
  const auto counted = static_cast<uint64_t>(std::llrint(sums[shape_.digits]));
  out.count = static_cast<uint64_t>(std::llrint(sums[state.config.value_width() - 1]));
  out.sum += (counted - out.count) << 32;
  return hm::head_word(shape_, static_cast<int>(layer_), static_cast<int>(head), out);
}

// What is not finite, or beyond any sum, makes the row NaN: nobody wrote an entry that it read.
const void* Hash::head_outputs(const LayerWeights&, const float* z, int64_t rows, kv::Range heads) {
  constexpr float kSumsEnd = 0x1p32f;
  const int64_t in = state.config.value_width(), out = state.config.value;
  float* outputs = scratch(outputs_, rows * heads.size() * out);
  for_rows(state.parallel, rows, 16, [&](int64_t begin, int64_t end) {
    std::fill(outputs + begin * heads.size() * out, outputs + end * heads.size() * out, 0.0f);
    for (int64_t i = begin * heads.size(); i < end * heads.size(); ++i) {
      const float* sums = z + i * in;
      const bool sound = std::all_of(sums, sums + in, [](float sum) { return std::abs(sum) < kSumsEnd; });
      const uint64_t word = sound ? word_of(heads.begin + i % heads.size(), sums) : 0;
      for (int j = 0; j < shape_.digits; ++j) {
        outputs[i * out + j] =
            sound ? static_cast<float>(hm::digit(word, j)) : std::numeric_limits<float>::quiet_NaN();
      }
    }
  });
  return output_operand_.of(state.parallel, state.weights.dtype, outputs, rows * heads.size() * out);
}

}  // namespace

std::unique_ptr<AttentionEnds> make_hash(StepState& state, Selection& selection) {
  return std::make_unique<Hash>(state, selection);
}

}  // namespace weft::worker
