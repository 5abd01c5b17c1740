#include "kv/control_arena.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "proto/vocab/check.h"
#include "proto/vocab/units.h"

namespace weft::kv {
namespace {

constexpr size_t kLine = 64;

size_t padded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// a − b of numbers that run over 2^32 and are never far apart.
int32_t ahead(uint32_t a, uint32_t b) { return static_cast<int32_t>(a - b); }

// Waits on `bell` until `done()`; false on timeout. `done` is asked again after every ring.
template <typename Done>
bool wait_for_bell(const std::atomic<uint32_t>& bell, Duration timeout, Done done) {
  const Time start = monotonic_now();
  for (;;) {
    const uint32_t heard = bell.load(std::memory_order_seq_cst);
    if (done()) return true;
    const Duration left = timeout - (monotonic_now() - start);
    if (left <= Duration::zero()) return false;
    futex_wait(bell, heard, left);
  }
}

}  // namespace

Result<void> validate(const ControlLimits& limits) {
  auto in = [](const char* field, int64_t value, int64_t min, int64_t max) -> Result<void> {
    if (value >= min && value <= max) return {};
    return error(ErrorCode::kInvalidArgument,
                 std::to_string(value) + " is not in " + std::to_string(min) + " … " + std::to_string(max),
                 field);
  };
  TRY_VOID(in("rank_count", limits.rank_count, 1, kMaxRanks));
  TRY_VOID(in("block_tokens", limits.block_tokens, 1, int64_t{1} << 20));
  TRY_VOID(in("parts", limits.parts, 1, kStreams * kMaxParts));
  TRY_VOID(in("table_count", limits.table_count, 1, int64_t{1} << 20));
  TRY_VOID(in("table_blocks", limits.table_blocks, 1, int64_t{1} << 24));
  TRY_VOID(in("host_parts", limits.host_parts, 0, limits.parts));
  TRY_VOID(in("hot_pages", limits.hot_pages, 0, int64_t{1} << 20));
  TRY_VOID(in("max_samples", limits.max_samples, 1, int64_t{1} << 20));
  TRY_VOID(in("plan_bytes_max", limits.plan_bytes_max, 1, kGiB));
  TRY_VOID(in("result_bytes_max", limits.result_bytes_max, 1, kGiB));
  return {};
}

struct ControlArena::Header {
  uint32_t magic;
  uint32_t version;
  ControlLimits limits;
  alignas(kLine) std::atomic<uint32_t> aborted_epoch;  // the highest epoch given up; 0: none
  alignas(kLine) std::atomic<uint32_t> plans_published;
  std::atomic<uint32_t> plan_bell;  // rung by a new plan and by an abort
  alignas(kLine) std::atomic<uint32_t> token_bell;
  std::atomic<uint32_t> token_waiters;  // too high once a waiter was killed: needless wakes, no harm
  ExchangeBell exchange_bell;
};
struct ControlArena::PlanCell {
  uint32_t sequence, epoch, bytes;
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + sizeof(PlanCell); }
};
struct ControlArena::ResultCell {
  uint64_t bytes;
  std::byte* data() { return reinterpret_cast<std::byte*>(this) + sizeof(ResultCell); }
};

ControlArena::Layout::Layout(const ControlLimits& limits) {
  const auto ranks = static_cast<size_t>(limits.rank_count);
  const auto tables_count = static_cast<size_t>(limits.table_count);
  plan_stride = padded(sizeof(PlanCell) + static_cast<size_t>(limits.plan_bytes_max));
  result_stride = padded(sizeof(ResultCell) + static_cast<size_t>(limits.result_bytes_max));
  states = padded(sizeof(Header));
  flags = states + ranks * sizeof(RankState);
  tokens = flags + ranks * sizeof(ExchangeFlag);
  plans = tokens + padded(size_t{kTokenSteps} * static_cast<size_t>(limits.max_samples) * sizeof(uint64_t));
  results = plans + size_t{kPlanCells} * plan_stride;
  versions = results + ranks * size_t{kResultCells} * result_stride;
  tables = versions + padded(tables_count * sizeof(uint32_t));
  block_pages = static_cast<size_t>(limits.parts) * ranks;
  host_tables =
      tables + padded(tables_count * static_cast<size_t>(limits.table_blocks) * block_pages * sizeof(PageId));
  host_table_pages = limits.host_parts == 0 ? 0
                                            : static_cast<size_t>(limits.table_blocks * limits.host_parts) +
                                                  static_cast<size_t>(limits.hot_pages) * ranks;
  total = host_tables + tables_count * host_table_pages * sizeof(PageId);
}

