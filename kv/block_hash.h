// The identity of a full block: BLAKE2b-128 of its parent's identity and its tokens (libsodium).
//
// The first block's parent is the namespace: a hash of model, cache format and tenant salt. Two blocks with
// equal identity hold equal bytes. Never used for placement or arithmetic.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace weft::kv {

struct BlockHash {
  std::array<uint8_t, 16> bytes{};
  friend bool operator==(const BlockHash&, const BlockHash&) = default;
};

struct BlockHashHasher {
  size_t operator()(const BlockHash& hash) const {
    size_t out;
    std::memcpy(&out, hash.bytes.data(), sizeof out);
    return out;
  }
};

BlockHash namespace_hash(std::string_view model, std::string_view cache_format, std::string_view tenant_salt);
BlockHash block_hash(const BlockHash& parent, std::span<const uint32_t> tokens);
// The chain of all full blocks of a prompt, in order.
std::vector<BlockHash> block_hashes(const BlockHash& root, std::span<const uint32_t> tokens,
                                    int64_t block_tokens);

}  // namespace weft::kv
