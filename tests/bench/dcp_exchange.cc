#include "tests/bench/dcp_exchange.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/elementwise.h"
#include "kv/cost.h"
#include "proto/vocab/random.h"
#include "tests/bench/worker_exchange.h"

namespace weft::bench {
namespace {

ExchangeShape exchange_shape(const DcpShape& shape) {
  ExchangeShape out;
  out.requests = shape.batch;
  out.heads = shape.heads, out.latent = shape.latent, out.rope = shape.rope;
  out.split_cache = out.replicate_query = true;
  return out;
}

// One rank's partials of all heads, the queries of its own, and the three collectives.
class Rivals {
 public:
  Rivals(RankArenas& arenas, worker::Exchange& exchange, const DcpShape& shape)
      : shape_(shape),
        rank_(exchange.rank()),
        own_heads_(shape.heads / shape.ranks),
        worker_(arenas, exchange, exchange_shape(shape)),
        point_(exchange) {
    const auto count = [](int64_t n) { return static_cast<size_t>(n); };
    const int64_t rows = shape.batch * shape.heads;
    partials_.resize(count(rows * worker_.words()));
    outputs_.resize(count(rows * shape.latent));
    lse_.resize(count(rows));
    written_.resize(partials_.size());
    written_outputs_.resize(outputs_.size());
    written_lse_.resize(lse_.size());
    all_lse_.resize(count(shape.ranks * rows));
    queries_.resize(count(shape.batch * own_heads_ * (shape.latent + shape.rope)));
    all_queries_.resize(queries_.size() * count(shape.ranks));
    values_.resize(count(shape.batch * own_heads_ * shape.latent));
    draw();
  }

  void one_shot() {
    worker_.begin();
    const int64_t words = own_heads_ * worker_.words();
    const float* from = partials_.data();
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      for (int64_t row = 0; row < shape_.batch; ++row, from += words) {
        std::memcpy(worker_.at(row, rank), from, static_cast<size_t>(words) * 4);
      }
    }
    worker_.exchange();
  }

  void gathered() {
    worker_.gather_queries(queries_.data(), all_queries_.data());
    one_shot();
  }

  void three() {
    worker_.gather_queries(queries_.data(), all_queries_.data());
    std::memcpy(written_outputs_.data(), outputs_.data(), outputs_.size() * 4);
    std::memcpy(written_lse_.data(), lse_.data(), lse_.size() * 4);
    gather_lse();
    scale_outputs();
    reduce_scatter();
  }

  void writing() { std::memcpy(written_.data(), partials_.data(), partials_.size() * 4); }

  void check() {
    one_shot();
    three();
    for (size_t i = 0; i < values_.size(); ++i) {
      const float one = worker_.values()[i];
      CHECK(std::abs(one - values_[i]) <= 1e-5f * std::max(1.0f, std::abs(one)), one, " != ", values_[i]);
    }
  }

 private:
  // Partials lie as [rank][row][heads of the rank], what the three exchange likewise.
  void draw() {
    SplitMix64 random(static_cast<uint64_t>(77 + rank_));
    const auto unit = [&] { return static_cast<float>(random.below(2001)) * 1e-3f - 1; };
    for (size_t i = 0; i < lse_.size(); ++i) {
      float* partial = partials_.data() + i * static_cast<size_t>(worker_.words());
      const float l = 1 + static_cast<float>(random.below(1000)) * 1e-3f;
      const auto m = static_cast<int32_t>(random.below(5));
      for (int64_t j = 0; j < shape_.latent; ++j) {
        partial[j] = unit();
        outputs_[i * static_cast<size_t>(shape_.latent) + static_cast<size_t>(j)] = partial[j] / l;
      }
      partial[shape_.latent] = l;
      std::memcpy(partial + shape_.latent + 1, &m, 4);
      lse_[i] = std::log2(l) + static_cast<float>(m);
    }
    for (uint16_t& value : queries_) value = static_cast<uint16_t>(random.below(1 << 14));
  }

  void gather_lse() {
    const size_t bytes = lse_.size() * 4;
    std::memcpy(point_.outbox().data(), written_lse_.data(), bytes);
    point_.pass(worker::ExchangePoint::kPartials, 0).value();
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const bool mine = rank == rank_;
      std::memcpy(all_lse_.data() + static_cast<size_t>(rank) * lse_.size(),
                  mine ? static_cast<const void*>(written_lse_.data()) : point_.inbox(rank).data(), bytes);
    }
  }

