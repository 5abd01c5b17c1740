// Address arithmetic inside one rank's page pool.
//
//   pool: entries pages │ index-key pages, each page [layer][P · bytes per token] of one part
//
// Which page holds what is the control plane's business; this only turns (stream, page, layer, slot) into an
// address, and copies pages.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kv/layout.h"
#include "proto/vocab/check.h"
#include "proto/vocab/ids.h"

namespace weft::kv {

struct PoolPages {
  int64_t entries = 0;
  int64_t index_keys = 0;
  int64_t count(Stream stream) const { return stream == Stream::kEntries ? entries : index_keys; }
};

inline size_t pool_bytes(const CacheGeometry& geometry, const PoolPages& pages) {
  return static_cast<size_t>(pages.entries * geometry.page_bytes(Stream::kEntries) +
                             pages.index_keys * geometry.page_bytes(Stream::kIndexKeys));
}

// Tokens whose entries fit if all their parts are in one pool.
inline int64_t pool_tokens(const CacheGeometry& geometry, int64_t entry_pages) {
  return entry_pages / geometry.stream(Stream::kEntries).parts * geometry.block_tokens;
}

class PagePool {
 public:
  PagePool() = default;
  PagePool(std::byte* base, const CacheGeometry& geometry, const PoolPages& pages)
      : base_(base), geometry_(geometry), pages_(pages) {}

  std::byte* page(Stream stream, PageId id) const {
    CHECK_LT(number(id), pages_.count(stream));
    const int64_t before =
        stream == Stream::kEntries ? 0 : pages_.entries * geometry_.page_bytes(Stream::kEntries);
    return base_ + before + static_cast<int64_t>(number(id)) * geometry_.page_bytes(stream);
  }
  // The P slots of one layer. `layer` counts the layers that keep this stream.
  std::byte* layer(Stream stream, PageId id, int64_t layer) const {
    return page(stream, id) + layer * geometry_.layer_bytes(stream);
  }
  const CacheGeometry& geometry() const { return geometry_; }
  const PoolPages& pages() const { return pages_; }

 private:
  std::byte* base_ = nullptr;
  CacheGeometry geometry_;
  PoolPages pages_;
};

}  // namespace weft::kv
