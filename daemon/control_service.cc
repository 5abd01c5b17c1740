#include "daemon/control_service.h"

#include <ctime>

#include "daemon/explain.h"
#include "daemon/validate.h"
#include "kv/page_pool.h"
#include "proto/convert.h"
#include "proto/version.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

wire::ControlReply error_reply(const Error& failure) {
  wire::ControlReply reply;
  fill_error(failure, reply.mutable_error());
  return reply;
}

Error not_ready() { return error(ErrorCode::kFailedPrecondition, "the model is still being loaded"); }

constexpr int64_t kHistoryLines = 100;

std::string utc_time(int64_t ms) {
  const std::time_t at = ms / 1000;
  std::tm parts{};
  ::gmtime_r(&at, &parts);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text;
}

Error no_such_request(uint64_t id) {
  return error(ErrorCode::kNotFound, "no request " + std::to_string(id), "request");
}

uint64_t as_unsigned(int64_t value) { return static_cast<uint64_t>(value); }

void fill_pool(const controlplane::ControlPlane& plane, kv::Stream stream, int rank, wire::StreamPool* to) {
  const auto counts = plane.pool(stream, rank);
  to->set_pages(as_unsigned(plane.limits().pages(stream, rank)));
  to->set_free(as_unsigned(counts.free));
  to->set_used(as_unsigned(counts.used));
  to->set_cached(as_unsigned(counts.cached));
  to->set_in_flight(as_unsigned(counts.in_flight));
  to->set_page_bytes(as_unsigned(plane.limits().geometry.page_bytes(stream)));
}

void fill_host_pool(const controlplane::ControlPlane& plane, const EngineMetrics& metrics,
                    wire::HostPoolStatus* to) {
  const auto fill = [&](kv::Stream stream, wire::StreamPool* pool) {
    const controlplane::HostCounts counts = plane.host_pool(stream);
    pool->set_pages(as_unsigned(counts.pages));
    pool->set_free(as_unsigned(counts.free));
    pool->set_used(as_unsigned(counts.used));
    pool->set_cached(as_unsigned(counts.cached));
    pool->set_in_flight(as_unsigned(counts.in_flight));
    pool->set_page_bytes(as_unsigned(plane.limits().geometry.page_bytes(stream)));
  };
  fill(kv::Stream::kEntries, to->mutable_entries());
  fill(kv::Stream::kIndexKeys, to->mutable_index_keys());
  const controlplane::Counters counters = plane.counters();
  to->set_spilled_bytes(as_unsigned(counters.spilled_bytes));
  to->set_loaded_bytes(as_unsigned(counters.loaded_bytes));
  to->set_hit_tokens(as_unsigned(counters.host_hit_tokens));
  to->set_write(controlplane::host_write_name(plane.limits().host_write));
  to->set_context_requests(as_unsigned(counters.host_contexts));
  to->set_hot_hits(metrics.hot_hits);
  to->set_hot_misses(metrics.hot_misses);
}

void fill_pressure(const controlplane::ControlPlane& plane, wire::PressureStatus* to) {
  const controlplane::Counters counters = plane.counters();
  to->set_on_pressure(controlplane::on_pressure_name(plane.limits().on_pressure));
  to->set_thinned_now(as_unsigned(counters.thinned_now));
  to->set_thinned(as_unsigned(counters.thinned));
  to->set_thickened(as_unsigned(counters.thickened));
  to->set_preempted(as_unsigned(counters.preempted));
  to->set_replayed_rows(as_unsigned(counters.replayed_rows));
}

std::string regroup_detail(const wire::RegroupRequest& request) {
  std::string text = request.all_running() ? "all" : "";
  for (const uint64_t id : request.requests()) text += (text.empty() ? "" : " ") + std::to_string(id);
  if (request.defaults()) text += text.empty() ? "defaults" : " defaults";
  if (!request.prefill().empty()) text += " prefill=" + request.prefill();
  if (!request.decode().empty()) text += " decode=" + request.decode();
  if (!request.index().empty()) text += " index=" + request.index();
  if (!request.mechanisms().empty()) text += " mechanisms=" + request.mechanisms();
  return request.dry_run() ? text + " dry-run" : text;
}

}  // namespace

