#include "tests/bench/rank_turns.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "proto/vocab/check.h"
#include "tests/bench/ceilings.h"

namespace weft::bench {
namespace {

constexpr size_t kControl = 0, kBoard = 1, kFirstMailbox = 2;

kv::ControlLimits limits(int ranks) {
  kv::ControlLimits limits;
  limits.rank_count = ranks;
  limits.block_tokens = 64;
  limits.parts = limits.table_count = limits.table_blocks = limits.max_samples = 1;
  limits.plan_bytes_max = limits.result_bytes_max = 64;
  return limits;
}

size_t board_bytes(const TurnPlan& plan) {
  return static_cast<size_t>(plan.variants) *
         (sizeof(int64_t) + static_cast<size_t>(plan.rounds * kMaxRanks) * sizeof(TurnNote));
}

rusage switches_now() {
  rusage usage{};
  CHECK_EQ(::getrusage(RUSAGE_SELF, &usage), 0);
  return usage;
}

void pass(worker::Exchange& exchange) { exchange.pass(worker::ExchangePoint::kCopies, 0).value(); }

}  // namespace

RankArenas::RankArenas(int ranks, size_t outbox_bytes, const TurnPlan& plan)
    : ranks_(ranks),
      outbox_bytes_(outbox_bytes),
      mailbox_bytes_(worker::mailbox_bytes(outbox_bytes)),
      plan_(plan) {
  files_.push_back(kv::create_memory("bench", kv::control_arena_bytes(limits(ranks))).value());
  files_.push_back(kv::create_memory("bench", board_bytes(plan)).value());
  for (int rank = 0; rank < ranks; ++rank)
    files_.push_back(kv::create_memory("bench", mailbox_bytes_).value());
  set_up(true);
}

RankArenas::RankArenas(const Name& name, const TurnPlan& plan)
    : ranks_(name.ranks),
      outbox_bytes_(name.outbox_bytes),
      mailbox_bytes_(worker::mailbox_bytes(name.outbox_bytes)),
      plan_(plan) {
  for (size_t i = 0; i < kFirstMailbox + static_cast<size_t>(ranks_); ++i) {
    const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.files[i]);
    files_.emplace_back(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    CHECK(files_.back().valid(), "cannot open ", path);
  }
  set_up(false);
}

RankArenas::Name RankArenas::name() const {
  Name name{::getpid(), ranks_, outbox_bytes_};
  for (size_t i = 0; i < files_.size(); ++i) name.files[i] = files_[i].get();
  return name;
}

kv::Mapping RankArenas::map(size_t file, size_t bytes) {
  return kv::Mapping::map(files_[file].get(), bytes).value();
}

void RankArenas::set_up(bool format) {
  kv::Mapping control = map(kControl, kv::control_arena_bytes(limits(ranks_)));
  control_ = std::make_unique<kv::ControlArena>(
      format ? kv::ControlArena::format(std::move(control), limits(ranks_)).value()
             : kv::ControlArena::open(std::move(control)).value());
  board_ = map(kBoard, board_bytes(plan_));
  for (int rank = 0; rank < ranks_; ++rank) {
    mailboxes_.push_back(map(kFirstMailbox + static_cast<size_t>(rank), mailbox_bytes_));
    if (mailbox_bytes_ > 0) kv::touch_pages(mailboxes_.back().data(), mailbox_bytes_).value();
  }
}

std::vector<std::byte*> RankArenas::mailboxes() const {
  std::vector<std::byte*> bases;
  for (const kv::Mapping& mailbox : mailboxes_) bases.push_back(mailbox.data());
  return bases;
}

std::unique_ptr<worker::Exchange> RankArenas::join(int rank) {
  auto exchange = std::make_unique<worker::Exchange>(*control_, mailboxes(), mailbox_bytes_, rank);
  exchange->begin_epoch(Epoch{1});
  return exchange;
}

int64_t& RankArenas::repeats(int variant) const { return reinterpret_cast<int64_t*>(board_.data())[variant]; }

TurnNote& RankArenas::note(int round, int variant, int rank) const {
  auto* notes =
      reinterpret_cast<TurnNote*>(board_.data() + static_cast<size_t>(plan_.variants) * sizeof(int64_t));
  return notes[(round * plan_.variants + variant) * kMaxRanks + rank];
}

void RankArenas::take_turns(worker::Exchange& exchange, const std::vector<Variant>& variants) {
  CHECK_EQ(static_cast<int>(variants.size()), plan_.variants);
  const auto run = [&](const Variant& variant, int64_t times, TurnNote& note) {
    pass(exchange);
    const rusage before = switches_now();
    const uint64_t slept = exchange.sleeps();
    note.begin = wall_seconds();
    for (int64_t i = 0; i < times; ++i) variant.once();
    note.end = wall_seconds();
    note.sleeps = static_cast<int64_t>(exchange.sleeps() - slept);
    const rusage after = switches_now();
    note.voluntary = after.ru_nvcsw - before.ru_nvcsw;
    note.involuntary = after.ru_nivcsw - before.ru_nivcsw;
    if (variant.settle) variant.settle();
  };
  for (int v = 0; v < plan_.variants; ++v) {
    constexpr int64_t kTrial = 5;
    const Variant& variant = variants[static_cast<size_t>(v)];
    TurnNote trial;
    run(variant, 2, trial);
    run(variant, kTrial, trial);
    const double once = std::max((trial.end - trial.begin) / kTrial, 1e-8);
    if (exchange.rank() == 0) repeats(v) = static_cast<int64_t>(std::clamp(plan_.seconds / once, 3.0, 1e5));
  }
  for (int round = 0; round < plan_.rounds; ++round) {
    for (int v = 0; v < plan_.variants; ++v) {
      pass(exchange);  // what rank 0 wrote is seen
      run(variants[static_cast<size_t>(v)], repeats(v), note(round, v, exchange.rank()));
    }
  }
  pass(exchange);
}

std::vector<Turns> RankArenas::turns() const {
  std::vector<Turns> out(static_cast<size_t>(plan_.variants));
  for (int round = 0; round < plan_.rounds; ++round) {
    for (int v = 0; v < plan_.variants; ++v) {
      TurnNote all = note(round, v, 0);
      for (int rank = 1; rank < ranks_; ++rank) {
        const TurnNote& one = note(round, v, rank);
        all.begin = std::min(all.begin, one.begin);
        all.end = std::max(all.end, one.end);
        all.sleeps += one.sleeps;
        all.voluntary += one.voluntary;
        all.involuntary += one.involuntary;
      }
      const auto times = static_cast<double>(repeats(v));
      Turns& turns = out[static_cast<size_t>(v)];
      turns.microseconds.push_back((all.end - all.begin) / times * 1e6);
      turns.sleeps.push_back(static_cast<double>(all.sleeps) / times);
      turns.voluntary.push_back(static_cast<double>(all.voluntary) / times);
      turns.involuntary.push_back(static_cast<double>(all.involuntary) / times);
    }
  }
  return out;
}

std::vector<Turns> measure_turns(
    int ranks, size_t outbox_bytes, const TurnPlan& plan,
    const std::function<std::vector<Variant>(RankArenas& arenas, worker::Exchange& exchange)>& make) {
  RankArenas arenas(ranks, outbox_bytes, plan);
  const pid_t parent = ::getpid();
  std::vector<pid_t> children;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t child = ::fork();
    CHECK_GE(child, 0);
    if (child == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != parent) ::_exit(1);
      const auto exchange = arenas.join(rank);
      arenas.take_turns(*exchange, make(arenas, *exchange));
      ::_exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  return arenas.turns();
}

}  // namespace weft::bench
