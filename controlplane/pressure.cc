#include "controlplane/pressure.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <unordered_map>
#include <utility>

#include "controlplane/admission.h"
#include "kv/mechanisms.h"

namespace weft::controlplane {
namespace {

struct Candidate {
  Sequence* sequence = nullptr;
  PageCounts gain;  // of thinning it
};

// Least urgent first, among equals the latest first.
bool gives_way_before(const Sequence* a, const Sequence* b) { return b->before(*a); }

bool may_thin(const Sequence& sequence) {
  return sequence.runnable() && !sequence.thinned && !sequence.needs_switch && !sequence.trim &&
         !sequence.host_context && sequence.suspect_until == 0;
}

bool may_leave(const Sequence& sequence) {
  return !sequence.leaving && !sequence.owes_progress && !sequence.host_context && !sequence.next &&
         !sequence.trim && sequence.suspect_until == 0;
}

// All that `to` wants is where `from` has it: a change drops pages and copies none.
bool only_drops(const Limits& limits, const kv::Residency& from, const kv::Residency& to, int origin) {
  const kv::HolderTable before(limits.geometry, from, origin, limits.places());
  const kv::HolderTable after(limits.geometry, to, origin, limits.places());
  for (int64_t block = 0; block < kv::kShards; ++block) {
    for (int part = 0; part < limits.geometry.parts(); ++part) {
      if ((after.holders(block, part) & ~before.holders(block, part)) != 0) return false;
    }
  }
  return true;
}

// The first so many blocks of a path are those of a context, too.
int64_t common_blocks(const Memory& memory, const BlockPath& path, BlockId tail) {
  if (tail == kNoBlock || path.tail == kNoBlock) return 0;
  std::unordered_map<RunId, int64_t> ends;
  memory.cache().for_each_run(tail, [&](const Run& run, int64_t, int64_t end) { ends.emplace(run.id, end); });
  int64_t common = 0;
  memory.cache().for_each_run(path.tail, [&](const Run& run, int64_t, int64_t end) {
    const auto found = ends.find(run.id);
    if (found != ends.end()) common = std::max(common, std::min(end, found->second));
  });
  return common;
}

void count_pages(const Memory& memory, const Run& run, int64_t first, int64_t end, int64_t sign,
                 PageCounts& counts) {
  for (int64_t index = first; index < end; ++index) {
    memory.block(run.blocks[static_cast<size_t>(index - run.first_index)])
        .for_each_page([&](kv::Stream stream, int rank, PageId) { counts.at(stream, rank) += sign; });
  }
}

void count_own(const Memory& memory, const BlockPath& path, PageCounts& counts) {
  for (const BlockId id : path.own) {
    memory.block(id).for_each_page([&](kv::Stream stream, int rank, PageId) { ++counts.at(stream, rank); });
  }
}

// Counted are blocks that nobody else uses and that the waiting request does not count on: those from `first`
// on.
PageCounts thin_gain(const Sequence& sequence, const Memory& memory, const kv::Residency& to,
                     int64_t common) {
  const Limits& limits = memory.limits();
  int64_t first = sequence.blocks.registered;
  PageCounts gain = sequence.reserved;
  count_own(memory, sequence.blocks, gain);
  memory.cache().for_each_run(sequence.blocks.tail, [&](const Run& run, int64_t begin, int64_t end) {
    if (run.users > 1) return;  // and so are all above
    const int64_t from = std::clamp(common, begin, end);
    if (from < end) first = from;
    gain += run.pages;
    count_pages(memory, run, begin, from, -1, gain);
  });
  // What it goes on to need: all of its thin form behind `first`, and what the blocks before still lack.
  const int64_t blocks = ceil_div(sequence.row_count(), limits.geometry.block_tokens);
  gain -= BlockNeeds(limits, to, first, blocks).pages(sequence.origin);
  memory.cache().for_each_run(sequence.blocks.tail, [&](const Run& run, int64_t begin, int64_t end) {
    if (run.covers == sequence.placement.residency) return;  // which has all of it
    for (int64_t index = begin; index < std::min(end, first); ++index) {
      const Block& block = memory.block(run.blocks[static_cast<size_t>(index - run.first_index)]);
      for (int part = 0; part < memory.parts(); ++part) {
        for_each_rank(memory.missing(block, part, to),
                      [&](int rank) { --gain.at(block.part(part).stream, rank); });
      }
    }
  });
  return gain;
}

// What sequences give back that leave one after the other: a block only when its last user does.
class Leavers {
 public:
  Leavers(const Memory& memory, BlockId hits) : memory_(memory), hits_(hits) {}