void ControlService::handle(const wire::ControlRequest& request, ControlEndpoint::Reply reply) {
  const auto answer = [&](const Answer& result) { reply(result ? *result : error_reply(result.error())); };
  switch (request.body_case()) {
    case wire::ControlRequest::kStatus:
      return reply(status());
    case wire::ControlRequest::kRequests:
      return answer(requests(request.requests()));
    case wire::ControlRequest::kExplain:
      return answer(explain(request.explain()));
    case wire::ControlRequest::kRegroup:
      return regroup(request.regroup(), std::move(reply));
    case wire::ControlRequest::kCancel:
      return answer(cancel(request.cancel()));
    case wire::ControlRequest::kWorkers:
      return reply(workers());
    case wire::ControlRequest::kVersionInfo: {
      wire::ControlReply version;
      version.mutable_version_info()->set_version(kVersion);
      version.mutable_version_info()->set_client_protocol(kClientProtocol);
      version.mutable_version_info()->set_control_protocol(kControlProtocol);
      version.mutable_version_info()->set_worker_protocol(kWorkerProtocol);
      return reply(version);
    }
    case wire::ControlRequest::kShutdown: {
      end(begin("shutdown", ""), "ok");
      wire::ControlReply done;
      done.mutable_shutdown();
      reply(done);
      return loop_.defer(shut_down_);
    }
    case wire::ControlRequest::kRecord:
      return answer(record(request.record()));
    case wire::ControlRequest::kPin:
      return change_pins("pin", request.pin().request(), std::move(reply));
    case wire::ControlRequest::kUnpin:
      return change_pins("unpin", request.unpin().pin(), std::move(reply));
    case wire::ControlRequest::kPins:
      return view.engine == nullptr ? reply(error_reply(not_ready())) : reply(pins());
    case wire::ControlRequest::kDrain:
      return view.topology->drain(request.drain(), std::move(reply));
    case wire::ControlRequest::kAddWorker:
      return view.topology->add(request.add_worker(), std::move(reply));
    case wire::ControlRequest::kRemoveWorker:
      return view.topology->remove(request.remove_worker(), std::move(reply));
    case wire::ControlRequest::kHistory:
      return answer(history(request.history()));
    case wire::ControlRequest::BODY_NOT_SET:
      break;
  }
  reply(error_reply(error(ErrorCode::kBadMessage, "the request is empty or unknown")));
}

std::string ControlService::state() const {
  if (view.stopping) return "stopping";
  if (!view.fleet->has_arenas()) return "starting";
  if (!view.fleet->ever_ready()) return "loading";
  return view.fleet->epoch_active() ? "ready" : "recovering";
}

