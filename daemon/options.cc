#include "daemon/options.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <limits>
#include <set>
#include <thread>

#include "daemon/field_error.h"
#include "proto/command_line.h"
#include "proto/endpoints.h"
#include "proto/utf8.h"
#include "proto/version.h"
#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

// What the command line says, before it is checked.
struct RawOptions {
  std::string devices, weight_dtype = "stored", cache_dtype = "f32", index_cache_dtype, experts = "whole",
                       index_scales = "ue8m0", prefill, decode, index, log_level = "info", output = "table",
                       speculative = "off", eviction = "lru", on_pressure = "preempt", host_write = "back";
  double hang_seconds = 30, heartbeat_seconds = 10, stall_seconds = 60;
  int threads = 0;
  bool list_devices = false;
  bool index_hadamard = false;
};

void declare(CLI::App& app, Options& options, RawOptions& raw) {
  app.set_version_flag("--version", std::string("weftd ") + kVersion);
  using command_line::at_least, command_line::between, command_line::one_of;

  app.add_option("--model", options.model_folder,
                 "folder of the checkpoint (config.json, safetensors, tokenizer.json). Required, but for "
                 "--list-devices")
      ->type_name("FOLDER");
  app.add_option("--name", options.model_name, "what clients call the model (default: the folder's name)")
      ->type_name("NAME");
  app.add_option("--workers", options.workers, "worker processes, one per rank")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{kMaxRanks}))
      ->capture_default_str();
  app.add_option(
         "--max-workers", options.max_workers,
         "worker processes that there may ever be: weftctl workers add brings further ones in (default: "
         "--workers)")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{kMaxRanks}));
  app.add_option("--devices", raw.devices,
                 "one device per worker, as cpu or cpu:CORES, comma separated: cpu:0,cpu:1-3. "
                 "Default: all workers share the CPU, unpinned")
      ->type_name("LIST");
  auto* list = app.add_flag("--list-devices", raw.list_devices, "print the devices of this machine and end");
  app.add_option("-o,--output", raw.output, "how --list-devices prints")
      ->type_name("FORM")
      ->check(one_of({"table", "json"}))
      ->needs(list)
      ->capture_default_str();
  app.add_option("--threads-per-worker", raw.threads,
                 "compute threads (default: cores / workers, at least 1)")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{1024}));

  const char* memory = "Memory";
  app.add_option("--block-tokens", options.block_tokens, "tokens per cache block: a power of two, 8 to 256")
      ->type_name("N")
      ->capture_default_str()
      ->group(memory);
  auto* tokens =
      app.add_option("--pool-tokens", options.pool_tokens, "tokens that each rank's page pool holds")
          ->type_name("N")
          ->check(at_least(1))
          ->group(memory);
  app.add_option("--pool-bytes", options.pool_bytes,
                 "bytes of each rank's page pool, as 512MiB (default: 128MiB)")
      ->type_name("SIZE")
      ->transform(command_line::byte_size())
      ->excludes(tokens)
      ->group(memory);
  app.add_option("--index-pool-tokens", options.index_pool_tokens,
                 "tokens whose index keys each rank's page pool holds (default: as many as it holds entries "
                 "of). More "
                 "of them let contexts lie in the host pool that are longer than the page pools")
      ->type_name("N")
      ->check(at_least(1))
      ->group(memory);
  app.add_option(
         "--eviction", raw.eviction,
         "whose cached blocks make room: lru, those used least recently; or reuse, those least likely "
         "to be used soon, learned from when conversations came back before")
      ->type_name("POLICY")
      ->check(one_of({"lru", "reuse"}))
      ->capture_default_str()
      ->group(memory);
  app.add_option(
         "--on-pressure", raw.on_pressure,
         "what is done, beside evicting, for a request that finds no room: none, it waits; thin, requests "
         "run "
         "with fewer copies of their cache than they wished for; or preempt, besides, less urgent ones give "
         "back their room to a more urgent one and go on later. No answer changes")
      ->type_name("MODE")
      ->check(one_of({"none", "thin", "preempt"}))
      ->capture_default_str()
      ->group(memory);
  app.add_option(
         "--host-pool", options.host_bytes,
         "bytes of a second tier of the cache in host memory, as 8GiB, shared by all workers: what makes "
         "room in the page pools is kept there and comes back without being computed again (default: "
         "none)")
      ->type_name("SIZE")
      ->transform(command_line::byte_size())
      ->group(memory);
  app.add_option(
         "--host-write", raw.host_write,
         "when a block is copied to the host pool: back, when its room is about to be needed; or through, "
         "as soon as it can be shared")
      ->type_name("WHEN")
      ->check(one_of({"through", "back"}))
      ->capture_default_str()
      ->group(memory);
  app.add_option("--copy-step", options.copy_bytes,
                 "bytes that a step copies for each worker at most when requests change their grouping; a "
                 "change that copies more is spread over steps; 0: none is")
      ->type_name("SIZE")
      ->transform(command_line::byte_size())
      ->default_str("4MiB")
      ->group(memory);
  app.add_option(
         "--hot-tokens", options.hot_tokens,
         "entries in each layer that stay on the devices for a request whose context lies in the host "
         "pool, because its last rows selected them (default: twice what a row selects)")
      ->type_name("N")
      ->check(at_least(0))
      ->group(memory);
  app.add_option("--max-context", options.max_context,
                 "longest prompt plus answer (default: the model's own)")
      ->type_name("N")
      ->check(at_least(2))
      ->group(memory);
  app.add_option("--weight-dtype", raw.weight_dtype,
                 "stored, f32 or bf16: of products, and of weights that are not quantised")
      ->type_name("TYPE")
      ->capture_default_str()
      ->group(memory);
  app.add_flag("--spare", options.spare,
               "keep one more worker process, which has loaded and mapped everything: it takes the place of "
               "one that dies");
  app.add_option(
         "--experts", raw.experts,
         "how a mixture's experts lie on the workers: whole (each on one: expert-parallel) or split (the "
         "columns of each over all: tensor-parallel). Their sums differ in the last bits")
      ->type_name("MODE")
      ->check(one_of({"whole", "split"}))
      ->capture_default_str();
  app.add_option(
         "--cache-dtype", raw.cache_dtype,
         "how tokens are cached: f32, bf16, fp8_ds_mla (latent entries: scaled FP8, the rotary part bf16) "
         "or fp8 (K and V: scaled; latent entries: not scaled)")
      ->type_name("TYPE")
      ->capture_default_str()
      ->group(memory);
  app.add_option(
         "--index-cache-dtype", raw.index_cache_dtype,
         "how index keys are cached: f32, bf16 or fp8 (default: as --cache-dtype; fp8 with fp8_ds_mla)")
      ->type_name("TYPE")
      ->group(memory);
  app.add_flag("--index-hadamard", raw.index_hadamard,
               "index queries and keys go through a Hadamard transform before they are rounded")
      ->group(memory);
  app.add_option("--index-scales", raw.index_scales,
                 "scales of FP8 index keys and queries; ue8m0 are powers of two")
      ->type_name("FORM")
      ->check(command_line::one_of({"ue8m0", "f32"}))
      ->capture_default_str()
      ->group(memory);

  const char* scheduling = "Scheduling";
  app.add_option("--prefill", raw.prefill,
                 "how prompts are split: zigzag, interleave, contiguous or none (default: as last set, at "
                 "first zigzag)")
      ->type_name("SPLIT")
      ->group(scheduling);
  app.add_option("--decode", raw.decode,
                 "how answers are decoded: tp, dcp(C), dp, or in groups of G workers: dp(G)xdcp(C), dp(G)xtp "
                 "(default: as last set, at first tp)")
      ->type_name("GROUPING")
      ->group(scheduling);
  app.add_option(
         "--index", raw.index,
         "how index keys are placed: copied (copied(C): scored in C parts) or split (split(C): over C "
         "workers) (default: as last set, at first copied)")
      ->type_name("MODE")
      ->group(scheduling);
  app.add_option(
         "--mechanisms", options.mechanisms,
         "how ranks exchange what a step needs, as query=replicated,partials=tree. query: gathered or "
         "replicated; partials: all-to-all or tree; of split prompts, context: auto, pass-kv or pass-q; "
         "fetch: view or copies; form: absorbed or expanded, which gives other bits (default: the first of "
         "each)")
      ->type_name("LIST")
      ->group(scheduling);
  app.add_option("--speculative", raw.speculative,
                 "where drafts of the next tokens come from: off, lookup (what followed where the text last "
                 "read like its end), or mtp (the model's draft layer, which only this loads)")
      ->type_name("SOURCE")
      ->check(one_of({"off", "lookup", "mtp"}))
      ->capture_default_str()
      ->group(scheduling);
  app.add_option("--draft-tokens", options.speculation.draft_tokens,
                 "drafts of one request in one step at most")
      ->type_name("K")
      ->check(between(int64_t{1}, controlplane::kDraftTokensMax))
      ->capture_default_str()
      ->group(scheduling);
  app.add_option("--max-step-rows", options.max_step_rows,
                 "rows of one step: the prefill chunk budget; fewer make shorter gaps between tokens "
                 "while prompts are read")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{1} << 16))
      ->capture_default_str()
      ->group(scheduling);
  app.add_option("--max-running", options.max_running, "requests that run at once")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{4096}))
      ->capture_default_str()
      ->group(scheduling);
  app.add_option("--max-waiting", options.max_waiting, "requests that wait; more are refused")
      ->type_name("N")
      ->check(between(int64_t{1}, int64_t{1} << 20))
      ->capture_default_str()
      ->group(scheduling);

  const char* places = "Places";
  app.add_option("--state-dir", options.state_folder, "journal and recordings; with it, the sockets too")
      ->type_name("FOLDER")
      ->group(places);
  app.add_option("--client-endpoint", options.client_endpoint,
                 "ipc://PATH or tcp://127.0.0.1:PORT (loopback only)")
      ->type_name("ENDPOINT")
      ->group(places);
  app.add_option("--control-socket", options.control_socket, "Unix socket of weftctl")
      ->type_name("PATH")
      ->group(places);
  app.add_option("--worker-binary", options.worker_binary, "weft-worker (default: beside this program)")
      ->type_name("PATH")
      ->group(places);

  const char* watching = "Watching";
  app.add_option("--hang-deadline", raw.hang_seconds,
                 "seconds without progress of any worker before a step counts as hung; heavy steps get more")
      ->type_name("SECONDS")
      ->check(between(0.1, 86400.0))
      ->capture_default_str()
      ->group(watching);
  app.add_option("--heartbeat-deadline", raw.heartbeat_seconds,
                 "seconds a worker's heartbeat may stand still")
      ->type_name("SECONDS")
      ->check(between(0.5, 86400.0))
      ->capture_default_str()
      ->group(watching);
  app.add_option("--stall-limit", raw.stall_seconds, "seconds a client may leave its stream unread")
      ->type_name("SECONDS")
      ->check(between(0.05, 86400.0))
      ->capture_default_str()
      ->group(watching);
  app.add_option("--log-level", raw.log_level, "debug, info, warning or error")
      ->type_name("LEVEL")
      ->capture_default_str()
      ->group(watching);
  app.add_flag("--record", options.record, "write every plan to a file in the state folder")->group(watching);
}