  // Outputs times 2^(lse of this rank − lse of all), into the outbox.
  void scale_outputs() {
    const size_t rows = lse_.size(), width = static_cast<size_t>(shape_.latent);
    most_ = lse_;
    sum_.assign(rows, 0.0f);
    const auto for_ranks = [&](const auto& body) {
      for (size_t at = 0; at < all_lse_.size(); at += rows) {
        for (size_t i = 0; i < rows; ++i) body(i, all_lse_[at + i]);
      }
    };
    for_ranks([&](size_t i, float lse) { most_[i] = std::max(most_[i], lse); });
    for_ranks([&](size_t i, float& lse) { lse -= most_[i]; });
    kernels::exp2(all_lse_.data(), all_lse_.data(), std::ssize(all_lse_));
    for_ranks([&](size_t i, float power) { sum_[i] += power; });
    float* out = reinterpret_cast<float*>(point_.outbox().data());
    const float* own = all_lse_.data() + static_cast<size_t>(rank_) * rows;
    for (size_t i = 0; i < rows; ++i) {
      std::memcpy(out + i * width, written_outputs_.data() + i * width, width * 4);
      kernels::scale(out + i * width, own[i] / sum_[i], shape_.latent);
    }
  }

  void reduce_scatter() {
    point_.pass(worker::ExchangePoint::kPartials, 0).value();
    const auto mine = static_cast<int64_t>(values_.size()) * rank_;
    for (int64_t at = 0; at < std::ssize(values_); at += shape_.latent) {
      for (int rank = 0; rank < shape_.ranks; ++rank) {
        const auto* from = reinterpret_cast<const float*>(point_.inbox(rank).data()) + mine + at;
        if (rank == 0) {
          std::memcpy(values_.data() + at, from, static_cast<size_t>(shape_.latent) * 4);
        } else {
          kernels::add(values_.data() + at, from, shape_.latent);
        }
      }
    }
  }

  DcpShape shape_;
  int rank_;
  int64_t own_heads_;
  WorkerExchange worker_;
  worker::Exchange& point_;
  std::vector<float> partials_, outputs_, lse_;  // what attention gives
  std::vector<float> written_, written_outputs_, written_lse_;
  std::vector<float> all_lse_, most_, sum_, values_;
  std::vector<uint16_t> queries_, all_queries_;
};

}  // namespace

std::vector<double> DcpExchange::over_one_shot(const Turns& turns) const {
  std::vector<double> out;
  for (size_t i = 0; i < turns.microseconds.size(); ++i)
    out.push_back(turns.microseconds[i] / one_shot.microseconds[i]);
  return out;
}

std::vector<double> DcpExchange::over_one_shot_net(const Turns& turns) const {
  std::vector<double> out;
  for (size_t i = 0; i < turns.microseconds.size(); ++i) {
    const double base = writing.microseconds[i];
    out.push_back((turns.microseconds[i] - base) / (one_shot.microseconds[i] - base));
  }
  return out;
}

DcpExchange measure_dcp(const DcpShape& shape, int rounds, double seconds) {
  CHECK_EQ(shape.heads % shape.ranks, 0);
  const size_t outbox = WorkerExchange::outbox_bytes(exchange_shape(shape), shape.ranks);
  const auto turns =
      measure_turns(shape.ranks, outbox, {rounds, seconds, 4}, [&](RankArenas& arenas, auto& exchange) {
        const auto rivals = std::make_shared<Rivals>(arenas, exchange, shape);
        rivals->check();
        return std::vector<Variant>{{[rivals] { rivals->one_shot(); }},
                                    {[rivals] { rivals->gathered(); }},
                                    {[rivals] { rivals->three(); }},
                                    {[rivals] { rivals->writing(); }}};
      });
  const int64_t others = shape.ranks - 1, own = shape.batch * shape.heads / shape.ranks;
  const int64_t queries = others * own * (shape.latent + shape.rope) * 2;
  const int64_t partials = others * own * (shape.latent + 2) * 4;
  const int64_t sums = others * own * shape.latent * 4, lse = others * shape.batch * shape.heads * 4;
  return {turns[0], turns[1], turns[2], turns[3], partials, queries + partials, queries + lse + sums};
}

StepPoints step_points(int ranks) {
  kv::CostModel model;
  model.geometry = {64, {kv::StreamGeometry{78, 576}, kv::StreamGeometry{21, 132}}, 64};
  model.layers = 78, model.dense_layers = 3;
  model.hidden = 6144, model.vocabulary = 154'880;
  model.query_bytes = 576 * 2, model.value_width = 512, model.index_topk = 2048;
  model.rank_count = ranks;
  const auto points = [&](int c, kv::IndexKind index, kv::QueryPath query) {
    kv::CostSpan span;
    span.start = 100'000;
    span.grouping = {0, ranks, c};
    span.index_c = kv::index_parts(span.grouping, index);
    span.residency = kv::residency_of(span.grouping, index, ranks);
    span.mechanisms.query = query;
    span.head_rows = 1;
    return kv::step_exchanges(model, {&span, 1});
  };
  using enum kv::IndexKind;
  using enum kv::QueryPath;
  return {points(1, kCopied, kGathered), points(ranks, kCopied, kReplicated),
          points(ranks, kCopied, kGathered), points(ranks, kSplit, kReplicated)};
}

}  // namespace weft::bench