wire::ControlReply ControlService::status() const {
  wire::ControlReply reply;
  wire::StatusReply* status = reply.mutable_status();
  const wire::ModelDescription& model = view.fleet->model();
  status->set_state(state());
  status->set_model(view.options->model_name);
  status->set_model_type(model.model_type());
  status->set_workers(static_cast<uint32_t>(view.fleet->topology().count()));
  status->set_epoch(number(view.fleet->epoch()));
  status->set_uptime_ns(as_unsigned((loop_.now() - view.started).count()));
  set_grouping(*view.defaults, status);
  status->set_speculative(controlplane::draft_source_name(view.options->speculation.source));
  status->set_draft_tokens(static_cast<uint32_t>(view.options->speculation.draft_tokens));
  status->set_eviction(controlplane::eviction_name(view.options->eviction));
  status->set_block_tokens(as_unsigned(view.options->block_tokens));
  status->set_client_endpoint(view.client_address);
  // Empty as long as the model is not described.
  const auto weights = from_wire(model.weight_dtype(), "weight_dtype");
  status->set_weight_dtype(weights ? dtype_name(*weights) : "");
  status->set_experts(view.options->split_experts ? "split" : "whole");
  status->set_weight_format(model.weight_format());
  status->set_cache_dtype(cache_dtype_name(view.options->cache.entries));
  if (model.index_layers() > 0) status->set_index_cache(view.options->cache.index_name());
  status->set_instruction_set(model.instruction_set());
  status->set_worker_restarts(view.fleet->restarts());
  status->set_state_folder(view.options->state_folder);
  status->set_trouble(view.fleet->trouble());
  status->set_load_done(view.fleet->loading().done);
  status->set_load_total(view.fleet->loading().total);
  if (view.engine == nullptr) return reply;

  const controlplane::ControlPlane& plane = view.engine->plane();
  const controlplane::Counters counters = plane.counters();
  status->set_max_context(as_unsigned(plane.limits().max_context));
  status->set_pool_tokens(
      as_unsigned(kv::pool_tokens(plane.limits().geometry, plane.limits().pages(kv::Stream::kEntries, 0))));
  status->set_running(as_unsigned(plane.running_count()));
  status->set_waiting(as_unsigned(plane.waiting_count()));
  status->set_finished(as_unsigned(counters.finished));
  status->set_failed(as_unsigned(counters.failed + counters.refused));
  status->set_prompt_tokens(as_unsigned(counters.prompt_tokens));
  status->set_cached_tokens(as_unsigned(counters.cached_tokens));
  status->set_computed_prompt_tokens(as_unsigned(counters.computed_prompt_tokens));
  status->set_evicted_blocks(as_unsigned(counters.evicted_blocks));
  status->set_pinned_blocks(as_unsigned(view.engine->plane().pinned_blocks()));
  status->set_pinned_host_blocks(as_unsigned(plane.pinned_host_blocks()));
  status->set_cancelled(as_unsigned(counters.cancelled));
  status->set_generated_tokens(as_unsigned(counters.generated_tokens));
  status->set_drafted_tokens(as_unsigned(counters.drafted_tokens));
  status->set_accepted_tokens(as_unsigned(counters.accepted_tokens));
  status->set_steps(view.engine->metrics().steps);
  fill_crossed(view.engine->metrics().crossed, status->mutable_crossed());
  for (int rank = 0; rank < view.fleet->rank_count(); ++rank) {
    if (!view.fleet->has_worker(rank)) continue;
    wire::PoolStatus* pool = status->add_pools();
    pool->set_rank(static_cast<uint32_t>(rank));
    fill_pool(plane, kv::Stream::kEntries, rank, pool->mutable_entries());
    fill_pool(plane, kv::Stream::kIndexKeys, rank, pool->mutable_index_keys());
  }
  if (plane.limits().host_pages[0] > 0)
    fill_host_pool(plane, view.engine->metrics(), status->mutable_host_pool());
  fill_pressure(plane, status->mutable_pressure());
  return reply;
}

void ControlService::fill_status(const RequestRecord& record, wire::RequestStatus* to) const {
  to->set_request(number(record.id));
  to->set_state(record.outcome);
  to->set_error(record.failure);
  to->set_prompt_tokens(as_unsigned(record.prompt_tokens));
  to->set_cached_tokens(as_unsigned(record.cached_tokens));
  to->set_computed_tokens(as_unsigned(record.computed_tokens));
  to->set_completion_tokens(as_unsigned(record.completion_tokens));
  to->set_max_tokens(as_unsigned(record.max_tokens));
  to->set_priority(record.priority);
  set_grouping(record.wish, to);
  to->set_age_ns(as_unsigned((loop_.now() - record.arrived).count()));
  const auto snapshot = view.engine->plane().request(record.id);
  if (!snapshot) return;
  to->set_state(snapshot->paused ? "paused" : controlplane::request_state_name(snapshot->state));
  to->set_cached_tokens(as_unsigned(snapshot->cached_tokens));
  to->set_computed_tokens(as_unsigned(snapshot->computed_tokens));
  to->set_thinned(snapshot->thinned);
  to->set_preempted(as_unsigned(snapshot->preempted));
  if (snapshot->state == controlplane::RequestState::kWaiting) return;
  to->set_placement(controlplane::placement_name(view.engine->plane().limits(), snapshot->placement));
}

