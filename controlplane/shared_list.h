// A list that only grows, and that copies share: the tokens of a context, the identities of its blocks.
//
// share() gives another list with the same elements in O(pieces), whatever their number: what stands is
// frozen as one more piece, and each list goes on behind it by itself. A piece is what one request added.
// Reading an element is O(log pieces). Frozen pieces never change, so lists that share them may be read by
// several threads; one list belongs to one thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kv/block_hash.h"
#include "proto/vocab/check.h"

namespace weft::controlplane {

template <typename T>
class SharedList {
 public:
  SharedList() = default;
  explicit SharedList(std::vector<T> elements) : own_(std::move(elements)) {}
  SharedList(SharedList&&) = default;
  SharedList& operator=(SharedList&&) = default;
  SharedList(const SharedList&) = delete;  // share() says what it costs
  SharedList& operator=(const SharedList&) = delete;

  int64_t size() const { return frozen_ + std::ssize(own_); }
  void push_back(const T& element) { own_.push_back(element); }
  void append(std::span<const T> elements) { own_.insert(own_.end(), elements.begin(), elements.end()); }

  SharedList share() {
    if (!own_.empty()) {
      const int64_t count = std::ssize(own_);
      pieces_.push_back({frozen_, std::make_shared<const std::vector<T>>(std::exchange(own_, {}))});
      frozen_ += count;
    }
    SharedList other;
    other.pieces_ = pieces_;
    other.frozen_ = frozen_;
    return other;
  }

  const T& operator[](int64_t index) const {
    CHECK(index >= 0 && index < size(), index, " of ", size());
    if (index >= frozen_) return own_[static_cast<size_t>(index - frozen_)];
    const Piece& piece = *piece_of(index);
    return (*piece.elements)[static_cast<size_t>(index - piece.start)];
  }
  // Adds elements [first, first + count) to `to`.
  void read(int64_t first, int64_t count, std::vector<T>& to) const {
    CHECK(first >= 0 && count >= 0 && first + count <= size(), first, " + ", count, " of ", size());
    if (count == 1) return to.push_back((*this)[first]);
    while (count > 0) {
      const Piece* piece = first < frozen_ ? piece_of(first) : nullptr;
      const std::vector<T>& from = piece != nullptr ? *piece->elements : own_;
      const int64_t at = first - (piece != nullptr ? piece->start : frozen_);
      const int64_t n = std::min(count, std::ssize(from) - at);
      to.insert(to.end(), from.begin() + at, from.begin() + at + n);
      first += n;
      count -= n;
    }
  }
  std::vector<T> copy() const {
    std::vector<T> out;
    out.reserve(static_cast<size_t>(size()));
    read(0, size(), out);
    return out;
  }
  // Calls f(piece, elements) for the frozen pieces; lists that share one give the same address.
  template <typename F>
  void for_each_piece(F f) const {
    for (const Piece& piece : pieces_)
      f(static_cast<const void*>(piece.elements.get()), std::ssize(*piece.elements));
  }

 private:
  struct Piece {
    int64_t start = 0;
    std::shared_ptr<const std::vector<T>> elements;  // not empty
  };
  const Piece* piece_of(int64_t index) const {
    const auto after = std::upper_bound(pieces_.begin(), pieces_.end(), index,
                                        [](int64_t i, const Piece& piece) { return i < piece.start; });
    return &*std::prev(after);
  }

  std::vector<Piece> pieces_;  // in order
  int64_t frozen_ = 0;         // elements in them
  std::vector<T> own_;
};

using TokenList = SharedList<uint32_t>;
using Identities = SharedList<kv::BlockHash>;  // of the full blocks of a context, first to last

}  // namespace weft::controlplane
