#include "tests/bench/serving_measure.h"

#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/util/delimited_message_util.h>

#include <algorithm>
#include <cstdio>
#include <fstream>

#include "proto/vocab/units.h"
#include "proto/worker.pb.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/daemon_process.h"
#include "tests/bench/model_work.h"
#include "tests/bench/served_request.h"
#include "worker/comm/routes.h"

namespace weft::bench {
namespace {

struct Setup {
  const char* name;
  int workers, threads;  // threads per worker
};
constexpr Setup kSetups[] = {{"1 worker x 1 thread", 1, 1},
                             {"1 worker x 2 threads", 1, 2},
                             {"2 workers x 1 thread (PCP, zigzag)", 2, 1}};
constexpr size_t kSetupCount = std::size(kSetups);
constexpr size_t kTwoWorkers = 2;
constexpr uint32_t kDraftTokens = 4;
constexpr const char* kGroupings[] = {"tp", "dcp(2)", "dp"};

std::string devices(const Setup& setup, const CorePair& cores) {
  const std::string first = "cpu:" + std::to_string(cores.first);
  const std::string second = std::to_string(cores.second);
  if (setup.workers == 2) return first + ",cpu:" + second;
  return setup.threads == 2 && cores.distinct() ? first + "-" + second : first;
}

// What else a request cost.
struct Timed : Served {
  double busy = 0;  // CPU time of the daemon that served it / wall
  double idle = 0;  // CPU time of all others / wall
};

class Serving {
 public:
  Serving(const Settings& settings, const Ceilings& ceilings, const ServingPlace& place, Report& report)
      : settings_(settings), ceilings_(ceilings), place_(place), report_(report) {}

  Result<void> start();
  Result<void> prefill();
  Result<void> decode();
  Result<void> stop();

 private:
  struct Ask {
    size_t setup = 0;
    std::string decode = "tp";
    int64_t tokens = 1;
    bool look_up = false;  // drafts
  };
  int64_t longest_prompt(size_t setup) const;
  std::vector<uint32_t> prompt(int64_t tokens) { return made_prompt(++seed_, tokens); }
  Result<Timed> serve(const Ask& ask, const std::vector<uint32_t>& prompt);
  Result<void> prefill(int64_t tokens);
  void report_prefill(int64_t tokens, const std::vector<std::vector<Timed>>& rounds);
  Result<void> decode_after(int64_t context, int64_t tokens);
  Result<int64_t> exchanges_of(const Ask& ask, const std::vector<uint32_t>& prompt);

