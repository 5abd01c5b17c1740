// One SHA-256 over the digests of a request's positions.
//
// Positions count once, in ascending order, whatever order and however often their digests arrive (a repeated
// step may report a position again); two different digests of one position are an error.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "proto/vocab/result.h"

namespace weft::ctl {

class PositionDigests {
 public:
  void add(uint64_t position, const std::string& sha256);
  bool empty() const { return digests_.empty(); }
  size_t count() const { return digests_.size(); }
  uint64_t first() const { return digests_.begin()->first; }
  uint64_t last() const { return digests_.rbegin()->first; }
  // Lower-case hex. kInternal: a position came with two digests.
  Result<std::string> hex_digest() const;

 private:
  std::map<uint64_t, std::string> digests_;
  bool contradicted_ = false;
  uint64_t contradicted_position_ = 0;
};

}  // namespace weft::ctl