Result<uint32_t> parse_core(const std::string& text) {
  uint32_t core = 0;
  const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), core);
  if (code != std::errc() || end != text.data() + text.size() || core >= CPU_SETSIZE) {
    return bad_option("devices", "'" + text + "' is not a core number");
  }
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) == 0 && !CPU_ISSET(core, &allowed)) {
    return bad_option("devices", "core " + text + " is not available to this process");
  }
  return core;
}

Result<void> check_devices(const RawOptions& raw, Options& options) {
  if (options.max_workers > 0 && options.max_workers < options.workers) {
    return bad_option("max-workers", std::to_string(options.max_workers) + " is below --workers " +
                                         std::to_string(options.workers));
  }
  if (raw.devices.empty()) {
    options.devices.assign(static_cast<size_t>(options.workers), Device{});
  } else {
    TRY(options.devices, parse_devices(raw.devices));
    if (options.devices.size() < static_cast<size_t>(options.workers)) {
      return bad_option("workers", std::to_string(options.workers) + " ranks but only " +
                                       std::to_string(options.devices.size()) + " devices");
    }
    if (options.devices.size() > static_cast<size_t>(options.workers)) {
      return bad_option("devices", std::to_string(options.devices.size()) + " devices but --workers " +
                                       std::to_string(options.workers));
    }
  }
  const int cores = std::max(1u, std::thread::hardware_concurrency());
  options.threads_per_worker = raw.threads > 0 ? raw.threads : std::max(1, cores / options.workers);
  return {};
}