  void add(Sequence& sequence, PageCounts& room) {
    room += sequence.reserved;
    count_own(memory_, sequence.blocks, room);
    const int64_t common = common_blocks(memory_, sequence.blocks, hits_);
    memory_.cache().for_each_run(sequence.blocks.tail, [&](const Run& run, int64_t begin, int64_t end) {
      if (++locks_[run.id] < run.users) return;
      room += run.pages;
      count_pages(memory_, run, begin, std::clamp(common, begin, end), -1, room);
    });
  }

 private:
  const Memory& memory_;
  const BlockId hits_;
  std::unordered_map<RunId, int64_t> locks_;
};

// How much of what is lacking a gain makes up for.
int64_t useful(const PageCounts& gain, const PageCounts& room, const PageCounts& need, int rank_count) {
  int64_t sum = 0;
  for_each_pool(rank_count, [&](kv::Stream stream, int rank) {
    const int64_t lacking = std::max<int64_t>(0, need.at(stream, rank) - room.at(stream, rank));
    sum += std::clamp<int64_t>(gain.at(stream, rank), 0, lacking);
  });
  return sum;
}

// Few of the candidates that together make the room: the largest saving first, then whoever turned out not to
// be needed is left alone. All of them do.
std::vector<Sequence*> fewest(std::vector<Candidate> candidates, PageCounts room, const PageCounts& need,
                              int rank_count) {
  std::vector<Candidate> chosen;
  while (slack_of(room, need, rank_count) < 0) {
    auto best = candidates.end();
    int64_t most = 0;
    for (auto one = candidates.begin(); one != candidates.end(); ++one) {
      const int64_t saves = useful(one->gain, room, need, rank_count);
      if (saves > most) std::tie(best, most) = std::pair(one, saves);
    }
    CHECK(best != candidates.end(), "all together were said to do");
    room += best->gain;
    chosen.push_back(*best);
    candidates.erase(best);
  }
  std::vector<Sequence*> out;
  for (auto one = chosen.rbegin(); one != chosen.rend(); ++one) {
    PageCounts without = room;
    without -= one->gain;
    if (slack_of(without, need, rank_count) >= 0) {
      room = without;
    } else {
      out.push_back(one->sequence);
    }
  }
  return out;
}

std::vector<Candidate> thinnable(const Sequence& waiting, const std::vector<Sequence*>& running,
                                 const Memory& memory, BlockId hits) {
  const Limits& limits = memory.limits();
  std::vector<Candidate> out;
  for (Sequence* sequence : running) {
    if (!may_thin(*sequence) || sequence->priority < waiting.priority) continue;
    const GroupingWish wish = thin_wish(limits, sequence->wish);
    const Placement& now = sequence->placement;
    const Placement thin = placement_of(limits, wish.decode, wish.index, now.grouping.base);
    if (thin == now || !only_drops(limits, now.residency, thin.residency, sequence->origin)) continue;
    const int64_t common = common_blocks(memory, sequence->blocks, hits);
    const PageCounts gain = thin_gain(*sequence, memory, thin.residency, common);
    bool loses = false;
    for_each_pool(limits.rank_count,
                  [&](kv::Stream stream, int rank) { loses = loses || gain.at(stream, rank) < 0; });
    if (!loses && gain != PageCounts{}) out.push_back({sequence, gain});
  }
  std::sort(out.begin(), out.end(),
            [](const Candidate& a, const Candidate& b) { return gives_way_before(a.sequence, b.sequence); });
  return out;
}

}  // namespace

GroupingWish thin_wish(const Limits& limits, const GroupingWish& wish) {
  GroupingWish thin = fitted(wish, limits.places());
  kv::DecodeWish& decode = thin.decode;
  const int width = decode.kind == kv::DecodeKind::kDp ? decode.width : limits.places();
  const int c = std::gcd(width, kv::kShards);
  const Placement as_wished = placement_of(limits, thin.decode, thin.index, 0);
  if (c > as_wished.grouping.c && c % as_wished.grouping.c == 0) {
    if (decode.kind == kv::DecodeKind::kTp) decode.kind = kv::DecodeKind::kDcp;
    decode.c = c;
  }
  if (limits.uses(kv::Stream::kIndexKeys)) {
    const int parts = thin.index.kind == kv::IndexKind::kCopied ? 1 : as_wished.index_c;
    if (c > parts && c % parts == 0) thin.index = {kv::IndexKind::kSplit, decode.c == c ? 0 : c};
  }
  return thin;
}

GroupingWish wish_in_force(const Limits& limits, const Sequence& sequence) {
  return sequence.thinned ? thin_wish(limits, sequence.wish) : fitted(sequence.wish, limits.places());
}

std::optional<Relief> find_relief(const Sequence& waiting, const std::vector<Sequence*>& running,
                                  const Memory& memory, int turn) {
  const Limits& limits = memory.limits();
  const GroupingWish wish = thin_wish(limits, waiting.wish);
  const BlockId hits = entry_of(waiting, wish, memory, true, turn).hits.tail;
  const std::vector<Candidate> thin = thinnable(waiting, running, memory, hits);

  PageCounts more;
  for (const Candidate& one : thin) more += one.gain;
  Entry entry = entry_of(waiting, wish, memory, true, turn, more);
  if (entry.slack >= 0) {
    entry.room -= more;
    return Relief{fewest(thin, entry.room, entry.need, limits.rank_count), {}};
  }
  if (limits.on_pressure != OnPressure::kPreempt) return std::nullopt;

  std::vector<Sequence*> others;
  for (Sequence* sequence : running) {
    if (may_leave(*sequence) && sequence->priority > waiting.priority) others.push_back(sequence);
  }
  if (others.empty()) return std::nullopt;
  std::sort(others.begin(), others.end(), gives_way_before);
  const auto leaves = [](const std::vector<Sequence*>& leavers, const Candidate& one) {
    return std::find(leavers.begin(), leavers.end(), one.sequence) != leavers.end();
  };
  // Room if these leave and all others who can are thinned.
  const auto gain_of = [&](const std::vector<Sequence*>& leavers) {
    PageCounts gain;
    Leavers all(memory, hits);
    for (Sequence* sequence : leavers) all.add(*sequence, gain);
    for (const Candidate& one : thin) {
      if (!leaves(leavers, one)) gain += one.gain;
    }
    return gain;
  };
  more = gain_of(others);
  entry = entry_of(waiting, wish, memory, true, turn, more);
  if (entry.slack < 0) return std::nullopt;
  entry.room -= more;
  const auto fits = [&](const std::vector<Sequence*>& leavers) {
    PageCounts room = entry.room;
    room += gain_of(leavers);
    return slack_of(room, entry.need, limits.rank_count) >= 0;
  };
  Relief relief;
  for (Sequence* next : others) {
    relief.leave.push_back(next);
    if (fits(relief.leave)) break;
  }
  // The last one was needed; of those before, the more urgent are spared first.
  for (auto at = std::ssize(relief.leave) - 2; at >= 0; --at) {
    std::vector<Sequence*> without = relief.leave;
    without.erase(without.begin() + at);
    if (fits(without)) relief.leave = std::move(without);
  }
  PageCounts room = entry.room;
  Leavers all(memory, hits);
  for (Sequence* sequence : relief.leave) all.add(*sequence, room);
  std::vector<Candidate> rest;
  std::copy_if(thin.begin(), thin.end(), std::back_inserter(rest),
               [&](const Candidate& one) { return !leaves(relief.leave, one); });
  relief.thin = fewest(rest, room, entry.need, limits.rank_count);
  return relief;
}

}  // namespace weft::controlplane
