#include "kernels/mla_attention.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/mla_dots.h"
#include "kernels/cpu/mla_values.h"
#include "proto/vocab/check.h"

namespace weft::kernels {
namespace {

constexpr int64_t kHeadBlock = 64;              // heads that share a pass over the entries
constexpr int64_t kEntryBlockBytes = 18 << 10;  // entries that stay in the L1 cache while the heads pass by
constexpr int64_t kGroupBytes = 64;             // 16 words

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
  WordRow rows_[kHeadBlock];
  alignas(64) float tails_[kHeadBlock * 16];
};
static_assert(kHeadBlock == kGroupEntries);  // Rows holds either

void prefetch(const void* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(static_cast<const std::byte*>(row) + i, 0, 2);
}

// Heads [0, heads) of one call, already offset.
class HeadBlock {
 public:
  HeadBlock(const MlaAttention& p, int64_t head_begin, int64_t heads)
      : p_(p),
        heads_(heads),
        bytes_((p.latent + p.rope) * static_cast<int64_t>(dtype_bytes(p.dtype))),
        partials_(p.partials + head_begin * partial_words(p.latent)),
        query_(bytes_),
        entries_(bytes_),
        dots_(strip_dots(p.dtype)) {
    const auto* first = static_cast<const std::byte*>(p.query);
    const int64_t stride = p.query_stride * static_cast<int64_t>(dtype_bytes(p.dtype));
    for (int64_t h = 0; h < heads_; ++h) {
      query_.set(h, first + (head_begin + h) * stride);
      m_[h] = kEmptyPartial;
      std::memset(partial(h), 0, static_cast<size_t>(p.latent + 1) * 4);
    }
  }

  void run() {
    for (int64_t begin = 0; begin < p_.entry_count; begin += kGroupEntries) {
      add_group(begin, std::min(kGroupEntries, p_.entry_count - begin));
    }
    for (int64_t h = 0; h < heads_; ++h) std::memcpy(partial(h) + p_.latent + 1, &m_[h], 4);
  }

 private:
  float* partial(int64_t head) { return partials_ + head * partial_words(p_.latent); }

  void add_group(int64_t begin, int64_t count) {
    score_group(begin, count);
    for (int64_t h = 0; h < heads_; ++h)
      factors_[h] = group_weights(scores_ + h * kGroupEntries, count, m_[h]);
    add_values({.dtype = p_.dtype,
                .heads = heads_,
                .latent = p_.latent,
                .entries = p_.entries + begin,
                .entry_count = count,
                .weights = scores_,
                .factors = factors_,
                .partials = partials_});
  }

  // The entries are scattered over the cache, so the next group's are fetched while this one is computed,
  // spread evenly over the strips.
  void score_group(int64_t begin, int64_t count) {
    const int64_t block = std::clamp<int64_t>(kEntryBlockBytes / bytes_ / 16 * 16, 16, kGroupEntries);
    const int64_t strips = (heads_ + kStripHeads - 1) / kStripHeads * ((count + block - 1) / block);
    const int64_t upcoming = std::clamp<int64_t>(p_.entry_count - begin - count, 0, kGroupEntries);
    int64_t strip = 0, fetched = 0;
    for (int64_t u = 0; u < count; ++u) entries_.set(u, p_.entries[begin + u]);
    for (int64_t u = 0; u < count; u += block) {
      for (int64_t h = 0; h < heads_; h += kStripHeads) {
        for (++strip; fetched < upcoming * strip / strips; ++fetched) {
          prefetch(p_.entries[begin + count + fetched], bytes_);
        }
        dots_({.heads = query_.at(h),
               .head_count = std::min(kStripHeads, heads_ - h),
               .entries = entries_.at(u),
               .entry_count = std::min(block, count - u),
               .words = bytes_ / kGroupBytes * 16,
               .scale = p_.scale_log2,
               .out = scores_ + h * kGroupEntries + u,
               .out_stride = kGroupEntries});
      }
    }
  }

  const MlaAttention& p_;
  const int64_t heads_;
  const int64_t bytes_;  // of a query head, and of an entry
  float* const partials_;
  Rows query_, entries_;
  const StripDots dots_;
  int32_t m_[kHeadBlock];
  float factors_[kHeadBlock];
  alignas(64) float scores_[kHeadBlock * kGroupEntries];  // then weights
};

}  // namespace

void mla_attend(const MlaAttention& p) {
  CHECK(p.heads > 0 && p.latent > 0 && p.rope >= 0 && p.entry_count >= 0);
  CHECK_GE(p.query_stride, p.latent + p.rope);
  for (int64_t head = 0; head < p.heads; head += kHeadBlock) {
    HeadBlock(p, head, std::min(kHeadBlock, p.heads - head)).run();
  }
}

}  // namespace weft::kernels
