// Things that ranks do together, as Weft's workers do them and with Open MPI's collectives.
//
// Both begin where a producer (product or attention) writes, we into the outbox, MPI into its send buffer,
// and end with the same values in private memory:
//   sums        every rank's sums of some rows, added to the residual of all ranks: add_sums beside
//               MPI_Allreduce and the same addition to the residual
//   all-to-all  so many bytes for each other rank: an exchange point and copies beside MPI_Alltoall
//   partials    partials of each other rank's heads, merged and divided there: Partials beside MPI_Alltoall
//               with the same kernels
// One object per rank, between MPI_Init and MPI_Finalize.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/rank_turns.h"

namespace weft::bench {

int rank_of_world();
int ranks_of_world();

// One thing to do, in both ways, on one rank.
class MpiRivals {
 public:
  virtual ~MpiRivals() = default;
  virtual void ours() = 0;
  virtual void mpi() = 0;
  // After as many of one as of the other: CHECKs that they gave the same, bits where the order of additions
  // is the same.
  virtual void check() = 0;
  // Bytes that we copy, all ranks together: into outboxes, and out of other ranks' outboxes.
  virtual int64_t copied() const = 0;
};

struct MpiKind {
  std::string name;
  std::function<size_t(int64_t bytes, int ranks)> outbox_bytes;
  std::function<std::unique_ptr<MpiRivals>(RankArenas&, worker::Exchange&, int64_t bytes)> make;
};
std::vector<MpiKind> mpi_kinds();

}  // namespace weft::bench
