// The promise "bits do not depend on the grouping", as a harness: a reference run, and runs compared with it.
//
// A case is one way to run a request. Every position's raw logits must equal the reference's (one rank, one
// chunk, alone, tp), bit by bit; tokens too.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tests/support/local_engine.h"

namespace weft::test {

// Which guesses of a script hold: all, all but every third, none.
enum class Drafts : uint8_t { kOff, kAll, kSome, kNone };

struct BitsCase {
  int ranks = 1;
  kv::Split prefill = kv::Split::kShared;
  kv::DecodeWish decode;
  kv::IndexWish index;
  int64_t chunk = 0;       // 0: all at once
  bool regrouped = false;  // thinned and widened while decoding, in mid-block
  Drafts drafts = Drafts::kOff;
  kv::Mechanisms mechanisms = {};
  std::string name() const;
};

// prefill × decode × index × regrouped for one W and chunk size.
std::vector<BitsCase> cases_of(int ranks, int64_t chunk, bool with_index);
// What is not in that product: groups of several ranks, and one other mechanism at a time under every
// grouping.
std::vector<BitsCase> mechanisms_of(int ranks, int64_t chunk, bool with_index);

struct BitsModel {
  std::string folder;
  DType weight_dtype = DType::kF32;
  CacheFormat cache;
  bool split_experts = false;
  int64_t block_tokens = 8;
  int64_t prompt_tokens = 205;  // 25 blocks and a partial one
  int64_t answer_tokens = 14;   // crosses at least two block boundaries
  controlplane::SamplingParams sampling;
  bool on_host =
      false;  // contexts lie on the host, but for the reference's; device pools are too small for one
  int64_t hot_tokens = 0;     // then
  bool draft_layers = false;  // which then guesses three tokens a step; the bits of its logits count, too
};

class BitsHarness {
 public:
  explicit BitsHarness(const BitsModel& model);

  // Runs one case alone: the prompt twice, so that the second time is a prefix hit. Returns the number of
  // rows whose logits differ from the reference, plus one if the tokens do. 0 is the promise.
  int64_t mismatches_alone(const BitsCase& one);
  // All cases (same W and chunk) at once in one engine.
  int64_t mismatches_batched(const std::vector<BitsCase>& cases);

  int64_t rows_compared() const { return rows_compared_; }
  int64_t guesses_compared() const { return guesses_compared_; }
  const controlplane::FinishedNotice& reference_notice() const { return reference_notice_; }
  const std::vector<uint32_t>& prompt() const { return prompt_; }
  // Logits of the reference run, by position.
  const std::vector<std::vector<float>>& reference() const { return reference_; }

 private:
  EngineOptions engine_options(int ranks, int64_t chunk, int64_t requests) const;
  RequestOptions request_options(const BitsCase& one, bool prefix_cache) const;
  void expect_drafts(LocalEngine& engine, RequestId request, const BitsCase& one);
  int64_t compare_guesses(LocalEngine& engine, RequestId request, int64_t from);
  int64_t compare(LocalEngine& engine, RequestId request, const std::string& what, int64_t from);
  // Sends the regroups of a case when its request has answered enough tokens.
  void drive(LocalEngine& engine, const std::vector<std::pair<RequestId, BitsCase>>& requests);

  BitsModel model_;
  const LocalModel& weights_;
  std::vector<uint32_t> prompt_;
  std::vector<std::vector<float>> reference_;  // by position
  std::vector<uint32_t> reference_tokens_;
  std::map<std::pair<int64_t, int64_t>, std::vector<float>> reference_guesses_;  // (position, round)
  controlplane::FinishedNotice reference_notice_;
  int64_t rows_compared_ = 0;
  int64_t guesses_compared_ = 0;
  int64_t reported_ = 0;
};

}  // namespace weft::test