std::optional<DType> parse_dtype(const std::string& text) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    if (text == dtype_name(type)) return type;
  }
  return std::nullopt;
}

std::optional<CacheDType> parse_cache_dtype(const std::string& text) {
  for (const CacheDType type : kAllCacheDTypes) {
    if (text == cache_dtype_name(type)) return type;
  }
  return std::nullopt;
}

Result<void> check_cache(const RawOptions& raw, Options& options) {
  const auto entries = parse_cache_dtype(raw.cache_dtype);
  if (!entries) {
    return bad_option("cache-dtype", "must be f32, bf16, fp8_ds_mla or fp8, not '" + raw.cache_dtype + "'");
  }
  options.cache = *entries;
  if (!raw.index_cache_dtype.empty()) {
    const auto keys = parse_cache_dtype(raw.index_cache_dtype);
    if (!keys || *keys == CacheDType::kFp8DsMla) {
      return bad_option("index-cache-dtype", "must be f32, bf16 or fp8, not '" + raw.index_cache_dtype + "'");
    }
    options.cache.index_keys = *keys;
    options.index_cache_option = "index-cache-dtype";
  }
  if (raw.index_hadamard) options.index_cache_option = "index-hadamard";
  options.cache.index_hadamard = raw.index_hadamard;
  options.cache.index_float_scales = raw.index_scales == "f32";
  if (options.cache.index_float_scales) {
    options.index_cache_option = "index-scales";
    if (options.cache.index_keys != CacheDType::kFp8) {
      return bad_option("index-scales", std::string("index keys are stored as ") +
                                            cache_dtype_name(options.cache.index_keys) +
                                            ", which has no scales");
    }
  }
  return {};
}