  const Settings& settings_;
  const Ceilings& ceilings_;
  const ServingPlace& place_;
  Report& report_;
  worker::ModelConfig config_;
  std::vector<DaemonProcess> daemons_;  // by setup
  uint64_t seed_ = 0;                   // of the last prompt
};

int64_t Serving::longest_prompt(size_t setup) const {
  int64_t longest = *std::max_element(settings_.prompts.begin(), settings_.prompts.end());
  if (setup == kTwoWorkers) {
    for (int64_t context : settings_.contexts) longest = std::max(longest, context);
  }
  return longest;
}

Result<void> Serving::start() {
  const std::string model = place_.folder + "/recall";
  TRY_VOID(run_program({program_path("weft-recall-model"), "--out", model}, place_.folder + "/model.log"));
  TRY(config_, worker::read_model_config(model));
  for (size_t i = 0; i < kSetupCount; ++i) {
    const Setup& setup = kSetups[i];
    // Room for the prompt, the answer, and the blocks that a request before it has not given back yet.
    const int64_t pool = 2 * round_up(longest_prompt(i) + settings_.decode_tokens, settings_.block_tokens) +
                         4 * settings_.block_tokens;
    auto daemon = DaemonProcess::start(
        place_.folder + "/" + std::to_string(i),
        {"--model", model, "--workers", std::to_string(setup.workers), "--devices",
         devices(setup, place_.cores), "--threads-per-worker", std::to_string(setup.threads),
         "--block-tokens", std::to_string(settings_.block_tokens), "--pool-tokens", std::to_string(pool),
         "--prefill", "zigzag", "--log-level", "warning"});
    if (!daemon) return daemon.error();
    daemons_.push_back(std::move(*daemon));
  }
  return {};
}

Result<Timed> Serving::serve(const Ask& ask, const std::vector<uint32_t>& prompt) {
  wire::GenerateRequest request = cold_request(prompt, ask.tokens);
  request.set_prefill("zigzag");
  request.set_decode(ask.decode);
  if (ask.look_up) {
    request.set_speculative("lookup");
    request.set_draft_tokens(kDraftTokens);
  }
  Timed timed;
  std::vector<double> before;
  for (const DaemonProcess& each : daemons_) before.push_back(each.cpu_seconds());
  const double begin = wall_seconds();
  TRY(static_cast<Served&>(timed), bench::serve(daemons_[ask.setup], request));
  const double wall = wall_seconds() - begin;
  for (size_t i = 0; i < daemons_.size(); ++i) {
    (i == ask.setup ? timed.busy : timed.idle) += (daemons_[i].cpu_seconds() - before[i]) / wall;
  }
  return timed;
}

std::vector<double> each(const std::vector<Timed>& rounds, double (*value)(const Timed&)) {
  std::vector<double> out;
  for (const Timed& served : rounds) out.push_back(value(served));
  return out;
}

Result<void> Serving::prefill() {
  for (int64_t tokens : settings_.prompts) TRY_VOID(prefill(tokens));
  return {};
}

Result<void> Serving::prefill(int64_t tokens) {
  std::vector<std::vector<Timed>> rounds(kSetupCount);
  for (int round = -1; round < settings_.rounds; ++round) {  // the first only warms up
    std::fprintf(stderr, "prefill of %lld tokens: round %d of %d\n", static_cast<long long>(tokens),
                 round + 1, settings_.rounds);
    const std::vector<uint32_t> text = prompt(tokens);
    std::optional<Timed> first;
    for (size_t i = 0; i < kSetupCount; ++i) {
      TRY(Timed served, serve({.setup = i}, text));
      if (!first) first = served;
      TRY_VOID(must_agree(*first, served, kSetups[i].name));
      if (round >= 0) rounds[i].push_back(std::move(served));
    }
  }
  report_prefill(tokens, rounds);
  return {};
}

void Serving::report_prefill(int64_t tokens, const std::vector<std::vector<Timed>>& rounds) {
  const double work = prefill_work(config_, tokens).operations;
  const auto count = static_cast<double>(tokens);
  const std::string size = ", " + std::to_string(tokens) + " tokens";
  std::vector<std::vector<double>> rates;
  for (size_t i = 0; i < kSetupCount; ++i) {
    const int threads = kSetups[i].workers * kSetups[i].threads;
    std::vector<double> rate;
    for (const Timed& served : rounds[i]) {
      rate.push_back(count * 1e9 / static_cast<double>(served.trace.prefill_ns()));
    }
    const double ceiling = count / (work / (ceilings_.fma[threads] * 1e9));
    report_.add({.group = "prefill",
                 .name = kSetups[i].name + size,
                 .unit = "tokens/s",
                 .summary = summarize(rate),
                 .ceiling = Ceiling{"its arithmetic at the FMA loop", ceiling}});
    rates.push_back(std::move(rate));
  }
  const Ceiling two{"FMA loop, 2 threads / 1 thread", ceilings_.fma[2] / ceilings_.fma[1]};
  const auto ratio = [&](const std::string& name, size_t a, size_t b, std::optional<Ceiling> ceiling) {
    report_.add({.group = "prefill",
                 .name = name + size,
                 .unit = "x",
                 .summary = summarize(ratios(rates[a], rates[b])),
                 .ceiling = std::move(ceiling)});
  };
  ratio("ratio: 1 worker x 2 threads / 1 worker x 1 thread", 1, 0, two);
  ratio("ratio: 2 workers x 1 thread / 1 worker x 1 thread", 2, 0, two);
  ratio("ratio: 2 workers x 1 thread / 1 worker x 2 threads", 2, 1, std::nullopt);

  std::vector<double> idle;
  for (size_t i = 0; i < kSetupCount; ++i) {
    const int threads = kSetups[i].workers * kSetups[i].threads;
    const Summary busy = summarize(each(rounds[i], [](const Timed& s) { return s.busy; }));
    // One thread waits for nobody: what it did not get, somebody else had. Tiny prompts are all overhead.
    const bool disturbed = threads == 1 && !settings_.quick && busy.median < 0.95;
    report_.add({.group = "prefill",
                 .name = std::string("cores kept busy by ") + kSetups[i].name + size,
                 .unit = "cores",
                 .summary = busy,
                 .ceiling = Ceiling{"threads", static_cast<double>(threads)},
                 .note = disturbed ? "THE MACHINE WAS NOT IDLE: do not use this run" : ""});
    for (const Timed& served : rounds[i]) idle.push_back(served.idle);
  }
  report_.add({.group = "prefill",
               .name = "cores kept busy by the two daemons that wait" + size,
               .unit = "cores",
               .summary = summarize(idle),
               .note = "0: idle workers sleep"});
}

// The exchange points of the last decode step of a request, out of the plans that the daemon recorded.
Result<int64_t> Serving::exchanges_of(const Ask& ask, const std::vector<uint32_t>& prompt) {
  const DaemonProcess& daemon = daemons_[ask.setup];
  wire::ControlRequest record;
  record.mutable_record()->set_on(true);
  TRY(const auto started, daemon.control(record));
  TRY_VOID(serve(ask, prompt));
  record.mutable_record()->set_on(false);
  TRY_VOID(daemon.control(record));

  std::ifstream file(started.record().path(), std::ios::binary);
  google::protobuf::io::IstreamInputStream stream(&file);
  std::optional<wire::StepPlan> last;
  bool clean_end = false;
  for (wire::StepPlan plan;
       google::protobuf::util::ParseDelimitedFromZeroCopyStream(&plan, &stream, &clean_end); plan.Clear()) {
    if (plan.spans_size() == 1 && !plan.spans(0).prefill()) last = plan;
  }
  if (!last || !clean_end) {
    return error(ErrorCode::kInternal, "no decode step in " + started.record().path());
  }
  TRY(const auto layout, worker::StepLayout::make(*last, config_.index_topk, kSetups[ask.setup].workers));
  return layout.exchange_count(config_);
}

Result<void> Serving::decode_after(int64_t context, int64_t tokens) {
  constexpr size_t kCount = std::size(kGroupings);
  std::vector<int64_t> exchanges;
  const std::vector<uint32_t> warm_up = prompt(context);
  for (const char* grouping : kGroupings) {
    TRY(exchanges.emplace_back(), exchanges_of({kTwoWorkers, grouping, tokens}, warm_up));
  }
  std::vector<std::vector<double>> step_ms(kCount);
  std::vector<double> drafted_gain, drafted_rate;
  for (int round = 0; round < settings_.rounds; ++round) {
    std::fprintf(stderr, "decode after %lld tokens: round %d of %d\n", static_cast<long long>(context),
                 round + 1, settings_.rounds);
    const std::vector<uint32_t> text = prompt(context);
    std::optional<Timed> first;
    for (size_t i = 0; i < kCount; ++i) {
      TRY(Timed served, serve({kTwoWorkers, kGroupings[i], tokens}, text));
      if (!first) first = served;
      TRY_VOID(must_agree(*first, served, kGroupings[i]));
      step_ms[i].push_back(static_cast<double>(served.trace.decode_ns()) * 1e-6 /
                           static_cast<double>(served.trace.decode_steps()));
    }
    // The recall model quotes its prompt, which is what look-up is for.
    TRY(const Timed drafted, serve({kTwoWorkers, kGroupings[0], tokens, true}, text));
    TRY_VOID(must_agree(*first, drafted, "look-up"));
    drafted_gain.push_back(static_cast<double>(first->trace.decode_ns()) /
                           static_cast<double>(drafted.trace.decode_ns()));
    drafted_rate.push_back(static_cast<double>(tokens - 1) /
                           static_cast<double>(drafted.trace.decode_steps()));
  }

  const Work work = decode_work(config_, config_.checkpoint_dtype, DType::kF32, context);
  // Memory as fast as it is for so many bytes: they may fit in a cache.
  const double stream = stream_read_gbs(2, static_cast<size_t>(work.bytes), settings_.seconds() / 2);
  const double bound_ms =
      std::max(work.operations / (ceilings_.fma[2] * 1e9), work.bytes / (stream * 1e9)) * 1e3;
  const double exchange_ms = ceilings_.exchange * 1e-3;
  for (size_t i = 0; i < kCount; ++i) {
    report_.add(
        {.group = "decode",
         .name = std::string(kGroupings[i]) + " on 2 workers, after " + std::to_string(context) + " tokens",
         .unit = "ms/token",
         .summary = summarize(step_ms[i]),
         .ceiling = Ceiling{"its work + " + std::to_string(exchanges[i]) + " empty exchanges",
                            bound_ms + static_cast<double>(exchanges[i]) * exchange_ms, true},
         .note = std::to_string(exchanges[i]) + " exchanges a step"});
  }
  const std::string where =
      std::string(kGroupings[0]) + " with drafts by look-up, after " + std::to_string(context) + " tokens";
  report_.add({.group = "decode",
               .name = where,
               .unit = "tokens/step",
               .summary = summarize(drafted_rate),
               .ceiling = Ceiling{"every draft holds", 1.0 + kDraftTokens}});
  report_.add({.group = "decode",
               .name = "ratio: time of " + std::string(kGroupings[0]) + " / " + where,
               .unit = "x",
               .summary = summarize(drafted_gain),
               .note = "the same tokens"});
  return {};
}

Result<void> Serving::decode() {
  for (int64_t context : settings_.contexts) TRY_VOID(decode_after(context, settings_.decode_tokens));
  return {};
}

Result<void> Serving::stop() {
  for (DaemonProcess& daemon : daemons_) TRY_VOID(daemon.stop());
  return {};
}

}  // namespace

Result<void> measure_serving(const Settings& settings, const Ceilings& ceilings, const ServingPlace& place,
                             Report& report) {
  Serving serving(settings, ceilings, place, report);
  TRY_VOID(serving.start());
  if (settings.wants("prefill")) TRY_VOID(serving.prefill());
  if (settings.wants("decode")) TRY_VOID(serving.decode());
  return serving.stop();
}

}  // namespace weft::bench
