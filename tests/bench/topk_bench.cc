// Selection in numbers: (1) an index split over eight ranks: what proving the top-k reads of each rank,
// beside its best top-k (score, position) pairs; (2) the streaming indexer beside scoring first and selecting
// afterwards.
//
// (1) counts bytes of real offers, for scores of several kinds: "at first" with first parts of
// kv::first_offer, "adapted" with those of worker/model/offer_length.h, one row a step. Every selection is
// compared with sorting all scores; a difference fails the run. Correlated over L tokens: a first-order
// autoregression that decays by e over L. Recency: noise minus the logarithm of age. (2) both ways use the
// same scoring kernel and take turns; shown are medians. The rival writes all scores ("scores" is that
// alone), then selects: with the same vector compares as the indexer ("two passes"), or with std::nth_element
// over (score, position) pairs, the plain form. Where "scores" takes nearly all of the two passes there is
// nothing to gain. Candidates written stand beside K (1 + ln (N / K)).
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "kernels/features.h"
#include "kernels/split_top_k.h"
#include "kv/layout.h"
#include "proto/vocab/random.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/kernel_measure.h"
#include "worker/model/offer_length.h"

namespace weft::bench {
namespace {

using kernels::Candidate;

double normal(SplitMix64& random) {
  return std::sqrt(-2 * std::log(1 - random.uniform())) * std::cos(6.283185307179586 * random.uniform());
}

struct Kind {
  std::string name;
  std::function<void(SplitMix64&, std::vector<float>&)> fill;
};

Kind correlated(int tokens) {
  return {"correlated over " + std::to_string(tokens) + " tokens",
          [tokens](SplitMix64& random, std::vector<float>& scores) {
            const double keep = std::exp(-1.0 / tokens), fresh = std::sqrt(1 - keep * keep);
            double value = normal(random);
            for (float& score : scores) {
              score = static_cast<float>(value);
              value = keep * value + fresh * normal(random);
            }
          }};
}

std::vector<Kind> kinds() {
  const auto each = [](auto value) {
    return [value](SplitMix64& random, std::vector<float>& scores) {
      for (size_t i = 0; i < scores.size(); ++i) {
        scores[i] = static_cast<float>(value(random, static_cast<double>(scores.size() - i)));
      }
    };
  };
  return {{"independent", each([](SplitMix64& random, double) { return normal(random); })},
          correlated(8),
          correlated(32),
          correlated(128),
          {"recency", each([](SplitMix64& random, double age) { return normal(random) - std::log(age); })},
          {"newest best", each([](SplitMix64&, double age) { return -age; })},
          {"all zero", each([](SplitMix64&, double) { return 0.0; })}};
}

// One row of scores dealt out to the ranks as blocks are, and each rank's best.
struct Row {
  std::vector<std::vector<Candidate>> best;
  std::vector<int32_t> chosen;  // positions, ascending

