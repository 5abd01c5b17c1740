// Simulated workers: they run plans as real ones do, against slots that know what they are.
//
// A rank runs a plan in phases with the exchange points of docs/architecture.md between them: it enters a
// phase when every rank has reached the point before it, so ranks stand in different phases and even plans.
// It reads its pages through the tables, computes the partials of its heads and classes, merges those of its
// c-group, adds those of its group, writes the entries of its rows where the tables say, and samples where
// the plan says. Each slot read is compared with the oracle (checker "bytes"); the token that comes out is
// compared by whoever reads the results.
//
// Of blocks that lie on the host a rank reads the host's pages through the host table; its decode rows look
// first into the hot buffer, which is the worker's own (worker/model/hot_buffer.h) over pages of the rank's
// pool.
//
// Pages, tables and the token table outlive the workers; begin_epoch() forgets all else. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "controlplane/limits.h"
#include "controlplane/plan.h"
#include "kv/row_split.h"
#include "tests/simulation/oracle.h"
#include "tests/simulation/verdict.h"
#include "worker/model/hot_buffer.h"

namespace weft::simulation {

enum class Phase : uint8_t { kCopies, kWrite0, kPartials0, kSums0, kWrite1, kPartials1, kSums1, kFinish };
inline constexpr int kPhases = 8;

struct StepOutcome {  // what one rank reports of one step
  StepId step{};
  int rank = 0;
  std::vector<Sample> samples;
};

class Workers {
 public:
  explicit Workers(const Limits& limits, Verdict verdict = {});

  void add(RequestId request, Truth truth) { truths_.emplace(request, std::move(truth)); }
  const Truth& truth(RequestId request) const { return truths_.at(request); }

  // ---- the daemon's side
  // Applies a plan's table writes; none may touch what a plan of `in_flight` reads.
  void write_tables(const Plan& plan, std::span<const std::shared_ptr<const Plan>> in_flight);
  void publish(std::shared_ptr<const Plan> plan);
  void begin_epoch() {
    ring_.clear();
    lost_ = false;
    if (!keep_hot) hot_ = {};
  }
  // A new process knows nothing of what lies in its rank's hot buffers.
  void new_process(int rank) { hot_[static_cast<size_t>(rank)] = {}; }
  // Nothing is left of what a rank's pools held. Whoever still runs may read that, and is not listened to.
  void lose(int rank) {
    lost_ = true;
    new_process(rank);
    for (auto& stream : pools_) {
      for (Page& page : stream[static_cast<size_t>(rank)]) page.assign(page.size(), Slot{});
    }
  }
  // The pages of a block's part by rank, as a span's table names them.
  std::span<const PageId> pages(const Span& span, int64_t block, int part) const;
  // Whether a span reads this part of a block from the host pool.
  bool on_host(const Span& span, int64_t block, int part) const {
    return block < span.host_blocks && limits_.geometry.stream_of(part) == kv::Stream::kEntries;
  }
  // From which page of it.
  PageId host_page(const Span& span, int64_t block, int part) const;
  // Its hot buffer's pages, [page][rank].
  std::span<const PageId> hot_pages(const Span& span) const { return tables_.at(number(span.table)).hot; }

  // ---- a worker's side
  // It has something to do and need not wait for others.
  bool ready(int rank) const;
  // It stands in a row, or before a load, that kills it.
  bool poisoned(int rank) const;
  // Runs the next phase. After `*writes` written slots and pages it stops in the middle and returns false. At
  // the end of a plan its outcome goes to results(rank).
  bool run(int rank, int64_t* writes = nullptr);
  std::deque<StepOutcome>& results(int rank) { return results_[static_cast<size_t>(rank)]; }

  // Ranks that have begun, and that have finished, a published plan of this epoch.
  struct Progress {
    RankMask begun = 0, finished = 0;
  };
  Progress progress(StepId step) const;

  int64_t rows_run() const { return rows_run_; }
  int64_t slots_read() const { return slots_read_; }
  // Slots of host blocks that decode rows with a hot buffer read: found in it, brought there, and left where
  // they are.
  struct HotCounts {
    int64_t hits = 0, fetched = 0, left = 0;
  };
  const HotCounts& hot_counts() const { return hot_counts_; }

  // A planted mistake: the rank's sums of the second layer never reach the others.
  std::function<bool(int rank)> lose_sums;
  // Planted mistakes: a copy that does not happen, between ranks or to and from the host.
  std::function<bool(const PageCopy&)> lose_copy;
  std::function<bool(const HostCopy&)> lose_spill, lose_load;
  // A planted mistake: what a hot buffer has outlives its table.
  bool keep_hot = false;

 private:
  struct Stored {
    int32_t part = -1, position = -1;
    hash::Entry entry;
  };
  using Slot = std::array<Stored, kLayers>;
  using Page = std::vector<Slot>;
  struct Table {
    uint32_t version = 0;
    std::vector<PageId> pages;
    std::vector<PageId> host, hot;  // [block][part], [page][rank]
  };
  // A published plan, and how far the ranks are.
  struct Entry {
    std::shared_ptr<const Plan> plan;
    kv::Topology ranks;
    std::vector<kv::RowOwners> owners;  // of owned spans, in order
    std::vector<int> owned;             // span → number among the owned ones; −1: shared
    bool passes_copies = false, passes_entries = false, passes_partials = false;
    std::array<int, kMaxRanks> done{};  // phases, by rank
    // [place][span]: by row of the span, where the place has something to say of it.
    std::array<std::vector<std::vector<PartSums>>, kMaxRanks> partials;
    std::array<std::vector<std::vector<std::array<uint64_t, kLayers>>>, kMaxRanks> words;
    int head(int rank) const { return done[static_cast<size_t>(rank)]; }
    bool all_did(int phases) const {
      for (int place = 0; place < ranks.count(); ++place) {
        if (head(ranks.rank(place)) < phases) return false;
      }
      return true;
    }
  };
  struct RankRun;  // one phase of one rank

  Page& page(kv::Stream stream, int rank, PageId id) {
    return pools_[static_cast<size_t>(stream)][static_cast<size_t>(rank)].at(number(id));
  }
  Page& host_page(const HostCopy& copy) {
    return host_[static_cast<size_t>(copy.stream)].at(number(copy.host_page));
  }
  Entry* current(int rank);
  const Entry* current(int rank) const { return const_cast<Workers*>(this)->current(rank); }
  bool passes(const Entry& entry, Phase phase) const;
  bool has_inputs(const Entry& entry) const;

  const Limits& limits_;
  Verdict verdict_;
  hash::Shape shape_;
  std::array<std::vector<std::vector<Page>>, kv::kStreams> pools_;
  std::array<std::vector<Page>, kv::kStreams> host_;
  std::vector<Table> tables_;
  std::map<std::pair<StepId, uint32_t>, uint32_t> token_table_;
  std::map<RequestId, Truth> truths_;
  std::deque<Entry> ring_;
  std::array<std::deque<StepOutcome>, kMaxRanks> results_;
  struct HotBuffers {  // of one process
    worker::HotBuffers buffers;
    std::map<TableId, uint32_t> versions;  // of the tables that it has buffers of
  };
  std::array<HotBuffers, kMaxRanks> hot_;
  HotCounts hot_counts_;
  bool lost_ = false;  // some memory, in this epoch
  int64_t rows_run_ = 0;
  mutable int64_t slots_read_ = 0;
};

}  // namespace weft::simulation