ControlService::Answer ControlService::requests(const wire::RequestsRequest& request) const {
  wire::ControlReply reply;
  wire::RequestsReply* list = reply.mutable_requests();
  if (view.engine == nullptr) return reply;
  for (const auto& [id, record] : view.engine->book().running()) fill_status(record, list->add_requests());
  if (request.all()) {
    for (const RequestRecord& record : view.engine->book().finished())
      fill_status(record, list->add_requests());
  }
  return reply;
}

ControlService::Answer ControlService::explain(const wire::ExplainRequest& request) const {
  if (view.engine == nullptr) return not_ready();
  const RequestRecord* record = view.engine->book().find(RequestId{request.request()});
  if (record == nullptr) return no_such_request(request.request());
  wire::ControlReply reply;
  wire::ExplainReply* explain = reply.mutable_explain();
  fill_status(*record, explain->mutable_status());
  view.engine->fill_trace(*record, explain->mutable_trace());
  fill_costs(*record, view.engine->plane(), view.fleet->model(), explain->mutable_costs());
  fill_mechanisms(*record, view.engine->plane(), view.fleet->model(), explain->mutable_mechanisms());
  return reply;
}

// Runs or waits.
Result<void> ControlService::check_live(RequestId id) const {
  if (view.engine->book().running().contains(id)) return {};
  if (view.engine->book().find(id) == nullptr) return no_such_request(number(id));
  return error(ErrorCode::kFailedPrecondition, "request " + std::to_string(number(id)) + " has ended",
               "request");
}

ControlService::Answer ControlService::cancel(const wire::CancelRequest& request) {
  if (view.engine == nullptr) return not_ready();
  const RequestId id{request.request()};
  TRY_VOID(check_live(id));
  const int64_t journalled = begin("cancel", std::to_string(request.request()));
  view.engine->post(controlplane::CancelRequested{id});
  end(journalled, "ok");
  wire::ControlReply reply;
  reply.mutable_cancel()->set_request(request.request());
  return reply;
}

wire::ControlReply ControlService::workers() const {
  wire::ControlReply reply;
  for (int rank = 0; rank < view.fleet->rank_count(); ++rank) {
    const WorkerFleet::Status status = view.fleet->status(rank);
    if (!view.fleet->has_worker(rank) && status.last_exit.empty()) continue;  // there never was one
    wire::WorkerStatus* to = reply.mutable_workers()->add_workers();
    to->set_rank(static_cast<uint32_t>(rank));
    const bool drained = status.state == WorkerState::kReady && !status.takes_part;
    to->set_state(drained ? "drained" : worker_state_name(status.state));
    to->set_pid(static_cast<uint32_t>(status.pid));
    to->set_restarts(status.restarts);
    to->set_last_exit(status.last_exit);
    to->set_uptime_ns(as_unsigned(status.uptime.count()));
    to->set_device(status.device);
    if (view.engine == nullptr) continue;
    const auto& metrics = view.engine->metrics().ranks[static_cast<size_t>(rank)];
    to->set_steps(metrics.steps);
    to->set_compute_ns(metrics.compute_ns);
    to->set_wait_ns(metrics.wait_ns);
    to->set_gap_ns(metrics.gap_ns);
  }
  return reply;
}

ControlService::Answer ControlService::record(const wire::RecordRequest& request) {
  if (view.engine == nullptr) return not_ready();
  const int64_t journalled = begin("record", request.on() ? "on" : "off");
  wire::ControlReply reply;
  PlanRecorder& recorder = view.engine->recorder();
  if (request.on()) {
    auto started = recorder.start();
    end(journalled, started ? "ok" : started.error().text());
    TRY(const std::string path, std::move(started));
    reply.mutable_record()->set_path(path);
    return reply;
  }
  if (recorder.on()) reply.mutable_record()->set_path(recorder.path());
  recorder.stop();
  end(journalled, "ok");
  return reply;
}

