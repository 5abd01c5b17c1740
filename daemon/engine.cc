#include "daemon/engine.h"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "daemon/plan_codec.h"

namespace weft::daemon {
namespace {

constexpr uint32_t kNoSpan = 0xffffffffu;  // of a SpanMeter: the page copies of a request

// The span that a meter speaks of; copies happen for the span that first reads them. Null: there is none.
const controlplane::Span* span_of(const controlplane::Plan& plan, const wire::SpanMeter& meter) {
  if (meter.span() < plan.spans.size()) return &plan.spans[meter.span()];
  if (meter.span() != kNoSpan) return nullptr;
  const auto found = std::find_if(plan.spans.begin(), plan.spans.end(), [&](const controlplane::Span& span) {
    return number(span.request) == meter.request();
  });
  return found == plan.spans.end() ? nullptr : &*found;
}

// Copies to the host are made for whoever may come, and so are some between ranks.
bool is_of_nobody(const wire::SpanMeter& meter) { return meter.span() == kNoSpan && meter.request() == 0; }

bool copies_for(const controlplane::Plan& plan, const wire::SpanMeter& meter) {
  const auto is_for = [&](const auto& copy) { return number(copy.request) == meter.request(); };
  return std::any_of(plan.copies.begin(), plan.copies.end(), is_for) ||
         std::any_of(plan.loads.begin(), plan.loads.end(), is_for);
}

}  // namespace

Engine::Engine(Loop& loop, const EventLog& log, const controlplane::Limits& limits, kv::ControlArena& control,
               int results_fd, Duration hang_deadline, Duration heartbeat_deadline, std::string record_folder,
               EngineListener& listener)
    : loop_(loop),
      log_(log),
      listener_(listener),
      control_(control),
      results_fd_(results_fd),
      hang_deadline_(hang_deadline),
      plane_(limits),
      recorder_(std::move(record_folder)),
      watchdog_(limits.rank_count, heartbeat_deadline),
      results_watch_(loop, results_fd,
                     [this](int) {
                       uint64_t count = 0;
                       [[maybe_unused]] const ssize_t got = ::read(results_fd_, &count, sizeof count);
                       collect();
                     }),
      look_timer_(loop, [this] { look(); }),
      deadline_timer_(loop, [this] { schedule_turn(); }) {
  book_.set_places(plane_.limits().places());
  results_watch_.start(kReadable);
  look_timer_.start(Watchdog::kLookInterval, Watchdog::kLookInterval);
}

// ---- requests

void Engine::arrive(controlplane::RequestArrived event, int64_t prompt_tokens) {
  RequestRecord record;
  record.id = event.request;
  record.wish = event.grouping;
  record.drafts = event.speculation.source;
  record.priority = event.priority;
  record.prompt_tokens = prompt_tokens;
  record.max_tokens = event.max_tokens;
  record.arrived = loop_.now();
  book_.add(std::move(record));
  post(std::move(event));
}

void Engine::post(controlplane::Event event) {
  events_.push_back(std::move(event));
  schedule_turn();
}

void Engine::schedule_turn() {
  if (std::exchange(turn_scheduled_, true)) return;
  loop_.defer([this] { turn(); });
}

void Engine::turn() {
  turn_scheduled_ = false;
  do {  // once without events: a deadline may have passed
    const auto events = std::exchange(events_, {});
    dispatch(plane_.handle(loop_.now(), events));
  } while (!events_.empty());
  plan_ahead();
  if (const auto deadline = plane_.next_deadline()) {
    deadline_timer_.start(std::max(*deadline - loop_.now(), Duration(0)));
  } else {
    deadline_timer_.stop();
  }
}

void Engine::fill_trace(const RequestRecord& record, wire::Trace* to) const {
  const auto snapshot = plane_.request(record.id);
  daemon::fill_trace(record, snapshot ? snapshot->stored_bytes : record.stored,
                     snapshot ? snapshot->change_waits : record.change_waits, ranks(), loop_.now(), to);
}

void Engine::dispatch(const std::vector<controlplane::Notice>& notices) {
  for (const controlplane::Notice& notice : notices) {
    if (const auto* drafts = std::get_if<controlplane::DraftNotice>(&notice)) {
      book_.drafts(*drafts);
    } else if (const auto* token = std::get_if<controlplane::TokenNotice>(&notice)) {
      book_.token(*token, loop_.now());
      listener_.token(*token);
    } else if (const auto* prefill = std::get_if<controlplane::PrefillNotice>(&notice)) {
      listener_.prefill(*prefill);
    } else if (const auto* finished = std::get_if<controlplane::FinishedNotice>(&notice)) {
      book_.finish(finished->request, *finished, loop_.now());
      const RequestRecord* record = book_.find(finished->request);
      CHECK(record != nullptr, "request ", number(finished->request), " has no record");
      listener_.finished(*finished, *record);
    } else if (const auto* regrouped = std::get_if<controlplane::RegroupedNotice>(&notice)) {
      RequestRecord* record = book_.find(regrouped->request);
      const auto snapshot = plane_.request(regrouped->request);
      if (record != nullptr && snapshot) record->wish = snapshot->wish;
      listener_.regrouped(*regrouped);
    } else if (const auto* pinned = std::get_if<controlplane::PinNotice>(&notice)) {
      listener_.pinned(*pinned);
    } else if (const auto* pressure = std::get_if<controlplane::PressureNotice>(&notice)) {
      log_.info(controlplane::pressure_name(pressure->what), {{"request", number(pressure->request)}});
    } else if (const auto* topology = std::get_if<controlplane::TopologyNotice>(&notice)) {
      if (topology->error.code == ErrorCode::kOk) {
        flights_.stop();
        book_.set_places(rank_count_of(topology->ranks));
      }
      listener_.topology(*topology);
    }
  }
}

// ---- plans

void Engine::plan_ahead() {
  if (!flights_.active()) return;
  while (auto plan = plane_.next_plan(loop_.now())) {
    for (const controlplane::TableWrite& write : plan->table_writes) apply(write);
    for (const controlplane::HostTableWrite& write : plan->host_writes) apply(write);
    plan->table_writes.clear();
    plan->host_writes.clear();
    Parcel parcel;
    parcel.allowance = step_allowance(*plan, hang_deadline_);
    parcel.bytes = plan_bytes(*plan, longest_wait(parcel.allowance));
    parcel.plan = std::move(*plan);
    book_.planned(parcel.plan, loop_.now());
    if (auto written = recorder_.write(parcel.bytes); !written) {
      log_.error("recording_stopped", {{"reason", written.error().text()}});
    }
    const StepId step = parcel.plan.step;
    const RankMask ranks = parcel.plan.ranks;
    publish(flights_.add(step, ranks, std::move(parcel)).parcel);
  }
}

void Engine::apply(const controlplane::TableWrite& write) {
  control_.write_table(write.table, write.first_block, write.pages);
  control_.set_table_version(write.table, write.version);
}

void Engine::apply(const controlplane::HostTableWrite& write) {
  control_.write_host_table(write.table, write.first_block, write.pages);
  if (write.new_table) control_.write_hot_pages(write.table, write.hot_pages);
}

void Engine::publish(Parcel& parcel) {
  parcel.published = loop_.now();
  control_.publish_plan(epoch_, std::as_bytes(std::span(parcel.bytes.data(), parcel.bytes.size())));
}

void Engine::epoch_began(Epoch epoch) {
  collect();  // what an earlier epoch still left counts
  epoch_ = epoch;
  const uint64_t first = flights_.empty() ? 0 : number(flights_.front().step);
  if (const size_t abandoned = flights_.epoch_begins(); abandoned > 0) {
    log_.error("plans_abandoned", {{"step", first}, {"plans", static_cast<uint64_t>(abandoned)}});
    post(controlplane::PlansAbandoned{});
  }
  for (Flight& flight : flights_) {
    ++metrics_.repeated_plans;
    log_.info("plan_repeated", {{"step", number(flight.step)}, {"epoch", number(epoch)}});
    publish(flight.parcel);
  }
  schedule_turn();
}

Duration Engine::epoch_lost(Loss loss) {
  // A worker may stand in any plan in flight, and sees the abort at its next exchange point.
  Duration longest = hang_deadline_;
  for (const Flight& flight : flights_) longest = std::max(longest, flight.parcel.allowance);
  flights_.stop();
  collect();
  flights_.epoch_lost(loss);
  return longest;
}

void Engine::memory_lost(int rank) {
  post_without_plans(controlplane::MemoryLost{rank});  // they read what is gone
}

void Engine::post_without_plans(controlplane::Event event) {
  flights_.withdraw();
  post(std::move(event));
}

// ---- results

void Engine::collect() {
  for (int rank = 0; rank < ranks(); ++rank) {
    while (auto bytes = control_.take_result(rank)) {
      if (!accept(rank, *bytes)) {
        listener_.rank_hung(rank, "reported a result that makes no sense");
        break;
      }
    }
  }
  finish_done_steps();
}

// False: the worker broke its contract.
bool Engine::accept(int rank, const std::vector<std::byte>& bytes) {
  wire::StepResult result;
  if (bytes.empty() || !result.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return false;
  if (result.rank() != static_cast<uint32_t>(rank)) return false;
  Flight* flight = flights_.find(StepId{result.step()});
  if (flight == nullptr) return true;  // of an abandoned plan, or late after all ranks had reported
  const controlplane::Plan& plan = flight->parcel.plan;
  std::vector<controlplane::Sample> samples;
  for (const wire::SampledToken& sample : result.samples()) {
    if (sample.span() >= plan.spans.size()) return false;
    samples.push_back(
        {plan.spans[sample.span()].request, sample.sample_index(), sample.token(), sample.not_finite()});
  }
  for (const wire::SpanMeter& meter : result.meters()) {
    const bool known = span_of(plan, meter) != nullptr || is_of_nobody(meter) ||
                       (meter.span() == kNoSpan && copies_for(plan, meter));
    if (!known || meter.crossed_size() > kv::kCrossKinds) return false;
  }
  const uint64_t step = result.step();
  for (const auto& [before, now] : flights_.take(*flight, rank, std::move(result), std::move(samples))) {
    ++metrics_.token_mismatches;
    log_.error("repeat_differs",
               {{"step", step}, {"sample", now.sample_index}, {"before", before.token}, {"now", now.token}});
  }
  return true;
}

void Engine::finish_done_steps() {
  while (const auto flight = flights_.take_done()) finish_step(*flight);
}

void Engine::finish_step(const Flight& flight) {
  ++metrics_.steps;
  listener_.step_done();
  const Duration gap = meter(flight);
  const Time now = loop_.now();
  // A plan waits in the ring while the one before it runs.
  const Parcel& parcel = flight.parcel;
  book_.step_done(parcel.plan, now - std::max(parcel.published, std::exchange(last_done_, now)), now, gap);
  controlplane::for_each_rank(flight.ranks,
                              [&](int rank) { events_.emplace_back(flight.acknowledgement(rank)); });
  const auto events = std::exchange(events_, {});
  const auto notices = plane_.handle(now, events);
  // Before the notices: the step's digests belong to requests that its tokens may end.
  tell_digests(flight, notices);
  dispatch(notices);
  turn();
}

// Those of rows that hold: a draft's row only if the draft was accepted.
void Engine::tell_digests(const Flight& flight, const std::vector<controlplane::Notice>& notices) {
  std::map<RequestId, int64_t> first_wrong;  // by request with drafts in the step: the position
  for (const controlplane::Span& span : flight.parcel.plan.spans) {
    if (!span.prefill && span.rows > 1) first_wrong[span.request] = span.start;
  }
  for (const controlplane::Notice& notice : notices) {
    const auto* drafts = std::get_if<controlplane::DraftNotice>(&notice);
    if (drafts != nullptr) first_wrong[drafts->request] = drafts->start + drafts->accepted + 1;
  }
  controlplane::for_each_rank(flight.ranks, [&](int rank) {
    for (const wire::Digest& digest : flight.report(rank).digests()) {
      const RequestId request{digest.request()};
      const auto position = static_cast<int64_t>(digest.position());
      const auto wrong = first_wrong.find(request);
      if (wrong == first_wrong.end() || position < wrong->second)
        listener_.digest(request, position, digest.sha256());
    }
  });
}

// Returns the gap before the step: the mean of its ranks.
Duration Engine::meter(const Flight& flight) {
  uint64_t gaps = 0;
  controlplane::for_each_rank(flight.ranks, [&](int rank) {
    const wire::StepResult& result = flight.report(rank);
    auto& own = metrics_.ranks[static_cast<size_t>(rank)];
    ++own.steps;
    own.compute_ns += result.compute_ns();
    own.wait_ns += result.wait_ns();
    own.gap_ns += result.gap_ns();
    gaps += result.gap_ns();
    for (const wire::SpanMeter& line : result.meters()) {
      kv::CrossedBytes bytes;
      for (int kind = 0; kind < line.crossed_size(); ++kind) {
        bytes.by_kind[static_cast<size_t>(kind)] = static_cast<int64_t>(line.crossed(kind));
      }
      metrics_.crossed += bytes;
      metrics_.hot_hits += line.hot_hits();
      metrics_.hot_misses += line.hot_misses();
      if (const controlplane::Span* span = span_of(flight.parcel.plan, line)) {
        book_.crossed(*span, bytes);
        book_.chosen(*span, static_cast<int64_t>(line.hot_hits()), static_cast<int64_t>(line.hot_misses()));
      } else if (!is_of_nobody(line)) {
        book_.moved(RequestId{line.request()}, bytes);
      }
    }
  });
  return Duration(gaps / static_cast<uint64_t>(rank_count_of(flight.ranks)));
}

// ---- watching

void Engine::look() {
  std::array<RankProgress, kMaxRanks> progress;
  for (int rank = 0; rank < ranks(); ++rank) {
    const kv::RankState& state = control_.rank_state(rank);
    constexpr auto kRelaxed = std::memory_order_relaxed;
    progress[static_cast<size_t>(rank)] = {
        state.heartbeat.load(kRelaxed),   state.step_low.load(kRelaxed),
        state.layer.load(kRelaxed),       state.exchange.load(kRelaxed),
        state.waiting_for.load(kRelaxed), state.results_written.load(kRelaxed)};
  }
  std::optional<Duration> allowance;
  if (flights_.active() && !flights_.empty()) allowance = flights_.front().parcel.allowance;
  const RankMask hung = watchdog_.look(loop_.now(), std::span(progress.data(), static_cast<size_t>(ranks())),
                                       beating ? beating() : 0, allowance, plane_.limits().active().ranks());
  for (int rank = 0; rank < ranks(); ++rank) {
    if (holds(hung, rank)) listener_.rank_hung(rank, "shows no progress");
  }
}

}  // namespace weft::daemon
