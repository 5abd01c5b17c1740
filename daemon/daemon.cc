#include "daemon/daemon.h"

#include <signal.h>

#include <cstdio>
#include <filesystem>
#include <string_view>

#include "daemon/memory_budget.h"
#include "proto/version.h"

namespace weft::daemon {
namespace {

// The last replies of a stopping daemon may take this long to leave.
constexpr Duration kLinger = std::chrono::milliseconds(250);

}  // namespace

Daemon::Daemon(const Options& options, const EventLog& log)
    : options_(options),
      log_(log),
      fleet_(loop_, log, options, SupervisorLimits{}, *this),
      clients_(loop_, log, options.stall_limit, defaults_),
      topology_(log, fleet_),
      control_(loop_, log, [this] { stop("weftctl stop"); }) {}

Daemon::~Daemon() = default;

Result<void> Daemon::open() {
  TRY(journal_, Journal::open(options_.state_folder));
  restore_defaults();
  auto tokenizer = Tokenizer::load(options_.model_folder);
  if (tokenizer) {
    tokenizer_ = std::make_shared<const Tokenizer>(std::move(tokenizer).value());
  } else if (tokenizer.error().code == ErrorCode::kNotFound ||
             tokenizer.error().code == ErrorCode::kUnsupported) {
    no_tokenizer_ = tokenizer.error().text();
    log_.warning("no_tokenizer", {{"reason", no_tokenizer_}});
  } else {
    return tokenizer.error();
  }
  TRY_VOID(make_socket_folders());
  TRY(control_endpoint_,
      ControlEndpoint::listen(loop_, options_.control_socket,
                              [this](const wire::ControlRequest& request, ControlEndpoint::Reply reply) {
                                control_.handle(request, std::move(reply));
                              }));
  TRY(client_endpoint_,
      ClientEndpoint::bind(loop_, log_, options_.client_endpoint, ClientEndpointLimits{}, clients_));
  clients_.attach(*client_endpoint_);
  write_configuration();
  control_.view.options = &options_;
  control_.view.fleet = &fleet_;
  control_.view.journal = &*journal_;
  control_.view.topology = &topology_;
  topology_.journal = &*journal_;
  control_.view.defaults = &defaults_;
  control_.view.client_address = client_endpoint_->address();
  control_.view.started = loop_.now();
  return {};
}

Result<void> Daemon::run() {
  terminate_ = std::make_unique<SignalWatch>(loop_, SIGTERM, [this] { stop("SIGTERM"); });
  interrupt_ = std::make_unique<SignalWatch>(loop_, SIGINT, [this] { stop("SIGINT"); });
  log_.info("started", {{"model", options_.model_folder},
                        {"workers", options_.workers},
                        {"client_endpoint", client_endpoint_->address()},
                        {"control_socket", options_.control_socket},
                        {"state_folder", options_.state_folder}});
  fleet_.start();
  loop_.run();
  log_.info("stopped");
  if (failure_) return *failure_;
  return {};
}

Result<void> Daemon::make_socket_folders() {
  const auto make = [&](const std::string& socket, const char* field) -> Result<void> {
    TRY(OwnedFolder folder, OwnedFolder::make(std::filesystem::path(socket).parent_path().string(), field));
    socket_folders_.push_back(std::move(folder));
    return {};
  };
  TRY_VOID(make(options_.control_socket, "--control-socket"));
  constexpr std::string_view kIpc = "ipc://";
  if (!options_.client_endpoint.starts_with(kIpc)) return {};
  return make(options_.client_endpoint.substr(kIpc.size()), "--client-endpoint");
}

// The command line wins over what the journal remembers, and is remembered from now on.
void Daemon::restore_defaults() {
  const auto wanted = [&](const char* key) {
    auto value = journal_->wanted(key);
    return value && value->has_value() ? **value : std::string();
  };
  auto restored =
      validate_grouping({wanted("prefill"), wanted("decode"), wanted("index"), wanted("mechanisms")},
                        defaults_, options_.workers);
  if (restored) {
    defaults_ = *restored;
  } else {
    log_.warning("remembered_defaults_unusable", {{"reason", restored.error().text()}});
  }
  if (options_.prefill) defaults_.prefill = *options_.prefill;
  if (options_.decode) defaults_.decode = *options_.decode;
  if (options_.index) defaults_.index = *options_.index;
  defaults_.mechanisms = kv::parse_mechanisms(options_.mechanisms, defaults_.mechanisms).value();
}

void Daemon::write_configuration() {
  journal(journal_->set_configuration({{"model", options_.model_folder},
                                       {"model_name", options_.model_name},
                                       {"workers", std::to_string(options_.workers)},
                                       {"threads_per_worker", std::to_string(options_.threads_per_worker)},
                                       {"block_tokens", std::to_string(options_.block_tokens)},
                                       {"pool_tokens", std::to_string(options_.pool_tokens)},
                                       {"pool_bytes", std::to_string(options_.pool_bytes)},
                                       {"host_pool", std::to_string(options_.host_bytes)},
                                       {"max_context", std::to_string(options_.max_context)},
                                       {"max_step_rows", std::to_string(options_.max_step_rows)},
                                       {"experts", options_.split_experts ? "split" : "whole"},
                                       {"cache_dtype", cache_dtype_name(options_.cache.entries)},
                                       {"index_cache", options_.cache.index_name()},
                                       {"client_endpoint", client_endpoint_->address()},
                                       {"control_socket", options_.control_socket},
                                       {"version", kVersion}}));
  const GroupingText defaults = grouping_text(defaults_);
  journal(journal_->set_wanted({{"workers", std::to_string(options_.workers)},
                                {"prefill", defaults.prefill},
                                {"decode", defaults.decode},
                                {"index", defaults.index},
                                {"mechanisms", defaults.mechanisms}}));
}

void Daemon::stop(const std::string& why) {
  if (std::exchange(stopping_, true)) {
    log_.warning("stopping_now", {{"reason", why}});
    return fleet_.kill_all();
  }
  log_.info("stopping", {{"reason", why}});
  control_.view.stopping = true;
  client_endpoint_->stop_accepting();
  client_endpoint_->set_linger(kLinger);
  clients_.stop();
  topology_.stop();
  fleet_.stop();
}

// ---- fleet

Result<ArenaSizes> Daemon::size_arenas(const wire::ModelDescription& model) {
  TRY(sizing_, size_everything(options_, model));
  ArenaSizes at_start = sizing_->arenas;  // nobody touches the pools of workers that are not there
  at_start.pool_pages.resize(static_cast<size_t>(options_.workers));
  TRY_VOID(check_fits_memory(at_start, sizing_->pool_option, available_memory()));
  return sizing_->arenas;
}

void Daemon::arenas_made(kv::ControlArena& control, int results_fd) {
  engine_ = std::make_unique<Engine>(loop_, log_, sizing_->limits, control, results_fd,
                                     options_.hang_deadline, options_.heartbeat_deadline,
                                     options_.state_folder, static_cast<EngineListener&>(*this));
  engine_->beating = [this] { return fleet_.beating(); };
  if (options_.record) {
    auto started = engine_->recorder().start();
    if (!started) log_.error("recording_failed", {{"reason", started.error().text()}});
  }
}

void Daemon::epoch_began(Epoch epoch) {
  engine_->epoch_began(epoch);
  topology_.epoch_began(epoch);
  if (const int64_t line = std::exchange(recovery_, 0); line != 0) {
    journal(journal_->end_command(line, "ok", epoch));
  }
  if (std::exchange(ready_, true)) return;
  control_.view.engine = engine_.get();
  topology_.engine = engine_.get();
  topology_.sizes = &sizing_->arenas;
  clients_.serve(*engine_, sizing_->model, sizing_->cache_format, tokenizer_, no_tokenizer_);
  print_ready();
}

void Daemon::print_ready() {
  const int64_t tokens = kv::pool_tokens(sizing_->limits.geometry, sizing_->arenas.pool_pages[0].entries);
  log_.info("ready", {{"model", options_.model_name},
                      {"model_type", sizing_->model.model_type},
                      {"workers", options_.workers},
                      {"max_context", sizing_->limits.max_context},
                      {"pool_tokens_per_rank", tokens},
                      {"client_endpoint", client_endpoint_->address()},
                      {"control_socket", options_.control_socket}});
  std::printf("weftd ready: %s (%s), %d workers, client %s, control %s\n", options_.model_name.c_str(),
              sizing_->model.model_type.c_str(), options_.workers, client_endpoint_->address().c_str(),
              options_.control_socket.c_str());
  std::fflush(stdout);
}

Duration Daemon::epoch_lost(Epoch, const std::string& reason, Loss loss) {
  if (!stopping_ && !topology_.changes_epoch() && recovery_ == 0) {
    const auto line = journal_->begin_command("recovery", reason);
    if (line) {
      recovery_ = *line;
    } else {
      journal(line.error());
    }
  }
  return engine_->epoch_lost(loss);
}

void Daemon::journal(const Result<void>& written) {
  if (!written) log_.error("journal_failed", {{"reason", written.error().text()}});
}

void Daemon::worker_started(int rank) {
  if (engine_ != nullptr) engine_->worker_started(rank);
}

void Daemon::fleet_failed(const Error& failure) {
  failure_ = failure;
  stop(failure.text());
}

void Daemon::fleet_stopped() { loop_.stop(); }

}  // namespace weft::daemon