// ---- pins

wire::ControlReply ControlService::pins() const {
  wire::ControlReply reply;
  wire::PinsReply* to = reply.mutable_pins();
  for (const controlplane::PinSnapshot& pin : view.engine->plane().pins()) {
    wire::PinStatus* status = to->add_pins();
    status->set_pin(pin.pin);
    status->set_request(number(pin.request));
    const int64_t block_tokens = view.engine->plane().limits().geometry.block_tokens;
    status->set_tokens(as_unsigned((pin.blocks + pin.host_blocks) * block_tokens));
    status->set_host_tokens(as_unsigned(pin.host_blocks * block_tokens));
    status->set_age_ns(as_unsigned((loop_.now() - pin.since).count()));
  }
  return reply;
}

void ControlService::change_pins(const std::string& command, uint64_t which, ControlEndpoint::Reply reply) {
  if (view.engine == nullptr) return reply(error_reply(not_ready()));
  const uint64_t number = next_command_++;
  pin_changes_.emplace(number, PinChange{std::move(reply), begin(command, std::to_string(which))});
  if (command == "pin") {
    view.engine->post(controlplane::PinRequested{number, RequestId{which}});
  } else {
    view.engine->post(controlplane::UnpinRequested{number, which});
  }
}

void ControlService::pinned(const controlplane::PinNotice& notice) {
  const auto found = pin_changes_.find(notice.command);
  if (found == pin_changes_.end()) return;
  const bool done = notice.error.code == ErrorCode::kOk;
  end(found->second.journal_id, done ? "ok" : notice.error.text());
  found->second.send(done ? pins() : error_reply(notice.error));
  pin_changes_.erase(found);
}

// ---- history

ControlService::Answer ControlService::history(const wire::HistoryRequest& request) const {
  TRY(const auto lines, view.journal->history(request.limit() == 0 ? kHistoryLines : request.limit()));
  wire::ControlReply reply;
  wire::HistoryReply* history = reply.mutable_history();
  for (const Journal::HistoryLine& line : lines) {
    wire::HistoryLine* to = history->add_lines();
    to->set_time(utc_time(line.at_ms));
    to->set_epoch(number(line.epoch));
    to->set_what(line.detail.empty() ? line.command : line.command + " " + line.detail);
    to->set_outcome(line.outcome.value_or("not done"));
  }
  return reply;
}

// ---- regroup

Result<controlplane::GroupingWish> ControlService::set_defaults(const wire::RegroupRequest& request) {
  TRY(const controlplane::GroupingWish wish,
      validate_grouping(grouping_text(request), *view.defaults, view.fleet->topology().count()));
  if (request.dry_run()) return wish;
  // Remembered first: defaults that could not be written down are not taken.
  const GroupingText text = grouping_text(wish);
  TRY_VOID(view.journal->set_wanted({{"prefill", text.prefill},
                                     {"decode", text.decode},
                                     {"index", text.index},
                                     {"mechanisms", text.mechanisms}}));
  *view.defaults = wish;
  return wish;
}