size_t control_arena_bytes(const ControlLimits& limits) {
  validate(limits).value();
  return ControlArena::Layout(limits).total;
}

ControlArena::ControlArena(Mapping mapping, const ControlLimits& limits)
    : mapping_(std::move(mapping)),
      limits_(limits),
      layout_(limits),
      readers_(all_ranks(limits.rank_count)) {}

Result<ControlArena> ControlArena::format(Mapping mapping, const ControlLimits& limits) {
  TRY_VOID(validate(limits));
  if (mapping.bytes() < Layout(limits).total) {
    return error(ErrorCode::kInvalidArgument, "the mapping is smaller than the control arena's limits need");
  }
  auto* header = new (mapping.data()) Header{};
  header->version = kControlVersion;
  header->limits = limits;
  header->magic = kControlMagic;
  return ControlArena(std::move(mapping), limits);
}

Result<ControlArena> ControlArena::open(Mapping mapping) {
  if (mapping.bytes() < sizeof(Header)) return error(ErrorCode::kBadMessage, "too small for a control arena");
  const auto* header = std::launder(reinterpret_cast<const Header*>(mapping.data()));
  if (header->magic != kControlMagic) return error(ErrorCode::kBadMessage, "not a control arena");
  if (header->version != kControlVersion) {
    return error(ErrorCode::kBadMessage, "control arena version " + std::to_string(header->version) +
                                             ", expected " + std::to_string(kControlVersion));
  }
  const ControlLimits limits = header->limits;
  TRY_VOID(validate(limits));
  if (mapping.bytes() < Layout(limits).total) return error(ErrorCode::kBadMessage, "control arena cut short");
  return ControlArena(std::move(mapping), limits);
}

ControlArena::Header* ControlArena::header() const {
  return std::launder(reinterpret_cast<Header*>(mapping_.data()));
}

// ---- abort

void ControlArena::abort_epoch(Epoch epoch) {
  Header* head = header();
  if (aborted(epoch)) return;
  head->aborted_epoch.store(number(epoch), std::memory_order_seq_cst);
  for (std::atomic<uint32_t>* bell : {&head->plan_bell, &head->token_bell, &head->exchange_bell.rings}) {
    bell->fetch_add(1, std::memory_order_seq_cst);
    futex_wake(*bell);
  }
}

bool ControlArena::aborted(Epoch epoch) const {
  return abort_word().load(std::memory_order_seq_cst) >= number(epoch);
}
const std::atomic<uint32_t>& ControlArena::abort_word() const { return header()->aborted_epoch; }

// ---- plans

ControlArena::PlanCell* ControlArena::plan_cell(uint32_t sequence) const {
  return reinterpret_cast<PlanCell*>(mapping_.data() + layout_.plans +
                                     sequence % kPlanCells * layout_.plan_stride);
}

uint32_t ControlArena::plans_published() const {
  return header()->plans_published.load(std::memory_order_acquire);
}

void ControlArena::publish_plan(Epoch epoch, std::span<const std::byte> plan) {
  Header* head = header();
  CHECK_LE(static_cast<int64_t>(plan.size()), limits_.plan_bytes_max);
  const uint32_t sequence = plans_published();
  PlanCell* cell = plan_cell(sequence);
  if (cell->epoch != 0 && !aborted(Epoch{cell->epoch})) {  // the cell's last plan may still have readers
    for (RankMask left = readers_; left != 0; left &= left - 1) {
      const int rank = lowest_rank(left);
      const uint32_t read = rank_state(rank).plans_read.load(std::memory_order_acquire);
      CHECK(ahead(read, cell->sequence) > 0, "rank ", rank, " has yet to read plan ", cell->sequence);
    }
  }
  cell->sequence = sequence;
  cell->epoch = number(epoch);
  cell->bytes = static_cast<uint32_t>(plan.size());
  if (!plan.empty()) std::memcpy(cell->data(), plan.data(), plan.size());
  head->plans_published.store(sequence + 1, std::memory_order_release);
  head->plan_bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(head->plan_bell);
}

