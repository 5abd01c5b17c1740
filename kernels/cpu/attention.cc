#include "kernels/attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels/cpu/attention_columns.h"
#include "kernels/cpu/attention_dots.h"
#include "kernels/cpu/attention_values.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

constexpr int64_t kQueryBlock = 64;             // queries that share a pass over the entries
constexpr int64_t kEntryBlockBytes = 18 << 10;  // keys that stay in the L1 cache while the queries pass by
constexpr int64_t kGroupBytes = 64;             // 16 words
constexpr int64_t kColumnWordsMax = 256;  // longer keys are not transposed: they would not stay in cache

// Rows of `bytes` as whole groups of 16 words and a padded copy of the rest.
class Rows {
 public:
  explicit Rows(int64_t bytes) : whole_(bytes / kGroupBytes * kGroupBytes), rest_(bytes - whole_) {}

  void set(int64_t index, const void* row) {
    WordRow& out = rows_[index];
    out.words = static_cast<const float*>(row);
    if (rest_ == 0) return;
    float* tail = tails_ + index * 16;
    std::memset(tail, 0, kGroupBytes);
    std::memcpy(tail, static_cast<const std::byte*>(row) + whole_, static_cast<size_t>(rest_));
    out.tail = tail;
  }
  const WordRow* at(int64_t index) const { return rows_ + index; }

 private:
  int64_t whole_, rest_;
  WordRow rows_[kQueryBlock];
  alignas(64) float tails_[kQueryBlock * 16];
};
static_assert(kQueryBlock == kGroupEntries);  // Rows holds either

void prefetch(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const std::byte*>(row) + i, 0, 2);
}

// Some consecutive queries of one call: query i is head i mod heads of row i / heads.
class QueryBlock {
 public:
  QueryBlock(const Attention& p, int64_t first, int64_t count)
      : p_(p),
        queries_(count),
        key_bytes_(p.shape.key * static_cast<int64_t>(dtype_bytes(p.dtype))),
        format_{p.dtype, p.shape.width(), p.fp8},
        entry_bytes_(format_.bytes()),
        columns_wanted_(count >= column_queries(p.dtype) && key_bytes_ % kGroupBytes == 0 &&
                        key_bytes_ / 4 <= kColumnWordsMax),
        query_rows_(key_bytes_),
        key_rows_(key_bytes_),
        strip_dots_(strip_dots(p.dtype)),
        column_dots_(column_dots(p.dtype)) {
    const int64_t stride = p.query_stride * static_cast<int64_t>(dtype_bytes(p.dtype));
    for (int64_t q = 0; q < queries_; ++q) {
      const AttentionRow& row = p.rows[static_cast<size_t>((first + q) / p.heads)];
      const int64_t head = (first + q) % p.heads;
      query_rows_.set(q, static_cast<const std::byte*>(row.query) + head * stride);
      counts_[q] = row.entry_count;
      skipped_[q] = row.skipped;
      partials_[q] = row.partials + head * partial_words(p.shape.value);
      m_[q] = kEmptyPartial;
      std::memset(partials_[q], 0, static_cast<size_t>(p.shape.value + 1) * 4);
    }
  }

  void run() {
    if (has_fp8()) decoded_words().resize(static_cast<size_t>(kGroupEntries * decoded_stride()));
    const int64_t total = counts_[queries_ - 1];
    int64_t active = 0;  // the queries before it have read their last entry
    int64_t end = 0;     // those from it on have not come to their first
    for (int64_t begin = skipped_[0] / kGroupEntries * kGroupEntries; begin < total; begin += kGroupEntries) {
      const int64_t count = std::min(kGroupEntries, total - begin);
      while (counts_[active] <= begin) ++active;
      while (end < queries_ && skipped_[end] < begin + count) ++end;
      if (active < end) add_group(active, end, begin, count);
    }
    for (int64_t q = 0; q < queries_; ++q) std::memcpy(partials_[q] + p_.shape.value + 1, &m_[q], 4);
  }

 private:
  bool has_fp8() const { return p_.fp8.runs > 0; }
  static std::vector<uint16_t>& decoded_words() {
    static thread_local std::vector<uint16_t> words;
    return words;
  }
  // An odd number of cache lines: rows do not share cache sets.
  int64_t decoded_stride() const { return ((format_.width + 31) / 32 | 1) * 32; }

  // The group's entries where they lie, or as bf16 if they are FP8.
  void open_group(int64_t begin, int64_t count) {
    group_ = p_.entries + begin;
    if (!has_fp8()) return;
    for (int64_t u = 0; u < count; ++u) {
      uint16_t* to = decoded_words().data() + u * decoded_stride();
      load_fp8_entry(format_, group_[u], to);
      decoded_[u] = to;
    }
    group_ = decoded_;
  }

  using Upcoming = std::span<const void* const>;

  // Entries of a group, counted from its first, that a query reads.
  struct Part {
    int64_t begin, end;
    bool operator==(const Part&) const = default;
  };
  Part part_of(int64_t query, int64_t begin, int64_t count) const {
    return {std::max<int64_t>(0, skipped_[query] - begin), std::min(count, counts_[query] - begin)};
  }

