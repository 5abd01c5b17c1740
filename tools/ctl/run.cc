#include "tools/ctl/run.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <functional>
#include <iostream>

#include "proto/command_line.h"
#include "proto/convert.h"
#include "proto/endpoints.h"
#include "proto/version.h"
#include "tools/client/client.h"
#include "tools/client/control.h"
#include "tools/client/deadline.h"
#include "tools/ctl/command.h"
#include "tools/ctl/help.h"
#include "tools/ctl/json.h"
#include "tools/ctl/views.h"

namespace weft::ctl {
namespace {

constexpr Duration kStopTimeout = std::chrono::seconds(30);
constexpr Duration kChangeTimeout = std::chrono::minutes(10);  // of the workers: a new one loads first
constexpr Duration kReadyTimeout = std::chrono::minutes(10);   // of a daemon that loads
constexpr Duration kReadyInterval = std::chrono::milliseconds(100);

void put(Context& context, const std::string& text) { context.out << text << std::flush; }
// Written when the command has ended, well or not.
void put_json(Context& context, const std::string& command, Json content) {
  context.result = document(command, std::move(content));
}

// Of a command on several requests: the first failure decides the exit code, the others follow it.
Result<void> first_of(std::vector<Error> failures, Context& context) {
  if (failures.empty()) return {};
  const Error first = std::move(failures.front());
  context.further_failures.assign(std::make_move_iterator(failures.begin() + 1),
                                  std::make_move_iterator(failures.end()));
  return first;
}

// Sleeps, or returns the interrupt.
Result<void> pause(const Context& context, Duration duration) {
  const client::Deadline deadline(duration);
  while (!deadline.passed()) {
    pollfd item{context.interrupt_fd, POLLIN, 0};
    if (::poll(&item, 1, deadline.poll_ms()) > 0) {
      char drained[256];
      if (::read(context.interrupt_fd, drained, sizeof drained) > 0) {
        return client::interrupt_error();
      }
    }
  }
  return {};
}

// Shows once, or again and again until the interrupt, which is how a watch ends well.
Result<void> show(Context& context, const std::function<Result<std::string>()>& look) {
  if (!context.arguments.watch) {
    TRY(const std::string text, look());
    put(context, text);
    return {};
  }
  context.catch_interrupts();
  const auto interval = Duration(static_cast<int64_t>(context.arguments.interval_s * 1e9));
  while (true) {
    TRY(std::string text, look());
    const bool redraw = context.terminal.out_is_terminal && !context.arguments.json();
    put(context, redraw ? "\033[H\033[J" + text : text);
    if (!pause(context, interval)) return {};
  }
}

std::string text_of(const Context& context, const std::string& command,
                    const google::protobuf::Message& reply, std::string view) {
  return context.arguments.json() ? dump(document(command, to_json(reply))) + "\n" : std::move(view);
}

std::string progress_text(const wire::StatusReply& status) {
  std::string out = status.state();
  if (status.load_total() > 0 && status.state() != "ready") {
    out += " " + std::to_string(100 * status.load_done() / status.load_total()) + " %";
  }
  return status.trouble().empty() ? out : out + " (" + status.trouble() + ")";
}

// Looks until the daemon is ready. One that does not listen yet is waited for, too, but not as long.
Result<wire::StatusReply> wait_until_ready(Context& context) {
  const client::Deadline deadline(timeout_of(context.arguments, kReadyTimeout));
  const client::Deadline listening(timeout_of(context.arguments, kControlTimeout));
  wire::ControlRequest request;
  request.mutable_status();
  std::string shown;
  while (true) {
    auto reply = ask(context, request);
    if (!reply && reply.error().code != ErrorCode::kUnavailable) return std::move(reply).error();
    const std::string now = reply ? progress_text(reply->status()) : "not listening yet";
    if (now != shown) {
      context.err << (context.terminal.error_is_terminal ? "\r\033[K" : "") << "weftd: " << now
                  << (context.terminal.error_is_terminal ? "" : "\n") << std::flush;
      shown = now;
    }
    const bool ready = reply && reply->status().state() == "ready";
    if (ready || (reply ? deadline : listening).passed()) {
      if (context.terminal.error_is_terminal) context.err << std::endl;
      if (ready) return std::move(*reply->mutable_status());
      if (!reply) return std::move(reply).error();
      return error(ErrorCode::kDeadlineExceeded, "the daemon is not ready: " + now);
    }
    TRY_VOID(pause(context, kReadyInterval));
  }
}

}  // namespace

std::string control_path(const Arguments& arguments) {
  if (!arguments.control_socket.empty()) return arguments.control_socket;
  return control_socket_in(arguments.state_dir.empty() ? default_run_folder() : arguments.state_dir);
}

Duration timeout_of(const Arguments& arguments, Duration otherwise) {
  if (!arguments.timeout_s) return otherwise;
  return *arguments.timeout_s == 0 ? Duration::max()
                                   : Duration(static_cast<int64_t>(*arguments.timeout_s * 1e9));
}

Result<wire::ControlReply> ask(const Context& context, wire::ControlRequest request) {
  TRY(auto control, client::ControlClient::connect(control_path(context.arguments)));
  return control.call(std::move(request), timeout_of(context.arguments, kControlTimeout));
}

Json versions_json(Json daemon) {
  const Json own = {
      {"version", kVersion}, {"client_protocol", kClientProtocol}, {"control_protocol", kControlProtocol}};
  return {{"weftctl", own}, {"weftd", std::move(daemon)}};
}

void put_help(Context& context, const std::string& text) {
  if (context.arguments.json()) {
    put(context, dump(document("help", {{"text", text}})) + "\n");
  } else {
    put(context, text);
  }
}

Result<void> run_status(Context& context) {
  if (context.arguments.wait) {
    TRY(const auto status, wait_until_ready(context));
    if (!context.arguments.watch) {
      put(context, text_of(context, "status", status, status_view(status, context.terminal)));
      return {};
    }
  }
  return show(context, [&]() -> Result<std::string> {
    wire::ControlRequest request;
    request.mutable_status();
    TRY(const auto reply, ask(context, std::move(request)));
    return text_of(context, "status", reply.status(), status_view(reply.status(), context.terminal));
  });
}

Result<void> run_requests(Context& context) {
  return show(context, [&]() -> Result<std::string> {
    wire::ControlRequest request;
    request.mutable_requests()->set_all(context.arguments.all);
    TRY(const auto reply, ask(context, std::move(request)));
    return text_of(context, "requests", reply.requests(), requests_view(reply.requests(), context.terminal));
  });
}

Result<void> run_explain(Context& context) {
  wire::ControlRequest request;
  request.mutable_explain()->set_request(context.arguments.request);
  TRY(const auto reply, ask(context, std::move(request)));
  put(context, text_of(context, "explain", reply.explain(), explain_view(reply.explain(), context.terminal)));
  return {};
}

Result<void> run_regroup(Context& context) {
  const Arguments& a = context.arguments;
  if (a.requests.empty() && !a.all && !a.defaults) {
    return error(ErrorCode::kInvalidArgument, "name requests, or --all, or --defaults", "regroup");
  }
  if (!a.requests.empty() && a.all) {
    return error(ErrorCode::kInvalidArgument, "name requests or --all, not both", "regroup");
  }
  if (a.prefill.empty() && a.decode.empty() && a.index.empty() && a.mechanisms.empty()) {
    return error(ErrorCode::kInvalidArgument,
                 "say at least one of --prefill, --decode, --index, --mechanisms", "regroup");
  }
  wire::ControlRequest request;
  auto& regroup = *request.mutable_regroup();
  for (const uint64_t id : a.requests) regroup.add_requests(id);
  regroup.set_all_running(a.all);
  regroup.set_defaults(a.defaults);
  regroup.set_prefill(a.prefill);
  regroup.set_decode(a.decode);
  regroup.set_index(a.index);
  regroup.set_mechanisms(a.mechanisms);
  regroup.set_dry_run(a.dry_run);
  TRY(const auto reply, ask(context, std::move(request)));
  if (a.json()) {
    put_json(context, "regroup", to_json(reply.regroup()));
  } else {
    put(context, regroup_view(reply.regroup(), a.defaults, a.dry_run, context.terminal));
  }
  std::vector<Error> failures;
  for (const auto& outcome : reply.regroup().outcomes()) {
    if (!outcome.has_error()) continue;
    Error failure = from_wire(outcome.error());
    // "no request 8" says itself whom it is about.
    if (failure.field != "request")
      failure.message = "request " + std::to_string(outcome.request()) + ": " + failure.message;
    failures.push_back(std::move(failure));
  }
  return first_of(std::move(failures), context);
}

Result<void> run_cancel(Context& context) {
  Json cancelled = Json::array(), failed = Json::array();
  std::vector<Error> failures;
  for (const uint64_t id : context.arguments.requests) {
    wire::ControlRequest request;
    request.mutable_cancel()->set_request(id);
    auto reply = ask(context, std::move(request));
    if (reply) {
      cancelled.push_back(id);
      if (!context.arguments.json()) put(context, "cancelled " + std::to_string(id) + "\n");
    } else {  // the others are still tried
      failed.push_back({{"request", id}, {"error", error_fields(reply.error())}});
      failures.push_back(std::move(reply).error());
    }
  }
  if (context.arguments.json()) put_json(context, "cancel", {{"requests", cancelled}, {"failed", failed}});
  return first_of(std::move(failures), context);
}

namespace {

Result<uint32_t> rank_in(const std::string& text) {
  uint32_t rank = 0;
  const char* end = text.data() + text.size();
  if (text.empty() || std::from_chars(text.data(), end, rank).ptr != end) {
    return error(ErrorCode::kInvalidArgument,
                 "\"" + text + "\" is no rank: a number as weftctl workers shows it", "WHAT");
  }
  return rank;
}

Result<wire::ControlRequest> change_request(const Arguments& a) {
  wire::ControlRequest request;
  if (a.action == "remove") {
    if (a.drained_rank) return error(ErrorCode::kInvalidArgument, "is for workers add", "--rank");
    TRY(const uint32_t rank, rank_in(a.what));
    request.mutable_remove_worker()->set_rank(rank);
    return request;
  }
  if (a.what.empty() == !a.drained_rank) {
    return error(ErrorCode::kInvalidArgument, "workers add needs a device, or --rank, and not both", "WHAT");
  }
  request.mutable_add_worker()->set_device(a.what);
  if (a.drained_rank) request.mutable_add_worker()->set_rank(*a.drained_rank);
  return request;
}

// Blocks may have to move first, and a new worker to load.
Result<void> change_workers(Context& context, const std::string& command, wire::ControlRequest request) {
  TRY(auto control, client::ControlClient::connect(control_path(context.arguments)));
  TRY(const auto reply, control.call(std::move(request), timeout_of(context.arguments, kChangeTimeout)));
  put(context, text_of(context, command, reply.topology(), topology_view(reply.topology())));
  return {};
}

}  // namespace

Result<void> run_drain(Context& context) {
  wire::ControlRequest request;
  request.mutable_drain()->set_rank(context.arguments.rank);
  return change_workers(context, "drain", std::move(request));
}

Result<void> run_history(Context& context) {
  wire::ControlRequest request;
  request.mutable_history()->set_limit(context.arguments.limit);
  TRY(const auto reply, ask(context, std::move(request)));
  put(context, text_of(context, "history", reply.history(), history_view(reply.history(), context.terminal)));
  return {};
}

Result<void> run_workers(Context& context) {
  if (!context.arguments.action.empty()) {
    TRY(auto change, change_request(context.arguments));
    return change_workers(context, "workers", std::move(change));
  }
  if (context.arguments.drained_rank)
    return error(ErrorCode::kInvalidArgument, "is for workers add", "--rank");
  wire::ControlRequest request;
  request.mutable_workers();
  TRY(const auto reply, ask(context, std::move(request)));
  put(context, text_of(context, "workers", reply.workers(), workers_view(reply.workers(), context.terminal)));
  return {};
}

namespace {
// One command for each number; the table of pins afterwards.
template <typename Fill>
Result<void> change_pins(Context& context, Fill fill) {
  std::vector<Error> failures;
  std::optional<wire::PinsReply> pins;
  for (const uint64_t number : context.arguments.requests) {
    wire::ControlRequest request;
    fill(request, number);
    auto reply = ask(context, std::move(request));
    if (reply) {
      pins = reply->pins();
    } else {  // the others are still tried
      failures.push_back(std::move(reply).error());
    }
  }
  if (pins) put(context, text_of(context, "pins", *pins, pins_view(*pins, context.terminal)));
  return first_of(std::move(failures), context);
}
}  // namespace

Result<void> run_pin(Context& context) {
  return change_pins(context, [](wire::ControlRequest& request, uint64_t number) {
    request.mutable_pin()->set_request(number);
  });
}

Result<void> run_unpin(Context& context) {
  return change_pins(context, [](wire::ControlRequest& request, uint64_t number) {
    request.mutable_unpin()->set_pin(number);
  });
}

Result<void> run_pins(Context& context) {
  wire::ControlRequest request;
  request.mutable_pins();
  TRY(const auto reply, ask(context, std::move(request)));
  put(context, text_of(context, "pins", reply.pins(), pins_view(reply.pins(), context.terminal)));
  return {};
}

Result<void> run_version(Context& context) {
  wire::ControlRequest request;
  request.mutable_version_info();
  const auto reply = ask(context, std::move(request));
  if (context.arguments.json()) {
    put_json(context, "version", versions_json(reply ? to_json(reply->version_info()) : nullptr));
  } else {
    put(context, std::string("weftctl ") + kVersion + "\n");
    if (reply) put(context, "weftd   " + reply->version_info().version() + "\n");
  }
  if (!reply) return reply.error();
  return {};
}

Result<void> run_record(Context& context) {
  wire::ControlRequest request;
  request.mutable_record()->set_on(context.arguments.on_or_off == "on");
  TRY(const auto reply, ask(context, std::move(request)));
  const std::string& path = reply.record().path();
  const bool on = context.arguments.on_or_off == "on";
  const std::string view =
      path.empty() ? "there was no recording\n" : (on ? "recording to " : "recorded to ") + path + "\n";
  put(context, text_of(context, "record", reply.record(), view));
  return {};
}

Result<void> run_stop(Context& context) {
  const client::Deadline deadline(timeout_of(context.arguments, kStopTimeout));
  TRY(auto control, client::ControlClient::connect(control_path(context.arguments)));
  TRY(const pid_t pid, control.daemon_pid());
  wire::ControlRequest request;
  request.mutable_shutdown();
  TRY([[maybe_unused]] const auto reply, control.call(std::move(request), deadline.left()));
  if (!context.arguments.no_wait) TRY_VOID(client::wait_for_exit(pid, deadline.left()));
  if (context.arguments.json()) {
    put_json(context, "stop", {{"pid", pid}, {"gone", !context.arguments.no_wait}});
  } else {
    put(context, context.arguments.no_wait ? "weftd is stopping\n" : "weftd has stopped\n");
  }
  return {};
}

Result<void> run_help(Context& context) {
  const std::string& topic = context.arguments.topic;
  if (context.arguments.markdown) {
    put_help(context, markdown_reference());
    return {};
  }
  const Command* command = topic.empty() ? nullptr : find_command(topic);
  if (!topic.empty() && command == nullptr) {
    std::vector<std::string> names;
    for (const Command& each : commands()) names.push_back(each.name);
    const std::string near = command_line::nearest_word(topic, names);
    return error(ErrorCode::kInvalidArgument,
                 "no command \"" + topic + "\"" + (near.empty() ? "" : "; did you mean " + near + "?"));
  }
  put_help(context, command == nullptr ? program_help() : command_help(*command));
  return {};
}

}  // namespace weft::ctl