std::optional<ControlArena::PlanView> ControlArena::wait_plan(uint32_t sequence, Epoch epoch,
                                                              Duration timeout) const {
  bool gave_up = false;
  const bool done = wait_for_bell(header()->plan_bell, timeout, [&] {
    gave_up = aborted(epoch);
    return gave_up || ahead(plans_published(), sequence) > 0;
  });
  if (!done || gave_up) return std::nullopt;
  PlanCell* cell = plan_cell(sequence);
  CHECK_EQ(cell->sequence, sequence);  // else it was overwritten before this rank read it
  return PlanView{Epoch{cell->epoch}, {cell->data(), cell->bytes}};
}

void ControlArena::plan_read(int rank, uint32_t next) {
  rank_state(rank).plans_read.store(next, std::memory_order_release);
}

// ---- results

ControlArena::ResultCell* ControlArena::result_cell(int rank, uint32_t number) const {
  const size_t index = static_cast<size_t>(rank) * kResultCells + number % kResultCells;
  return reinterpret_cast<ResultCell*>(mapping_.data() + layout_.results + index * layout_.result_stride);
}

bool ControlArena::publish_result(int rank, std::span<const std::byte> result, Duration timeout) {
  CHECK_LE(static_cast<int64_t>(result.size()), limits_.result_bytes_max);
  RankState& state = rank_state(rank);
  const uint32_t written = state.results_written.load(std::memory_order_relaxed);
  const bool room = wait_for_bell(state.results_read, timeout, [&] {
    return ahead(written, state.results_read.load(std::memory_order_acquire)) < kResultCells;
  });
  if (!room) return false;
  ResultCell* cell = result_cell(rank, written);
  cell->bytes = result.size();
  if (!result.empty()) std::memcpy(cell->data(), result.data(), result.size());
  state.results_written.store(written + 1, std::memory_order_seq_cst);
  futex_wake(state.results_written);
  return true;
}

std::optional<std::vector<std::byte>> ControlArena::take_result(int rank) {
  RankState& state = rank_state(rank);
  const uint32_t read = state.results_read.load(std::memory_order_relaxed);
  const uint32_t written = state.results_written.load(std::memory_order_acquire);
  if (written == read) return std::nullopt;
  std::vector<std::byte> result;
  uint32_t next = read + 1;
  if (ahead(written, read) < 0 || ahead(written, read) > kResultCells) {
    next = written;
  } else if (ResultCell* cell = result_cell(rank, read);
             cell->bytes <= static_cast<uint64_t>(limits_.result_bytes_max)) {
    result.assign(cell->data(), cell->data() + cell->bytes);
  }
  state.results_read.store(next, std::memory_order_seq_cst);
  futex_wake(state.results_read);
  return result;
}

// ---- tokens

std::atomic<uint64_t>& ControlArena::token_word(StepId step, uint32_t sample_index) const {
  CHECK_LT(int64_t{sample_index}, limits_.max_samples);
  const size_t index =
      static_cast<size_t>(number(step) % kTokenSteps) * static_cast<size_t>(limits_.max_samples) +
      sample_index;
  return reinterpret_cast<std::atomic<uint64_t>*>(mapping_.data() + layout_.tokens)[index];
}

void ControlArena::write_token(StepId step, uint32_t sample_index, uint32_t token) {
  Header* head = header();
  token_word(step, sample_index).store(number(step) << 32 | token, std::memory_order_release);
  head->token_bell.fetch_add(1, std::memory_order_seq_cst);
  if (head->token_waiters.load(std::memory_order_seq_cst) != 0) futex_wake(head->token_bell);
}

std::optional<uint32_t> ControlArena::read_token(StepId step, uint32_t sample_index) const {
  const uint64_t word = token_word(step, sample_index).load(std::memory_order_acquire);
  if (static_cast<uint32_t>(word >> 32) != static_cast<uint32_t>(number(step))) return std::nullopt;
  return static_cast<uint32_t>(word);
}

std::optional<uint32_t> ControlArena::wait_token(StepId step, uint32_t sample_index, Epoch epoch,
                                                 Duration timeout) const {
  Header* head = header();
  std::optional<uint32_t> token = read_token(step, sample_index);
  if (token) return token;
  head->token_waiters.fetch_add(1, std::memory_order_seq_cst);
  wait_for_bell(head->token_bell, timeout, [&] {
    token = read_token(step, sample_index);
    return token.has_value() || aborted(epoch);
  });
  head->token_waiters.fetch_sub(1, std::memory_order_seq_cst);
  return token;
}

// ---- page tables

