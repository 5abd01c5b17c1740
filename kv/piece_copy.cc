#include "kv/piece_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace weft::kv {
namespace {

#if defined(__x86_64__)
constexpr size_t kLine = 64;
// Asked for so far ahead of the copy. Measured on 36 KiB pieces: 1 KiB 0.89 of a large memcpy, 2 KiB 0.94,
// 4 KiB 0.92; without the step over the gap 0.89.
constexpr size_t kAhead = 2048;

__attribute__((target("avx2"))) inline void stream_line(std::byte* to, const std::byte* from) {
  const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + kLine / 2));
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + kLine / 2), high);
}

// `next` is where the piece after this one is read from.
__attribute__((target("avx2"))) void stream_piece(const CopyPiece& piece, const std::byte* next) {
  std::byte* to = piece.to;
  const std::byte* from = piece.from;
  const size_t odd = reinterpret_cast<uintptr_t>(to) % kLine;
  const size_t head = std::min(odd == 0 ? 0 : kLine - odd, piece.bytes);
  std::memcpy(to, from, head);
  to += head;
  from += head;
  const size_t lines = (piece.bytes - head) / kLine * kLine;
  const size_t own = lines - std::min(lines, kAhead);
  for (size_t at = 0; at < own; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(from + at + kAhead), _MM_HINT_T0);
    stream_line(to + at, from + at);
  }
  for (size_t at = own; at < lines; at += kLine) {
    _mm_prefetch(reinterpret_cast<const char*>(next + (at - own)), _MM_HINT_T0);
    stream_line(to + at, from + at);
  }
  std::memcpy(to + lines, from + lines, piece.bytes - head - lines);
}

void stream_pieces(std::span<const CopyPiece> pieces) {
  for (size_t i = 0; i < pieces.size(); ++i) {
    stream_piece(pieces[i], pieces[std::min(i + 1, pieces.size() - 1)].from);
  }
  _mm_sfence();
}

bool can_stream() {
  static const bool can = __builtin_cpu_supports("avx2");
  return can;
}
#else
void stream_pieces(std::span<const CopyPiece>) {}
bool can_stream() { return false; }
#endif

}  // namespace

void copy_pieces(std::span<const CopyPiece> pieces, size_t whole) {
  for (const CopyPiece& piece : pieces) {
    if (whole >= kStreamedBytes) break;
    whole += piece.bytes;
  }
  if (whole >= kStreamedBytes && can_stream()) return stream_pieces(pieces);
  for (const CopyPiece& piece : pieces) std::memcpy(piece.to, piece.from, piece.bytes);
}

}  // namespace weft::kv
