// The worker's exchanges beside Open MPI's collectives: the same processes on the same cores, in turns.
//
// Run plainly, it starts itself under mpirun: 2 ranks on two cores, then 8 ranks on the same two, MPI told to
// yield. All ranks are MPI processes that also open one set of Weft's arenas.
#include <mpi.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

#include "proto/vocab/units.h"
#include "tests/bench/figures.h"
#include "tests/bench/guard.h"
#include "tests/bench/machine.h"
#include "tests/bench/mpi_rivals.h"
#include "tests/bench/rank_turns.h"
#include "worker/spin.h"

#ifndef OPEN_MPI
#error "the options of mpirun are Open MPI's"
#endif

namespace weft::bench {
namespace {

// The arenas of one measurement, made by rank 0 and opened by the others.
std::unique_ptr<RankArenas> share_arenas(size_t outbox_bytes, const TurnPlan& plan) {
  const bool maker = rank_of_world() == 0;
  std::unique_ptr<RankArenas> arenas;
  RankArenas::Name name;
  if (maker) {
    arenas = std::make_unique<RankArenas>(ranks_of_world(), outbox_bytes, plan);
    name = arenas->name();
  }
  MPI_Bcast(&name, sizeof name, MPI_BYTE, 0, MPI_COMM_WORLD);
  if (!maker) arenas = std::make_unique<RankArenas>(name, plan);
  MPI_Barrier(MPI_COMM_WORLD);  // now nobody needs the maker's descriptors any more
  return arenas;
}

struct Line {
  Turns ours, mpi;
  int64_t copied = 0;
};

Line measure(const MpiKind& kind, int64_t bytes, const TurnPlan& plan) {
  const auto arenas = share_arenas(kind.outbox_bytes(bytes, ranks_of_world()), plan);
  const auto exchange = arenas->join(rank_of_world());
  const auto rivals = kind.make(*arenas, *exchange, bytes);
  const auto barrier = [] { MPI_Barrier(MPI_COMM_WORLD); };
  rivals->ours();
  rivals->mpi();
  rivals->check();
  barrier();
  // After a turn of MPI's, nobody sleeps before all its messages are delivered.
  arenas->take_turns(*exchange, {{[&] { rivals->ours(); }}, {[&] { rivals->mpi(); }, barrier}});
  const auto turns = arenas->turns();
  barrier();
  return {turns[0], turns[1], rivals->copied()};
}

void print_head(const TurnPlan& plan) {
  char version[MPI_MAX_LIBRARY_VERSION_STRING] = "";
  int length = 0;
  MPI_Get_library_version(version, &length);
  *std::find(version, version + length, ',') = 0;
  const int ranks = ranks_of_world(), cores = worker::usable_cores();
  std::printf("\n%d ranks on %d cores, Weft beside %s%s, %d rounds; ratio = MPI / Weft, by rounds\n", ranks,
              cores, version, ranks > cores ? " told to yield" : "", plan.rounds);
  std::printf("%-10s %9s  %-30s %-30s %5s", "", "bytes", "Weft us", "MPI us", "ratio");
  if (ranks > cores) {
    std::printf("  %10s %13s   %-15s %s", "KiB copied", "Weft's sleeps", "switches: Weft",
                "MPI (slept + yielded or put off)");
  }
  std::printf("\n");
}

void print_line(const char* name, int64_t bytes, const Line& line) {
  const auto text = [](const Turns& turns) {
    const Summary time = summarize(turns.microseconds);
    char out[64];
    std::snprintf(out, sizeof out, "%9.2f (%.2f .. %.2f)", time.median, time.min, time.max);
    return std::string(out);
  };
  const auto median = [](const std::vector<double>& values) { return summarize(values).median; };
  std::printf("%-10s %9lld  %-30s %-30s %5.2f", name, (long long)bytes, text(line.ours).c_str(),
              text(line.mpi).c_str(), median(ratios(line.mpi.microseconds, line.ours.microseconds)));
  if (ranks_of_world() > worker::usable_cores()) {
    std::printf("  %10.0f %13.1f   %6.1f + %-6.1f %6.1f + %-6.1f", static_cast<double>(line.copied) / 1024,
                median(line.ours.sleeps), median(line.ours.voluntary), median(line.ours.involuntary),
                median(line.mpi.voluntary), median(line.mpi.involuntary));
  }
  std::printf("\n");
  std::fflush(stdout);
}

void run_ranks(bool quick) {
  const TurnPlan plan{quick ? 2 : 7, quick ? 1e-3 : 0.05, 2};
  const bool prints = rank_of_world() == 0;
  if (prints) print_head(plan);
  for (const MpiKind& kind : mpi_kinds()) {
    for (int64_t bytes = kKiB; bytes <= (quick ? 16 * kKiB : kMiB); bytes *= 4) {
      const Line line = measure(kind, bytes, plan);
      if (prints) print_line(kind.name.c_str(), bytes, line);
    }
  }
}

// Starts this program under mpirun; its exit code.
int launch(const std::string& self, int ranks, bool quick) {
  std::vector<std::string> words = {WEFT_MPIRUN, "--oversubscribe", "--bind-to", "none"};
  if (::geteuid() == 0) words.emplace_back("--allow-run-as-root");
  const auto set = [&](const char* name, const char* value) {
    words.insert(words.end(), {"--mca", name, value});
  };
  set("mpi_yield_when_idle", ranks > worker::usable_cores() ? "1" : "0");
  words.insert(words.end(), {"-n", std::to_string(ranks), self});
  if (quick) words.emplace_back("--quick");
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  const pid_t child = ::fork();
  CHECK_GE(child, 0);
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::execv(argv[0], argv.data());
    std::perror(argv[0]);
    ::_exit(127);
  }
  int status = -1;
  CHECK_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}

int launch_all(bool quick) {
  const CorePair cores = choose_cores(-1).value();
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cores.first, &set);
  CPU_SET(cores.second, &set);
  CHECK_EQ(::sched_setaffinity(0, sizeof set, &set), 0);
  std::printf(
      "All processes on cores %d and %d. Each line begins where a producer writes, and ends with the "
      "values of all ranks in private memory.\n",
      cores.first, cores.second);
  std::fflush(stdout);
  const std::string self = std::filesystem::read_symlink("/proc/self/exe");
  for (const int ranks : {2, 8}) {
    if (const int code = launch(self, ranks, quick); code != 0) return code;
  }
  return 0;
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  using namespace weft::bench;
  const bool quick = argc > 1 && std::strcmp(argv[1], "--quick") == 0;
  if (std::getenv("OMPI_COMM_WORLD_RANK") == nullptr) {
    return run_guarded("exchange_mpi_bench", [&](const std::string&) { return launch_all(quick); });
  }
  MPI_Init(&argc, &argv);
  run_ranks(quick);
  MPI_Finalize();
  return 0;
}
