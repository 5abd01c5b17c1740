// Random numbers that mean the same everywhere.
//
// mix64: the finaliser of SplitMix64 (Steele, Lea, Flood 2014), a fixed public hash.
// SplitMix64: a seeded stream for tests and generators.
// philox4x32: the counter-based generator Philox4x32-10 (Salmon et al., SC 2011). Sampling keys it by
// (request seed, position), so a token never depends on what else ran.
#pragma once

#include <array>
#include <cstdint>

namespace weft {

constexpr uint64_t mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

class SplitMix64 {
 public:
  explicit constexpr SplitMix64(uint64_t seed) : state_(seed) {}
  constexpr uint64_t next() {
    const uint64_t out = mix64(state_);
    state_ += 0x9e3779b97f4a7c15ull;
    return out;
  }
  // Uniform in [0, bound), bound > 0; the bias is below 2^-32 for bounds under 2^32.
  constexpr uint64_t below(uint64_t bound) {
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<Wide>(next()) * bound) >> 64);
  }
  // Uniform in [0, 1).
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }

 private:
  uint64_t state_;
};

constexpr std::array<uint32_t, 4> philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = uint64_t{0xD2511F53u} * counter[0];
    const uint64_t p1 = uint64_t{0xCD9E8D57u} * counter[2];
    counter = {static_cast<uint32_t>(p1 >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(p1),
               static_cast<uint32_t>(p0 >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(p0)};
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace weft
