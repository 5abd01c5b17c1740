#include "tests/bench/mpi_rivals.h"

#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/attention.h"
#include "proto/vocab/random.h"
#include "tests/bench/worker_exchange.h"

namespace weft::bench {

int rank_of_world() {
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  return rank;
}

int ranks_of_world() {
  int ranks = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &ranks);
  return ranks;
}

namespace {

std::vector<float> drawn(int64_t count) {
  SplitMix64 random(static_cast<uint64_t>(5 + rank_of_world()));
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(random.below(2001)) * 1e-3f - 1;
  return values;
}

class Sums : public MpiRivals {
 public:
  static ExchangeShape shape(int64_t bytes) {
    ExchangeShape shape;
    shape.hidden = std::min<int64_t>(bytes / 4, 2048);
    shape.rows = bytes / 4 / shape.hidden;
    return shape;
  }
  Sums(RankArenas& arenas, worker::Exchange& exchange, int64_t bytes)
      : worker_(arenas, exchange, shape(bytes)),
        ranks_(arenas.ranks()),
        produced_(drawn(bytes / 4)),
        send_(produced_.size()),
        sum_(produced_.size()),
        residual_(produced_.size()) {}

  void ours() override {
    std::memcpy(worker_.sums(), produced_.data(), produced_.size() * 4);
    worker_.add_sums();
  }
  void mpi() override {
    std::memcpy(send_.data(), produced_.data(), produced_.size() * 4);
    MPI_Allreduce(send_.data(), sum_.data(), static_cast<int>(sum_.size()), MPI_FLOAT, MPI_SUM,
                  MPI_COMM_WORLD);
    const int64_t width = worker_.shape().hidden;
    for (int64_t at = 0; at < std::ssize(sum_); at += width)
      worker::add_to_residual(sum_.data() + at, nullptr, residual_.data() + at, width);
  }
  void check() override {
    // Two numbers have one sum; of more, MPI chooses the order.
    const float tolerance = ranks_ == 2 ? 0 : 1e-5f;
    for (size_t i = 0; i < residual_.size(); ++i) {
      CHECK(std::abs(residual_[i] - worker_.residual()[i]) <= tolerance, residual_[i],
            " != ", worker_.residual()[i]);
    }
  }
  int64_t copied() const override {
    return static_cast<int64_t>(produced_.size()) * 4 * ranks_ * (1 + ranks_ - 1);
  }

 private:
  WorkerExchange worker_;
  int ranks_;
  std::vector<float> produced_, send_, sum_, residual_;
};

class AllToAll : public MpiRivals {
 public:
  static size_t outbox_bytes(int64_t bytes, int ranks) { return static_cast<size_t>(bytes * ranks); }
  AllToAll(RankArenas& arenas, worker::Exchange& exchange, int64_t bytes)
      : exchange_(exchange),
        bytes_(static_cast<size_t>(bytes)),
        ranks_(arenas.ranks()),
        produced_(drawn(bytes / 4 * arenas.ranks())),
        send_(produced_.size()),
        ours_(produced_.size()),
        mpi_(produced_.size()) {}

  void ours() override {
    const int self = exchange_.rank();
    for (int to = 0; to < ranks_; ++to) {
      std::byte* place = to == self ? part(ours_, self) : exchange_.outbox().data() + offset(to);
      std::memcpy(place, part(produced_, to), bytes_);
    }
    exchange_.pass(worker::ExchangePoint::kPartials, 0).value();
    for (int from = 0; from < ranks_; ++from) {
      if (from != self) std::memcpy(part(ours_, from), exchange_.inbox(from).data() + offset(self), bytes_);
    }
  }
  void mpi() override {
    std::memcpy(send_.data(), produced_.data(), produced_.size() * 4);
    MPI_Alltoall(send_.data(), static_cast<int>(bytes_), MPI_BYTE, mpi_.data(), static_cast<int>(bytes_),
                 MPI_BYTE, MPI_COMM_WORLD);
  }
  void check() override { CHECK(ours_ == mpi_); }
  int64_t copied() const override { return static_cast<int64_t>(bytes_) * 2 * ranks_ * (ranks_ - 1); }

