// Ids shared by wire and memory. Distinct types: mixing two does not compile.
//
// A rank is a plain int: it is arithmetic (r mod c, masks) everywhere it appears.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace weft {

enum class RequestId : uint64_t {};  // given by the daemon; never reused in its life
enum class StepId : uint64_t {};     // numbered from 1, without gaps
enum class Epoch : uint32_t {};      // version of the topology; starts at 1, +1 at every recovery
enum class PageId : uint32_t {};     // a page within one rank's pool of one stream
enum class TableId : uint32_t {};    // a page table in the control arena
enum class BlockId : uint32_t {};    // a block record of the control plane

inline constexpr PageId kNoPage{0xffffffffu};

// Ids go to arithmetic and text by name, never by accident.
template <typename Id>
requires std::is_enum_v<Id>
constexpr auto number(Id id) { return static_cast<std::underlying_type_t<Id>>(id); }

using RankMask = uint32_t;  // bit r = rank r
inline constexpr int kMaxRanks = 8;
constexpr RankMask mask_of(int rank) { return RankMask{1} << rank; }
constexpr RankMask all_ranks(int rank_count) { return (RankMask{1} << rank_count) - 1; }
constexpr bool holds(RankMask mask, int rank) { return ((mask >> rank) & 1u) != 0; }
constexpr int rank_count_of(RankMask mask) { return std::popcount(mask); }
constexpr int lowest_rank(RankMask mask) { return std::countr_zero(mask); }

enum class DType : uint8_t { kF32 = 0, kBF16 = 1 };
constexpr size_t dtype_bytes(DType type) { return type == DType::kF32 ? 4 : 2; }
constexpr const char* dtype_name(DType type) { return type == DType::kF32 ? "f32" : "bf16"; }

}  // namespace weft
