// Workers that execute plans against a toy memory and check every byte a real worker would read.
//
// A slot holds (part, position, history), where history is a hash of all tokens up to that position: what
// attention would make of them. Drafts that do not hold run like any row and leave their histories in the
// slots. A row reads the history before it out of the pages its table names, so a page
// that was reused, never copied, or belongs to another prefix shows at once. The token a row samples is a
// function of its history; truth_of() computes the same answer directly from the prompt.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <span>
#include <vector>

#include "controlplane/limits.h"
#include "controlplane/page_counts.h"
#include "controlplane/plan.h"

namespace weft::controlplane {

// What a request should come to, whatever happens on the way.
struct Truth {
  uint64_t salt = 0;
  std::vector<uint32_t> tokens;     // prompt and the whole answer
  std::vector<uint64_t> histories;  // after each token
  int64_t prompt = 0;
  FinishReason reason = FinishReason::kLength;
  int64_t nan_row = -1;     // the sample after this row is not finite
  int64_t poison_row = -1;  // a plan with this row kills the workers, always
};

inline constexpr uint32_t kVocabulary = 50;
uint64_t extend_history(uint64_t history, uint32_t token);
uint32_t token_of(uint64_t history);
Truth truth_of(uint64_t salt, std::vector<uint32_t> prompt, int64_t max_tokens,
               const std::vector<uint32_t>& stop_tokens, int64_t nan_row);

class FakeWorkers {
 public:
  explicit FakeWorkers(const Limits& limits);

  void add(RequestId request, Truth truth) { truths_.emplace(request, std::move(truth)); }
  const Truth& truth(RequestId request) const { return truths_.at(request); }

  // The shell's part: applies table writes, checks them against the plans in flight.
  void publish(const Plan& plan, const std::deque<Plan>& in_flight);
  // Runs a plan. With a limit it dies after so many page writes and leaves things half done.
  static constexpr int64_t kNoLimit = int64_t{1} << 40;
  std::vector<Sample> execute(const Plan& plan, int64_t writes_limit = kNoLimit);
  bool poisoned(const Plan& plan) const;

  int64_t rows_checked() const { return rows_checked_; }

 private:
  struct Slot {
    int part = -1;
    int64_t position = -1;
    uint64_t history = 0;
  };
  using Page = std::vector<Slot>;
  Page& page(kv::Stream stream, int rank, PageId id) {
    return pools_[static_cast<size_t>(stream)][static_cast<size_t>(rank)].at(number(id));
  }
  // The pages of a block's part by rank, as the span's table names them.
  std::span<const PageId> pages(const Span& span, int64_t block, int part) const;
  // Calls f(part, rank, page) for every page of a block.
  template <typename F>
  void for_each_page(const Span& span, int64_t block, F f);
  uint64_t history_before(const Span& span, const Truth& truth);
  // The history after each row.
  std::vector<uint64_t> run_rows(const Span& span, const Truth& truth, int64_t& writes_left);
  void sample_rows(const Plan& plan, const Span& span, const Truth& truth,
                   const std::vector<uint64_t>& histories, std::vector<Sample>& samples);
  void check_reads(const Span& span, const Truth& truth, int64_t end);
  void check_readers(const Span& span, int64_t block);

  const Limits& limits_;
  kv::Topology ranks_;  // of the plan being run
  std::array<std::vector<std::vector<Page>>, kv::kStreams> pools_;
  std::map<RequestId, Truth> truths_;
  struct Table {
    uint32_t version = 0;
    std::vector<PageId> pages;
  };
  std::vector<Table> tables_;
  std::map<std::pair<StepId, uint32_t>, uint32_t> token_table_;
  int64_t rows_checked_ = 0;
};

}  // namespace weft::controlplane