  void add_group(int64_t active, int64_t end, int64_t begin, int64_t count) {
    open_group(begin, count);
    score_group(active, end, begin, count);
    for (int64_t first = active, last = first; first < end; first = last) {
      const Part own = part_of(first, begin, count);  // of all queries up to `last`
      const int64_t own_count = own.end - own.begin;
      for (; last < end && part_of(last, begin, count) == own; ++last) {
        if (own_count <= 0) continue;
        float* scores = scores_ + last * kGroupEntries;
        if (own.begin > 0) std::memmove(scores, scores + own.begin, static_cast<size_t>(own_count) * 4);
        factors_[last] = group_weights(p_.dtype, scores, own_count, m_[last]);
      }
      if (own_count <= 0) continue;  // a window that begins where the list ends
      add_values({.dtype = p_.dtype,
                  .queries = last - first,
                  .value_offset = p_.shape.value_offset,
                  .value_width = p_.shape.value,
                  .entries = group_ + own.begin,
                  .entry_count = own_count,
                  .weights = scores_ + first * kGroupEntries,
                  .factors = factors_ + first,
                  .partials = partials_ + first});
    }
  }

  // The entries are scattered over the cache, so the next group's are fetched while this one is computed.
  void score_group(int64_t active, int64_t end, int64_t begin, int64_t count) {
    const int64_t left = counts_[queries_ - 1] - begin - count;
    Upcoming upcoming{p_.entries + begin + count, static_cast<size_t>(left)};
    if (left == 0) upcoming = p_.next;
    upcoming = upcoming.first(std::min<size_t>(upcoming.size(), kGroupEntries));
    if (columns_wanted_ && end - active >= column_queries(p_.dtype)) {
      score_columns(active, end, count, upcoming);
    } else {
      score_strips(active, end, count, upcoming);
    }
  }

  void score_columns(int64_t active, int64_t end, int64_t count, Upcoming upcoming) {
    const int64_t words = key_bytes_ / 4;
    transpose_words(group_, count, words, columns_);
    for (const void* entry : upcoming) prefetch(entry, entry_bytes_);
    column_dots_({.queries = query_rows_.at(active),
                  .query_count = end - active,
                  .columns = columns_,
                  .entry_count = count,
                  .words = words,
                  .scale = p_.scale_log2,
                  .out = scores_ + active * kGroupEntries});
  }

  void score_strips(int64_t active, int64_t end, int64_t count, Upcoming upcoming) {
    const int64_t block = std::clamp<int64_t>(kEntryBlockBytes / key_bytes_ / 16 * 16, 16, kGroupEntries);
    const int64_t strips = (end - active + kStripQueries - 1) / kStripQueries * ((count + block - 1) / block);
    int64_t strip = 0, fetched = 0;  // fetching is spread evenly over the strips
    for (int64_t u = 0; u < count; ++u) key_rows_.set(u, group_[u]);
    for (int64_t u = 0; u < count; u += block) {
      for (int64_t q = active; q < end; q += kStripQueries) {
        for (++strip; fetched < std::ssize(upcoming) * strip / strips; ++fetched) {
          prefetch(upcoming[static_cast<size_t>(fetched)], entry_bytes_);
        }
        strip_dots_({.queries = query_rows_.at(q),
                     .query_count = std::min(kStripQueries, end - q),
                     .entries = key_rows_.at(u),
                     .entry_count = std::min(block, count - u),
                     .words = key_bytes_ / kGroupBytes * 16,
                     .scale = p_.scale_log2,
                     .out = scores_ + q * kGroupEntries + u,
                     .out_stride = kGroupEntries});
      }
    }
  }

  const Attention& p_;
  const int64_t queries_;
  const int64_t key_bytes_;
  const EntryFormat format_;
  const int64_t entry_bytes_;  // as stored
  const bool columns_wanted_;
  Rows query_rows_, key_rows_;
  const StripDots strip_dots_;
  const ColumnDots column_dots_;
  int64_t counts_[kQueryBlock], skipped_[kQueryBlock];  // ascending
  const void* const* group_ = nullptr;
  const void* decoded_[kGroupEntries];
  float* partials_[kQueryBlock];
  int32_t m_[kQueryBlock];
  float factors_[kQueryBlock];
  alignas(64) float scores_[kQueryBlock * kGroupEntries];  // then weights
  alignas(64) float columns_[kGroupEntries * kColumnWordsMax];
};

}  // namespace

void attend(const Attention& p) {
  const EntryShape& shape = p.shape;
  CHECK(p.heads > 0 && shape.key > 0 && shape.value > 0 && shape.value_offset >= 0);
  CHECK_GE(p.query_stride, shape.key);
  CHECK(p.fp8.runs == 0 || (p.dtype == DType::kBF16 && p.fp8.elements() <= shape.width()));
  for (size_t row = 0; row < p.rows.size(); ++row) {
    CHECK_GE(p.rows[row].entry_count, row == 0 ? 0 : p.rows[row - 1].entry_count);
    CHECK_GE(p.rows[row].skipped, row == 0 ? 0 : p.rows[row - 1].skipped);
    CHECK_GE(p.rows[row].entry_count, p.rows[row].skipped);
  }
  const int64_t queries = std::ssize(p.rows) * p.heads;
  for (int64_t query = 0; query < queries; query += kQueryBlock) {
    QueryBlock(p, query, std::min(kQueryBlock, queries - query)).run();
  }
}

}  // namespace weft::kernels