Result<void> check_memory(const RawOptions& raw, Options& options) {
  if (options.block_tokens < 8 || options.block_tokens > 256 ||
      !std::has_single_bit(static_cast<uint64_t>(options.block_tokens))) {
    return bad_option("block-tokens",
                      "must be a power of two from 8 to 256, not " + std::to_string(options.block_tokens));
  }
  if (options.pool_tokens == 0 && options.pool_bytes == 0) options.pool_bytes = 128 * kMiB;
  if (options.pool_bytes < 0 || options.pool_bytes > int64_t{1} << 46) {
    return bad_option("pool-bytes", "must be from 1 to 64 TiB");
  }
  if (options.host_bytes < 0 || options.host_bytes > int64_t{1} << 46) {
    return bad_option("host-pool", "must be at most 64 TiB");
  }
  if (options.copy_bytes < 0 || options.copy_bytes > int64_t{1} << 46) {
    return bad_option("copy-step", "must be at most 64 TiB");
  }
  if (options.hot_tokens.value_or(0) > int64_t{1} << 24)
    return bad_option("hot-tokens", "must be at most 2^24");
  if (options.hot_tokens && options.host_bytes == 0)
    return bad_option("hot-tokens", "needs a host pool (--host-pool)");
  options.host_write =
      raw.host_write == "through" ? controlplane::HostWrite::kThrough : controlplane::HostWrite::kBack;
  if (options.pool_tokens > int64_t{1} << 32) return bad_option("pool-tokens", "must be at most 2^32");
  if (options.index_pool_tokens > int64_t{1} << 32)
    return bad_option("index-pool-tokens", "must be at most 2^32");
  if (options.max_context > int64_t{1} << 30) return bad_option("max-context", "must be at most 2^30");

  TRY_VOID(check_cache(raw, options));
  options.split_experts = raw.experts == "split";
  options.eviction = raw.eviction == "reuse" ? controlplane::Eviction::kReuse : controlplane::Eviction::kLru;
  using controlplane::OnPressure;
  for (const OnPressure mode : {OnPressure::kNone, OnPressure::kThin, OnPressure::kPreempt}) {
    if (raw.on_pressure == controlplane::on_pressure_name(mode)) options.on_pressure = mode;
  }
  options.weight_dtype = parse_dtype(raw.weight_dtype);
  if (!options.weight_dtype && raw.weight_dtype != "stored") {
    return bad_option("weight-dtype", "must be stored, f32 or bf16, not '" + raw.weight_dtype + "'");
  }
  return {};
}