 private:
  size_t offset(int rank) const { return static_cast<size_t>(rank) * bytes_; }
  std::byte* part(std::vector<float>& of, int rank) const {
    return reinterpret_cast<std::byte*>(of.data()) + offset(rank);
  }

  worker::Exchange& exchange_;
  size_t bytes_;
  int ranks_;
  std::vector<float> produced_, send_, ours_, mpi_;
};

class PartialsRivals : public MpiRivals {
 public:
  static constexpr int64_t kWords = 256;  // 1 KiB of a head
  static ExchangeShape shape(int64_t bytes, int ranks) {
    ExchangeShape shape;
    shape.rows = bytes / 4 / kWords;
    shape.heads = ranks;
    shape.latent = kWords - 2;
    shape.split_cache = shape.replicate_query = true;
    return shape;
  }
  PartialsRivals(RankArenas& arenas, worker::Exchange& exchange, int64_t bytes)
      : worker_(arenas, exchange, shape(bytes, arenas.ranks())),
        ranks_(arenas.ranks()),
        each_(bytes / 4),
        produced_(drawn(each_ * ranks_)),
        send_(produced_.size()),
        received_(produced_.size()),
        values_(static_cast<size_t>(worker_.shape().rows * worker_.shape().latent)) {
    for (int64_t at = 0; at < std::ssize(produced_); at += kWords) {
      const auto m = static_cast<int32_t>(at / kWords % 4 + exchange.rank() % 2);
      std::memcpy(produced_.data() + at + kWords - 1, &m, 4);
    }
  }

  void ours() override {
    worker_.begin();
    for (int rank = 0; rank < ranks_; ++rank)
      std::memcpy(worker_.at(0, rank), produced_.data() + rank * each_, static_cast<size_t>(each_) * 4);
    worker_.exchange();
  }
  void mpi() override {
    std::memcpy(send_.data(), produced_.data(), produced_.size() * 4);
    MPI_Alltoall(send_.data(), static_cast<int>(each_), MPI_FLOAT, received_.data(), static_cast<int>(each_),
                 MPI_FLOAT, MPI_COMM_WORLD);
    const int64_t width = worker_.shape().latent;
    for (int64_t row = 0; row < worker_.shape().rows; ++row) {
      kernels::merge_partials(received_.data() + row * kWords, ranks_, each_, width);
      kernels::finish_partial(received_.data() + row * kWords, width, values_.data() + row * width);
    }
  }
  void check() override { CHECK_EQ(std::memcmp(values_.data(), worker_.values(), values_.size() * 4), 0); }
  int64_t copied() const override { return each_ * 4 * 2 * ranks_ * (ranks_ - 1); }

 private:
  WorkerExchange worker_;
  int ranks_;
  int64_t each_;  // words for one rank
  std::vector<float> produced_, send_, received_, values_;
};

template <typename R>
std::unique_ptr<MpiRivals> make_rivals(RankArenas& arenas, worker::Exchange& exchange, int64_t bytes) {
  return std::make_unique<R>(arenas, exchange, bytes);
}

}  // namespace

std::vector<MpiKind> mpi_kinds() {
  return {{"sums",
           [](int64_t bytes, int ranks) { return WorkerExchange::outbox_bytes(Sums::shape(bytes), ranks); },
           make_rivals<Sums>},
          {"all-to-all", AllToAll::outbox_bytes, make_rivals<AllToAll>},
          {"partials",
           [](int64_t bytes, int ranks) {
             return WorkerExchange::outbox_bytes(PartialsRivals::shape(bytes, ranks), ranks);
           },
           make_rivals<PartialsRivals>}};
}

}  // namespace weft::bench
