#include "tests/simulation/host_checks.h"

#include <algorithm>
#include <utility>

namespace weft::simulation {
namespace {

bool uses_host(const Plan& plan) { return !plan.loads.empty() || !plan.spills.empty(); }

}  // namespace

HostChecks::HostChecks(Core& core) : core_(core) {
  const Limits& limits = core.setup.limits;
  for (size_t stream = 0; stream < kv::kStreams; ++stream)
    host_[stream].resize(static_cast<size_t>(limits.host_pages[stream]));
  read_.resize(host_[0].size());
  for_each_pool(limits.rank_count, [&](kv::Stream stream, int rank) {
    touched_[static_cast<size_t>(stream)].emplace_back(static_cast<size_t>(limits.pages(stream, rank)));
  });
}

void HostChecks::expects(bool ok, const Plan& plan, const char* what, const HostCopy& copy) const {
  core_.verdict.expect(Checker::kHost, ok, "step ", number(plan.step), " ", what, ": ",
                       kv::stream_name(copy.stream), " page ", number(copy.page), " of rank ", copy.rank,
                       ", host page ", number(copy.host_page));
}

void HostChecks::check(const Plan& plan) {
  check_readers(plan);
  check_copies(plan);
  if (uses_host(plan) || std::any_of(core_.unapplied.begin(), core_.unapplied.end(),
                                     [](const auto& other) { return uses_host(*other); }))
    check_pages(plan);
  count(plan);
}

// f(span, block, page) of what rows read from the host pool.
template <typename F>
void HostChecks::for_each_host_page(const Plan& plan, F f) const {
  const int parts = core_.setup.limits.geometry.first_part(kv::Stream::kIndexKeys);
  for (const Span& span : plan.spans) {
    for (int64_t block = 0; block < span.host_blocks; ++block) {
      for (int part = 0; part < parts; ++part) f(span, block, core_.workers.host_page(span, block, part));
    }
  }
}

// What they read is there, and, while its request lives, none of what others could take.
void HostChecks::check_readers(const Plan& plan) {
  ++looks_;
  int64_t kept = 0;
  for_each_host_page(plan, [&](const Span& span, int64_t block, PageId page) {
    core_.verdict.expect(Checker::kHost, host_[0].at(number(page)) == Copy::kThere, "step ",
                         number(plan.step), " reads block ", block, " of request ", number(span.request),
                         " in host page ", number(page), ", and it is not there");
    if (!core_.ledger.live().contains(span.request)) return;
    kept += std::exchange(read_[number(page)], looks_) == looks_ ? 0 : 1;
  });
  if (kept > 0) {
    const int64_t used = core_.plane.host_pool(kv::Stream::kEntries).used;
    core_.verdict.expect(Checker::kHost, kept <= used, "step ", number(plan.step), " reads ", kept,
                         " host pages, and ", used, " are used");
  }
  for (const auto& other : core_.unapplied) {
    for_each_host_page(*other, [&](const Span&, int64_t, PageId page) { read_[number(page)] = looks_; });
  }
}

// Pages of the host pool.
void HostChecks::check_copies(const Plan& plan) {
  for (const HostCopy& load : plan.loads)
    expects(host(load) == Copy::kThere, plan, "loads what is not there", load);
  const auto named = [](const Plan& other, const HostCopy& copy) {
    const auto same = [&](const HostCopy& one) {
      return one.stream == copy.stream && one.host_page == copy.host_page;
    };
    return std::any_of(other.loads.begin(), other.loads.end(), same) ||
           std::any_of(other.spills.begin(), other.spills.end(), same);
  };
  for (const HostCopy& spill : plan.spills) {
    for (const auto& other : core_.unapplied)
      expects(!named(*other, spill), plan, "spills to what a plan in flight names", spill);
    expects(spill.stream != kv::Stream::kEntries || read_.at(number(spill.host_page)) != looks_, plan,
            "spills to what rows read", spill);
    Copy& copy = host(spill);
    expects(copy != Copy::kSpilling, plan, "spills two pages to one", spill);
    core_.coverage.mark(Mark::kHostEvicted) += copy == Copy::kThere ? 1 : 0;
    copy = Copy::kSpilling;
  }
}

HostChecks::Touched& HostChecks::touched(kv::Stream stream, int rank, PageId page) {
  Touched& out = touched_[static_cast<size_t>(stream)][static_cast<size_t>(rank)].at(number(page));
  if (out.look != looks_) out = {looks_, false, false};
  return out;
}

// f(stream, rank, page, use) of rows and of copies between ranks.
template <typename F>
void HostChecks::for_each_page(const Plan& plan, F f) const {
  const kv::CacheGeometry& geometry = core_.setup.limits.geometry;
  for (const Span& span : plan.spans) {
    for (int64_t block = 0; block * geometry.block_tokens < span.start + span.rows; ++block) {
      const bool writes = !span.no_write && (block + 1) * geometry.block_tokens > span.start;
      for (int part = 0; part < geometry.parts(); ++part) {
        if (core_.workers.on_host(span, block, part)) continue;
        const auto ids = core_.workers.pages(span, block, part);
        for (size_t rank = 0; rank < ids.size(); ++rank) {
          if (ids[rank] != kNoPage)
            f(geometry.stream_of(part), static_cast<int>(rank), ids[rank],
              writes ? Use::kWritten : Use::kRead);
        }
      }
    }
  }
  for (const Span& span : plan.spans) {
    if (span.prefill || span.host_blocks == 0) continue;
    const auto hot = core_.workers.hot_pages(span);
    for (size_t i = 0; i < hot.size(); ++i) {
      if (hot[i] != kNoPage)
        f(kv::Stream::kEntries, static_cast<int>(i) % core_.setup.limits.rank_count, hot[i], Use::kWritten);
    }
  }
  for (const PageCopy& copy : plan.copies) {
    f(copy.stream, copy.from_rank, copy.from_page, Use::kRead);
    f(copy.stream, copy.to_rank, copy.to_page, Use::kCopiedTo);
  }
}

// Pages of devices.
void HostChecks::check_pages(const Plan& plan) {
  ++looks_;
  const uint64_t others = looks_;
  for (const auto& other : core_.unapplied) {
    for_each_page(*other, [&](kv::Stream stream, int rank, PageId page, Use use) {
      touched(stream, rank, page).written |=
          use == Use::kWritten;  // a rank copies before it comes to this plan
    });
    for (const HostCopy& load : other->loads) touched(load.stream, load.rank, load.page).moved = true;
    for (const HostCopy& spill : other->spills) touched(spill.stream, spill.rank, spill.page).moved = true;
  }
  for (const HostCopy& load : plan.loads) {
    const Touched& now =
        touched_[static_cast<size_t>(load.stream)][static_cast<size_t>(load.rank)].at(number(load.page));
    expects(now.look != others, plan, "loads into what a plan in flight names", load);
  }
  for (const HostCopy& spill : plan.spills)
    expects(!touched(spill.stream, spill.rank, spill.page).written, plan,
            "spills what a plan in flight writes", spill);
  for_each_page(plan, [&](kv::Stream stream, int rank, PageId page, Use use) {
    expects(use == Use::kRead || !touched(stream, rank, page).moved, plan,
            "writes what a plan in flight spills or loads", {stream, rank, page, kNoPage, {}});
  });
  ++looks_;  // the plan itself
  for_each_page(plan, [&](kv::Stream stream, int rank, PageId page, Use use) {
    touched(stream, rank, page).written |= use != Use::kRead;
  });
  for (const HostCopy& load : plan.loads) {
    Touched& now = touched(load.stream, load.rank, load.page);
    expects(!std::exchange(now.written, true), plan, "loads into what is written", load);
  }
  for (const HostCopy& spill : plan.spills)
    expects(!touched(spill.stream, spill.rank, spill.page).written, plan, "spills what is written", spill);
}

void HostChecks::count(const Plan& plan) const {
  core_.coverage.mark(Mark::kSpilled) += std::ssize(plan.spills);
  core_.coverage.mark(Mark::kLoaded) += std::ssize(plan.loads);
  core_.coverage.mark(Mark::kPrefetched) +=
      std::count_if(plan.loads.begin(), plan.loads.end(), [&](const HostCopy& load) {
        const auto snapshot = core_.plane.request(load.request);
        return snapshot && snapshot->state == RequestState::kWaiting;
      });
}

void HostChecks::done(const Plan& plan) {
  const auto bytes = [&](const std::vector<HostCopy>& copies) {
    int64_t sum = 0;
    for (const HostCopy& copy : copies) sum += core_.setup.limits.geometry.page_bytes(copy.stream);
    return sum;
  };
  core_.ledger.host_moved(bytes(plan.spills), bytes(plan.loads));
  for (const HostCopy& spill : plan.spills) host(spill) = Copy::kThere;
}

void HostChecks::given_up() {
  for (const auto& plan : core_.unapplied) {
    for (const HostCopy& spill : plan->spills) host(spill) = Copy::kNone;
    core_.coverage.mark(Mark::kSpillAbandoned) += std::ssize(plan->spills);
    core_.coverage.mark(Mark::kLoadAbandoned) += std::ssize(plan->loads);
  }
}

}  // namespace weft::simulation