Result<void> check_groupings(const RawOptions& raw, Options& options) {
  if (!raw.prefill.empty()) {
    auto split = kv::parse_split(raw.prefill);
    if (!split) return with_field(split.error(), "--prefill");
    options.prefill = *split;
  }
  if (!raw.decode.empty()) {
    auto wish = kv::parse_decode(raw.decode, options.workers);
    if (!wish) return with_field(wish.error(), "--decode");
    options.decode = *wish;
  }
  if (!raw.index.empty()) {
    auto kind = kv::parse_index(raw.index, options.workers);
    if (!kind) return with_field(kind.error(), "--index");
    options.index = *kind;
  }
  auto mechanisms = kv::parse_mechanisms(options.mechanisms, {});
  if (!mechanisms) return with_field(mechanisms.error(), "--mechanisms");
  const auto together = kv::validate_mechanisms(*mechanisms, options.decode.value_or(kv::DecodeWish{}));
  if (!together) return with_field(together.error(), "--mechanisms");
  return {};
}

bool is_loopback(const std::string& endpoint) {
  for (const char* host : {"tcp://127.0.0.1:", "tcp://localhost:", "tcp://[::1]:"}) {
    if (endpoint.rfind(host, 0) == 0) return true;
  }
  return false;
}

Result<void> check_worker_binary(Options& options) {
  if (options.worker_binary.empty()) {
    std::error_code code;
    const auto self = std::filesystem::read_symlink("/proc/self/exe", code);
    options.worker_binary = (self.parent_path() / "weft-worker").string();
  }
  if (::access(options.worker_binary.c_str(), X_OK) != 0) {
    return bad_option("worker-binary", "'" + options.worker_binary + "' cannot be run");
  }
  return {};
}

Result<void> check_places(Options& options) {
  const std::string sockets = options.state_folder.empty() ? default_run_folder() : options.state_folder;
  if (options.state_folder.empty()) options.state_folder = default_state_folder();
  if (options.client_endpoint.empty()) options.client_endpoint = client_endpoint_in(sockets);
  if (options.control_socket.empty()) options.control_socket = control_socket_in(sockets);
  if (auto fits = check_socket_path(options.control_socket); !fits)
    return with_field(fits.error(), "--control-socket");
  if (options.client_endpoint.rfind("ipc://", 0) == 0) {
    if (auto fits = check_socket_path(options.client_endpoint.substr(6)); !fits) {
      return with_field(fits.error(), "--client-endpoint");
    }
  } else if (!is_loopback(options.client_endpoint)) {
    return bad_option("client-endpoint", "must be ipc://PATH or tcp:// on a loopback address, not '" +
                                             options.client_endpoint + "'");
  }
  return check_worker_binary(options);
}

Result<void> check_model(Options& options) {
  if (options.model_folder.empty()) return bad_option("model", "is required");
  std::error_code code;
  const auto folder = std::filesystem::absolute(options.model_folder, code);
  if (!std::filesystem::is_directory(folder, code)) {
    return error(ErrorCode::kNotFound, "'" + options.model_folder + "' is not a folder", "--model");
  }
  options.model_folder = folder.lexically_normal().string();
  if (options.model_name.empty()) {
    auto last = std::filesystem::path(options.model_folder);
    if (!last.has_filename()) last = last.parent_path();
    options.model_name = last.filename().string();
  }
  return {};
}

