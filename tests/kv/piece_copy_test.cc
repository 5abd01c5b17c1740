// Goal: every byte of every piece arrives and no other byte changes, for any sizes and alignments, through
// the caches and past them. Method: random lists between two arenas, compared with a plain loop.
#include "kv/piece_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "proto/vocab/random.h"

namespace weft::kv {
namespace {

std::vector<std::byte> noise(SplitMix64& random, size_t bytes) {
  std::vector<std::byte> out(bytes);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random.next());
  return out;
}

// Pieces of 0 … `longest` bytes with gaps between them, sources in another order than targets.
std::vector<CopyPiece> pieces_between(SplitMix64& random, std::vector<std::byte>& to,
                                      const std::vector<std::byte>& from, size_t longest) {
  std::vector<CopyPiece> pieces;
  for (size_t at = random.below(70); at < to.size();) {
    const size_t bytes = std::min<size_t>(random.below(longest + 1), to.size() - at);
    pieces.push_back({to.data() + at, from.data() + random.below(from.size() - bytes + 1), bytes});
    at += bytes + random.below(70);
  }
  for (size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[random.below(i)]);
  return pieces;
}

TEST(PieceCopy, EqualsAPlainLoop) {
  for (uint64_t seed = 1; seed <= 40; ++seed) {
    SCOPED_TRACE(seed);
    SplitMix64 random(seed);
    const size_t bytes = seed % 2 == 0 ? 3 * kStreamedBytes : kStreamedBytes / 2;
    const std::vector<std::byte> from = noise(random, bytes);
    std::vector<std::byte> to = noise(random, bytes);
    const size_t longest = size_t{1} << (4 + seed % 14);
    const std::vector<CopyPiece> pieces = pieces_between(random, to, from, longest);
    std::vector<std::byte> expected = to;
    for (const CopyPiece& piece : pieces) {
      std::copy(piece.from, piece.from + piece.bytes, expected.begin() + (piece.to - to.data()));
    }
    copy_pieces(pieces);
    EXPECT_EQ(to, expected);
  }
}

TEST(PieceCopy, PartsOfALargeListGoPastTheCachesToo) {
  SplitMix64 random(5);
  const std::vector<std::byte> from = noise(random, 1000);
  std::vector<std::byte> to(1000);
  const CopyPiece piece{to.data(), from.data(), 1000};
  copy_pieces({&piece, 1}, kStreamedBytes);
  EXPECT_EQ(to, from);
  copy_pieces({});
}

}  // namespace
}  // namespace weft::kv