  Row(const std::vector<float>& scores, int ranks, int64_t block, int64_t top_k)
      : best(static_cast<size_t>(ranks)) {
    std::vector<Candidate> all;
    for (size_t i = 0; i < scores.size(); ++i) {
      all.push_back({scores[i] + 0.0f, static_cast<int32_t>(i)});
      best[static_cast<size_t>(kv::residue_class(all.back().position / block, ranks))].push_back(all.back());
    }
    const auto keep = [top_k](std::vector<Candidate>& list) {
      const auto end = list.begin() + std::min<int64_t>(top_k, std::ssize(list));
      std::nth_element(list.begin(), end - 1, list.end(), kernels::ranks_before);
      list.erase(end, list.end());
      std::sort(list.begin(), list.end(),
                [](const auto& a, const auto& b) { return a.position < b.position; });
    };
    keep(all);
    for (const Candidate& one : all) chosen.push_back(one.position);
    for (auto& list : best) keep(list);
  }
};

struct Tally {
  int64_t rows = 0, second = 0, bytes = 0, length = 0;
};

// What one reader reads of a row; how many keys are chosen of each rank.
std::vector<int64_t> read_row(const Row& row, int64_t top_k, int64_t first_part, Tally& tally) {
  static kernels::SplitTopK found;
  const size_t ranks = row.best.size();
  std::vector<kernels::OfferHead> heads(ranks);
  std::vector<std::vector<float>> scores(ranks);
  std::vector<std::vector<int32_t>> positions(ranks);
  std::vector<kernels::Offer> offers;
  for (size_t r = 0; r < ranks; ++r) {
    scores[r].resize(row.best[r].size());
    positions[r].resize(row.best[r].size());
    kernels::write_offer(row.best[r], first_part, &heads[r], scores[r].data(), positions[r].data());
    offers.push_back({&heads[r], scores[r].data(), positions[r].data()});
  }
  kernels::find_split_top_k(offers, top_k, found);
  ++tally.rows, tally.second += found.second_read, tally.length += first_part;
  std::vector<int64_t> counts;
  for (const auto& read : found.reads) tally.bytes += read.bytes, counts.push_back(read.chosen);
  std::vector<int32_t> chosen;
  for (size_t r = 0; r < ranks; ++r) {
    std::vector<int32_t> own(row.best[r].size());
    own.resize(
        static_cast<size_t>(kernels::read_chosen(offers[r], static_cast<int64_t>(r), found, own.data())));
    chosen.insert(chosen.end(), own.begin(), own.end());
  }
  std::sort(chosen.begin(), chosen.end());
  if (chosen != row.chosen) {
    std::printf("a selection differs from sorting all scores\n");
    std::exit(1);
  }
  return counts;
}

void split_index(bool quick) {
  constexpr int kRanks = 8;
  constexpr int64_t kBlock = 64;
  const int64_t top_k = quick ? 256 : 2048, keys = quick ? 8192 : 131072, rows = quick ? 4 : 200;
  const int64_t pairs = top_k * 8;
  std::printf("Index split over %d ranks: top %lld of %lld keys in blocks of %lld, %lld rows each\n", kRanks,
              (long long)top_k, (long long)keys, (long long)kBlock, (long long)rows);
  std::printf(
      "bytes read of each rank and row, and how many times fewer than %lld of (score, position) pairs\n",
      (long long)pairs);
  std::printf("%-28s %33s   %42s  %s\n", "", "first parts as long as at first", "adapted",
              "chosen of a rank");
  std::printf("%-28s %11s %9s %11s   %9s %11s %9s %11s  %s\n", "scores", "second read", "bytes", "fewer",
              "length", "second read", "bytes", "fewer", "most / mean");
  for (const Kind& kind : kinds()) {
    SplitMix64 random(11);
    std::vector<float> scores(static_cast<size_t>(keys));
    worker::OfferLength length;
    Tally fixed, adapted;
    double uneven = 0;
    for (int64_t i = 0; i < rows; ++i) {
      kind.fill(random, scores);
      const Row row(scores, kRanks, kBlock, top_k);
      read_row(row, top_k, kv::first_offer(top_k, kRanks), fixed);
      const auto counts = read_row(row, top_k, length.keys(top_k, kRanks), adapted);
      const int64_t most = *std::max_element(counts.begin(), counts.end());
      length.learn(most);
      uneven = std::max(uneven, static_cast<double>(most * kRanks) / static_cast<double>(top_k));
    }
    const auto percent = [](const Tally& t) {
      return 100.0 * static_cast<double>(t.second) / static_cast<double>(t.rows);
    };
    const auto bytes = [](const Tally& t) {
      return static_cast<double>(t.bytes) / static_cast<double>(t.rows * kRanks);
    };
    std::printf("%-28s %9.1f %% %9.0f %9.1f x   %9.0f %9.1f %% %9.0f %9.1f x  %11.2f\n", kind.name.c_str(),
                percent(fixed), bytes(fixed), static_cast<double>(pairs) / bytes(fixed),
                static_cast<double>(adapted.length) / static_cast<double>(adapted.rows), percent(adapted),
                bytes(adapted), static_cast<double>(pairs) / bytes(adapted), uneven);
    std::fflush(stdout);
  }
  std::printf("every selection equals that of sorting all scores\n\n");
}

void streaming(bool quick) {
  std::printf("Streaming indexer beside scoring first, bf16, 1 thread, %s\n", kernels::instruction_set());
  std::printf("%-50s %10s %10s %10s %7s %12s %7s   %s\n", "", "streaming", "scores", "two passes", "ratio",
              "nth_element", "ratio", "candidates written / K (1 + ln (N / K))");
  const int64_t scale = quick ? 16 : 1;
  for (const IndexShape& shape :
       {IndexShape{2, 64, 32768 / scale, 64, 512}, IndexShape{2, 64, 131072 / scale, 64, 512},
        IndexShape{2, 64, 131072 / scale, 1, 512}, IndexShape{8, 64, 131072 / scale, 16, 2048},
        IndexShape{32, 128, 32768 / scale, 16, 2048}, IndexShape{32, 128, 131072 / scale, 1, 2048},
        IndexShape{32, 128, 262144 / scale, 1, 2048}}) {
    const Rivals time = measure_rivals(shape, CacheDType::kBF16, quick ? 1 : 9);
    const auto k = static_cast<double>(shape.top_k);
    const double bound = k * (1 + std::log(static_cast<double>(shape.keys) / k));
    std::printf("%-50s %7.2f ms %7.2f ms %7.2f ms %7.2f %9.2f ms %7.2f   %.2f\n", time.what.c_str(),
                time.streaming * 1e3, time.scores * 1e3, time.two_passes * 1e3,
                time.two_passes / time.streaming, time.plain * 1e3, time.plain / time.streaming,
                time.written / bound);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  weft::bench::split_index(quick);
  weft::bench::streaming(quick);
  return 0;
}