// They are told to clients and workers in messages whose strings must be UTF-8.
Result<void> check_names(const Options& options) {
  const std::pair<const char*, const std::string*> names[] = {{"model", &options.model_folder},
                                                              {"name", &options.model_name},
                                                              {"state-dir", &options.state_folder},
                                                              {"client-endpoint", &options.client_endpoint},
                                                              {"control-socket", &options.control_socket}};
  for (const auto& [option, name] : names) {
    if (!is_utf8(*name)) return bad_option(option, "'" + as_utf8(*name, name->size()) + "' is not UTF-8");
  }
  return {};
}

Duration from_seconds(double value) { return Duration(static_cast<int64_t>(value * 1e9)); }

}  // namespace

const char* pool_option_of(const Options& options) {
  return options.pool_tokens > 0 ? "--pool-tokens" : "--pool-bytes";
}

Result<Device> parse_device(const std::string& text) {
  Device device{text, {}};
  if (text == "cpu") return device;
  if (text.rfind("cuda", 0) == 0) {
    return error(
        ErrorCode::kUnsupported,
        "this build's workers compute on CPUs; CUDA devices are listed (--list-devices) but not served "
        "yet, so not '" +
            text + "'",
        "--devices");
  }
  if (text.rfind("cpu:", 0) != 0)
    return bad_option("devices", "'" + text + "' is not a device; use cpu, cpu:0 or cpu:0-3");
  const std::string cores = text.substr(4);
  const size_t dash = cores.find('-');
  TRY(const uint32_t first, parse_core(cores.substr(0, dash)));
  uint32_t last = first;
  if (dash != std::string::npos) {
    TRY(last, parse_core(cores.substr(dash + 1)));
  }
  if (last < first) return bad_option("devices", "'" + text + "': the range is empty");
  for (uint32_t core = first; core <= last; ++core) device.cores.push_back(core);
  return device;
}

Result<std::vector<Device>> parse_devices(const std::string& text) {
  std::vector<Device> devices;
  size_t begin = 0;
  while (begin <= text.size()) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    TRY(Device device, parse_device(text.substr(begin, comma - begin)));
    devices.push_back(std::move(device));
    begin = comma + 1;
  }
  return devices;
}

Result<ParsedOptions> parse_options(const std::vector<std::string>& arguments) {
  Options options;
  RawOptions raw;
  CLI::App app("Serves one model on one node: spawns the workers, schedules requests and keeps the cache.",
               "weftd");
  declare(app, options, raw);
  TRY(const command_line::Asked asked, command_line::parse_words(app, arguments));
  if (asked == command_line::Asked::kHelp)
    return ParsedOptions{std::nullopt, command_line::help_text(app), {}};
  if (asked == command_line::Asked::kVersion) {
    return ParsedOptions{std::nullopt, std::string("weftd ") + kVersion + "\n", {}};
  }
  if (raw.list_devices) {
    TRY_VOID(check_worker_binary(options));
    return ParsedOptions{std::nullopt, {}, DeviceQuery{options.worker_binary, raw.output == "json"}};
  }
  TRY(options.log_level, parse_log_level(raw.log_level));
  options.hang_deadline = from_seconds(raw.hang_seconds);
  options.heartbeat_deadline = from_seconds(raw.heartbeat_seconds);
  options.stall_limit = from_seconds(raw.stall_seconds);
  TRY_VOID(check_devices(raw, options));
  TRY_VOID(check_memory(raw, options));
  if (options.max_step_rows < options.max_running) {
    return bad_option("max-step-rows", "must be at least --max-running (" +
                                           std::to_string(options.max_running) +
                                           "), so that every running request can decode in every step");
  }
  TRY_VOID(check_groupings(raw, options));
  TRY(options.speculation.source, controlplane::parse_draft_source(raw.speculative));
  TRY_VOID(check_model(options));
  TRY_VOID(check_places(options));
  TRY_VOID(check_names(options));
  return ParsedOptions{std::move(options), {}, {}};
}

}  // namespace weft::daemon
