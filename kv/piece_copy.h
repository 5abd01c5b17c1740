// Copies scattered pieces of memory as fast as one large block: pages between the device's pool and the
// host's.
//
// Large lists go past the caches, with stores that read no line first and with the next bytes asked for in
// time, also over the gap from one piece to the next; a short list is copied plainly and is warm for its
// reader. No state; any thread, several at once on different pieces. Bytes.
#pragma once

#include <cstddef>
#include <span>

namespace weft::kv {

struct CopyPiece {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t bytes = 0;
};

// Lists of fewer bytes are copied through the caches.
inline constexpr size_t kStreamedBytes = size_t{1} << 20;

// Targets overlap neither each other nor any source. When it returns, what was copied is visible to whoever
// sees a later store of the caller. `whole` is the size of what the pieces are a part of; 0: they are all.
void copy_pieces(std::span<const CopyPiece> pieces, size_t whole = 0);

}  // namespace weft::kv
