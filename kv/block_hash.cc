#include "kv/block_hash.h"

#include <sodium.h>

#include "proto/vocab/check.h"

namespace weft::kv {
namespace {

class Hasher {
 public:
  Hasher() { CHECK_EQ(crypto_generichash_init(&state_, nullptr, 0, sizeof(BlockHash)), 0); }
  void add(const void* data, size_t bytes) {
    CHECK_EQ(crypto_generichash_update(&state_, static_cast<const unsigned char*>(data), bytes), 0);
  }
  void add_text(std::string_view text) {
    const uint64_t size = text.size();  // length first: no two lists of texts collide
    add(&size, sizeof size);
    add(text.data(), text.size());
  }
  BlockHash finish() {
    BlockHash out;
    CHECK_EQ(crypto_generichash_final(&state_, out.bytes.data(), out.bytes.size()), 0);
    return out;
  }

 private:
  crypto_generichash_state state_;
};

}  // namespace

BlockHash namespace_hash(std::string_view model, std::string_view cache_format,
                         std::string_view tenant_salt) {
  Hasher hasher;
  hasher.add_text("weft block namespace 1");
  hasher.add_text(model);
  hasher.add_text(cache_format);
  hasher.add_text(tenant_salt);
  return hasher.finish();
}

BlockHash block_hash(const BlockHash& parent, std::span<const uint32_t> tokens) {
  Hasher hasher;
  hasher.add(parent.bytes.data(), parent.bytes.size());
  hasher.add(tokens.data(), tokens.size_bytes());
  return hasher.finish();
}

std::vector<BlockHash> block_hashes(const BlockHash& root, std::span<const uint32_t> tokens,
                                    int64_t block_tokens) {
  std::vector<BlockHash> hashes;
  hashes.reserve(tokens.size() / static_cast<size_t>(block_tokens));
  BlockHash parent = root;
  for (size_t at = 0; at + static_cast<size_t>(block_tokens) <= tokens.size();
       at += static_cast<size_t>(block_tokens)) {
    parent = block_hash(parent, tokens.subspan(at, static_cast<size_t>(block_tokens)));
    hashes.push_back(parent);
  }
  return hashes;
}

}  // namespace weft::kv