PageId* ControlArena::table_data(TableId id, int64_t block) const {
  CHECK_LT(int64_t{number(id)}, limits_.table_count);
  CHECK(block >= 0 && block <= limits_.table_blocks, "block ", block);
  const size_t at = static_cast<size_t>(number(id)) * static_cast<size_t>(limits_.table_blocks) +
                    static_cast<size_t>(block);
  return reinterpret_cast<PageId*>(mapping_.data() + layout_.tables) + at * layout_.block_pages;
}

void ControlArena::write_table(TableId id, int64_t first_block, std::span<const PageId> pages) {
  PageId* entries = table_data(id, first_block);
  const auto blocks = static_cast<int64_t>(pages.size() / layout_.block_pages);
  CHECK_EQ(pages.size() % layout_.block_pages, 0u);
  CHECK_LE(first_block + blocks, limits_.table_blocks);
  std::copy(pages.begin(), pages.end(), entries);
}

std::span<const PageId> ControlArena::pages(TableId id, int64_t block, int part) const {
  CHECK_LT(block, limits_.table_blocks);
  CHECK(part >= 0 && part < limits_.parts, "part ", part);
  const auto ranks = static_cast<size_t>(limits_.rank_count);
  return {table_data(id, block) + static_cast<size_t>(part) * ranks, ranks};
}

PageId* ControlArena::host_table(TableId id) const {
  CHECK_LT(int64_t{number(id)}, limits_.table_count);
  return reinterpret_cast<PageId*>(mapping_.data() + layout_.host_tables) +
         size_t{number(id)} * layout_.host_table_pages;
}

void ControlArena::write_host_table(TableId id, int64_t first_block, std::span<const PageId> pages) {
  const auto first = first_block * limits_.host_parts;
  CHECK(first >= 0 && first + std::ssize(pages) <= limits_.table_blocks * limits_.host_parts);
  std::copy(pages.begin(), pages.end(), host_table(id) + first);
}

PageId ControlArena::host_page(TableId id, int64_t block, int part) const {
  CHECK(block >= 0 && block < limits_.table_blocks, "block ", block);
  CHECK(part >= 0 && part < limits_.host_parts, "part ", part);
  return host_table(id)[block * limits_.host_parts + part];
}

void ControlArena::write_hot_pages(TableId id, std::span<const PageId> pages) {
  const auto room = limits_.hot_pages * limits_.rank_count;
  CHECK_LE(std::ssize(pages), room);
  PageId* const to = host_table(id) + limits_.table_blocks * limits_.host_parts;
  std::fill(std::copy(pages.begin(), pages.end(), to), to + room, kNoPage);
}

std::vector<PageId> ControlArena::hot_pages(TableId id, int rank) const {
  const PageId* at = host_table(id) + limits_.table_blocks * limits_.host_parts + rank;
  std::vector<PageId> pages;
  for (int64_t i = 0; i < limits_.hot_pages && at[i * limits_.rank_count] != kNoPage; ++i)
    pages.push_back(at[i * limits_.rank_count]);
  return pages;
}

std::atomic<uint32_t>& ControlArena::version_word(TableId id) const {
  CHECK_LT(int64_t{number(id)}, limits_.table_count);
  return reinterpret_cast<std::atomic<uint32_t>*>(mapping_.data() + layout_.versions)[number(id)];
}
void ControlArena::set_table_version(TableId id, uint32_t version) {
  version_word(id).store(version, std::memory_order_release);
}
uint32_t ControlArena::table_version(TableId id) const {
  return version_word(id).load(std::memory_order_acquire);
}

// ---- ranks

const RankState& ControlArena::rank_state(int rank) const {
  CHECK(rank >= 0 && rank < limits_.rank_count, "rank ", rank);
  return reinterpret_cast<const RankState*>(mapping_.data() + layout_.states)[rank];
}
RankState& ControlArena::rank_state(int rank) {
  return const_cast<RankState&>(static_cast<const ControlArena*>(this)->rank_state(rank));
}

ExchangeFlag& ControlArena::exchange_flag(int rank) {
  CHECK(rank >= 0 && rank < limits_.rank_count, "rank ", rank);
  return reinterpret_cast<ExchangeFlag*>(mapping_.data() + layout_.flags)[rank];
}
ExchangeBell& ControlArena::exchange_bell() { return header()->exchange_bell; }

void ControlArena::ring_exchange_bell() {
  // Nobody asleep now: whoever goes to sleep after this looks at the flags once more, and sees ours.
  ExchangeBell& bell = exchange_bell();
  if (bell.sleepers.load(std::memory_order_seq_cst) == 0) return;
  bell.rings.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(bell.rings);
}

}  // namespace weft::kv
