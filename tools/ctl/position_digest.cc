#include "tools/ctl/position_digest.h"

#include <sodium.h>

#include "tools/ctl/json.h"

namespace weft::ctl {

void PositionDigests::add(uint64_t position, const std::string& sha256) {
  const auto [known, fresh] = digests_.emplace(position, sha256);
  if (!fresh && known->second != sha256 && !contradicted_) {
    contradicted_ = true;
    contradicted_position_ = position;
  }
}

Result<std::string> PositionDigests::hex_digest() const {
  if (contradicted_) {
    return error(ErrorCode::kInternal,
                 "position " + std::to_string(contradicted_position_) + " came with two digests");
  }
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  for (const auto& [position, digest] : digests_) {
    crypto_hash_sha256_update(&state, reinterpret_cast<const unsigned char*>(digest.data()), digest.size());
  }
  std::string out(crypto_hash_sha256_BYTES, '\0');
  crypto_hash_sha256_final(&state, reinterpret_cast<unsigned char*>(out.data()));
  return hex(out);
}

}  // namespace weft::ctl