void ControlService::regroup(const wire::RegroupRequest& request, ControlEndpoint::Reply reply) {
  if (view.engine == nullptr) return reply(error_reply(not_ready()));
  const auto wish = validate_grouping(grouping_text(request), {}, view.fleet->topology().count());
  if (!wish) return reply(error_reply(wish.error()));
  if (grouping_text(request).empty()) {
    return reply(error_reply(
        error(ErrorCode::kInvalidArgument, "give at least one of prefill, decode, index, mechanisms")));
  }
  std::set<RequestId> targets;
  for (const uint64_t id : request.requests()) targets.insert(RequestId{id});
  if (request.all_running()) {
    for (const auto& [id, record] : view.engine->book().running()) targets.insert(id);
  }
  if (targets.empty() && !request.all_running() && !request.defaults()) {
    return reply(error_reply(
        error(ErrorCode::kInvalidArgument, "names no request, nor all, nor the defaults", "requests")));
  }
  Regroup regroup;
  regroup.journal_id = begin("regroup", regroup_detail(request));
  regroup.send = std::move(reply);
  regroup.reply.mutable_regroup();
  regroup.defaults = *view.defaults;
  if (request.defaults()) {
    const auto set = set_defaults(request);
    if (!set) {
      end(regroup.journal_id, set.error().text());
      return regroup.send(error_reply(set.error()));
    }
    regroup.defaults = *set;
  }
  for (auto id = targets.begin(); id != targets.end();) {
    const auto live = check_live(*id);
    if (live) {
      ++id;
      continue;
    }
    wire::RegroupOutcome* outcome = regroup.reply.mutable_regroup()->add_outcomes();
    outcome->set_request(number(*id));
    fill_error(live.error(), outcome->mutable_error());
    id = targets.erase(id);
  }
  if (targets.empty()) return finish_regroup(regroup);
  regroup.open = targets.size();
  const uint64_t command = next_command_++;
  regroups_.emplace(command, std::move(regroup));
  for (const RequestId id : targets) {
    controlplane::RegroupRequested event;
    event.command = command;
    event.request = id;
    event.has_prefill = !request.prefill().empty();
    event.has_decode = !request.decode().empty();
    event.has_index = !request.index().empty();
    event.wish = *wish;
    event.mechanisms = request.mechanisms();
    event.dry_run = request.dry_run();
    view.engine->post(event);
  }
}

void ControlService::regrouped(const controlplane::RegroupedNotice& notice) {
  const bool done = notice.error.code == ErrorCode::kOk;
  log_.info("regrouped", {{"request", number(notice.request)},
                          {"before", notice.before},
                          {"after", notice.after},
                          {"bytes_moved", notice.bytes_moved},
                          {"error", done ? std::string() : notice.error.text()}});
  const auto found = regroups_.find(notice.command);
  if (found == regroups_.end()) return;
  Regroup& regroup = found->second;
  wire::RegroupOutcome* outcome = regroup.reply.mutable_regroup()->add_outcomes();
  outcome->set_request(number(notice.request));
  outcome->set_before(notice.before);
  outcome->set_after(notice.after);
  outcome->set_bytes_moved(as_unsigned(notice.bytes_moved));
  outcome->set_pages_dropped(as_unsigned(notice.pages_dropped));
  if (!done) {
    const auto live = check_live(notice.request);  // it may have ended a moment before
    fill_error(live ? notice.error : live.error(), outcome->mutable_error());
  }
  if (--regroup.open > 0) return;
  finish_regroup(regroup);
  regroups_.erase(found);
}

void ControlService::finish_regroup(Regroup& regroup) {
  wire::RegroupReply* reply = regroup.reply.mutable_regroup();
  set_grouping(regroup.defaults, reply);
  int refused = 0;
  for (const wire::RegroupOutcome& outcome : reply->outcomes()) refused += outcome.has_error() ? 1 : 0;
  end(regroup.journal_id, refused == 0 ? "ok" : std::to_string(refused) + " refused");
  regroup.send(regroup.reply);
}

// ---- journal

int64_t ControlService::begin(const std::string& command, const std::string& detail) {
  log_.info("command", {{"command", command}, {"detail", detail}});
  auto id = view.journal->begin_command(command, detail);
  if (!id) log_.error("journal_failed", {{"reason", id.error().text()}});
  return id ? *id : 0;
}

void ControlService::end(int64_t id, const std::string& outcome) {
  if (id == 0) return;
  if (auto ended = view.journal->end_command(id, outcome, view.fleet->epoch()); !ended) {
    log_.error("journal_failed", {{"reason", ended.error().text()}});
  }
}

}  // namespace weft::daemon
