#include "tests/bench/mechanisms_measure.h"

#include <cmath>
#include <cstdio>

#include "kv/mechanisms.h"
#include "proto/vocab/units.h"
#include "tests/bench/random_model.h"
#include "tests/bench/served_request.h"

namespace weft::bench {
namespace {

struct Variant {
  std::string name;
  std::string prefill, decode, index, mechanisms;
  bool prefills = false, decodes = false;  // which of the two it is about
  size_t daemon = 0;
  bool same_bits = true;
};

struct Family {
  std::string name;
  std::string model;  // folder
  int workers = 2;
  std::vector<std::vector<std::string>> daemons = {{}};  // further options of each
  std::vector<Variant> variants = {};                    // the usual one first
  int64_t prompt = 0, tokens = 0;
};

// Every choice there is of the mechanisms for prompts, or for decoding.
std::vector<Variant> choices(const Variant& usual, bool prefill) {
  std::vector<Variant> out;
  for (const kv::MechanismChoice& choice : kv::mechanism_choices()) {
    if (choice.prefill != prefill ||
        kv::mechanisms_name(kv::parse_mechanisms(choice.text, {}).value()).empty())
      continue;
    Variant variant = usual;
    variant.name = variant.mechanisms = choice.text;
    variant.prefills = prefill, variant.decodes = !prefill;
    variant.same_bits = choice.text != "form=expanded";
    out.push_back(std::move(variant));
  }
  return out;
}

Family recall_on_two(const std::string& model) {
  const Variant usual{"zigzag, dcp(2), index copied", "zigzag", "dcp(2)", "copied", "", true, true};
  Family family{"recall, 2 workers", model, 2, {{}, {"--experts", "split"}}, {usual}};
  auto& variants = family.variants;
  for (const char* split : {"interleave", "contiguous", "none"}) {
    variants.push_back({split, split, "dcp(2)", "copied", "", true, false});
  }
  variants.push_back({"fetch=copies", "zigzag", "dcp(2)", "copied", "fetch=copies", true, false});
  for (const Variant& choice : choices(usual, false)) variants.push_back(choice);
  variants.push_back({"dcp(2), index copied(2)", "zigzag", "dcp(2)", "copied(2)", "", false, true});
  variants.push_back({"dcp(2), index split", "zigzag", "dcp(2)", "split", "", true, true});
  variants.push_back({"tp, index copied", "zigzag", "tp", "copied", "", true, true});
  variants.push_back({"tp, index copied(2)", "zigzag", "tp", "copied(2)", "", false, true});
  variants.push_back({"tp, index split", "zigzag", "tp", "split", "", true, true});
  variants.push_back({"dp", "zigzag", "dp", "copied", "", true, true});
  Variant split = usual;
  split.name = "experts split", split.daemon = 1, split.same_bits = false;
  variants.push_back(split);
  return family;
}

// Its prompts come in short chunks behind a long context: what pass-Q is for.
Family dense_on_two(const std::string& model) {
  const Variant usual{"context=auto, view, absorbed", "zigzag", "dcp(2)", "", "", true, true};
  Family family{"dense, 2 workers", model, 2, {{"--max-step-rows", "256", "--max-running", "16"}}, {usual}};
  for (const Variant& choice : choices(usual, true)) family.variants.push_back(choice);
  for (const Variant& choice : choices(usual, false)) family.variants.push_back(choice);
  return family;
}

Family recall_on_four(const std::string& model) {
  Family family{"recall, 4 workers on 2 cores", model, 4};
  for (const char* decode : {"dcp(4)", "dcp(2)", "tp", "dp(2)xdcp(2)", "dp(2)xtp", "dp"}) {
    family.variants.push_back({decode, "zigzag", decode, "copied", "", false, true});
  }
  family.variants.push_back(
      {"dcp(4), partials=tree", "zigzag", "dcp(4)", "copied", "partials=tree", false, true});
  return family;
}

// "1234 bytes a token: entries 1000, rows 234"
std::string counted(const wire::Crossed& crossed, double tokens) {
  const std::pair<const char*, uint64_t> kinds[] = {
      {"entries", crossed.entries()},   {"index keys", crossed.index_keys()}, {"queries", crossed.queries()},
      {"partials", crossed.partials()}, {"candidates", crossed.candidates()}, {"rows", crossed.rows()}};
  uint64_t sum = 0;
  std::string text;
  const auto each = [&](uint64_t bytes) {
    return std::to_string(std::llround(static_cast<double>(bytes) / tokens));
  };
  for (const auto& [name, bytes] : kinds) {
    sum += bytes;
    if (bytes > 0) text += (text.empty() ? ": " : ", ") + std::string(name) + " " + each(bytes);
  }
  return each(sum) + " bytes a token" + text;
}

class Measure {
 public:
  Measure(const Settings& settings, const ServingPlace& place, Report& report)
      : settings_(settings), place_(place), report_(report) {}
  Result<void> run(Family family);

 private:
  struct Seen {
    std::vector<double> prefill, decode;  // µs a token, by round
    wire::Trace last;
  };
  Result<std::vector<DaemonProcess>> start(const Family& family) const;
  void report(const Family& family, const std::vector<Seen>& seen, bool prefill);

  const Settings& settings_;
  const ServingPlace& place_;
  Report& report_;
  uint64_t seed_ = 1'000'000;
  int started_ = 0;
};

Result<std::vector<DaemonProcess>> Measure::start(const Family& family) const {
  std::string devices;
  for (int worker = 0; worker < family.workers; ++worker) {
    const int core = worker % 2 == 0 ? place_.cores.first : place_.cores.second;
    devices += (worker == 0 ? "cpu:" : ",cpu:") + std::to_string(core);
  }
  const int64_t pool =
      2 * round_up(family.prompt + family.tokens, settings_.block_tokens) + 4 * settings_.block_tokens;
  std::vector<DaemonProcess> daemons;
  for (const auto& further : family.daemons) {
    std::vector<std::string> options = {"--model",
                                        family.model,
                                        "--workers",
                                        std::to_string(family.workers),
                                        "--devices",
                                        devices,
                                        "--threads-per-worker",
                                        "1",
                                        "--block-tokens",
                                        std::to_string(settings_.block_tokens),
                                        "--pool-tokens",
                                        std::to_string(pool),
                                        "--log-level",
                                        "warning"};
    options.insert(options.end(), further.begin(), further.end());
    TRY(auto daemon, DaemonProcess::start(place_.folder + "/mechanisms" + std::to_string(started_) + "." +
                                              std::to_string(daemons.size()),
                                          options));
    daemons.push_back(std::move(daemon));
  }
  return daemons;
}

Result<void> Measure::run(Family family) {
  family.prompt = settings_.quick ? 1024 : 4096;
  family.tokens = settings_.quick ? 8 : 65;
  ++started_;
  TRY(auto daemons, start(family));
  std::vector<Seen> seen(family.variants.size());
  for (int round = -1; round < settings_.rounds; ++round) {  // the first only warms up
    std::fprintf(stderr, "mechanisms, %s: round %d of %d\n", family.name.c_str(), round + 1,
                 settings_.rounds);
    const std::vector<uint32_t> prompt = made_prompt(++seed_, family.prompt);
    std::optional<Served> first;
    for (size_t i = 0; i < family.variants.size(); ++i) {
      const Variant& variant = family.variants[i];
      wire::GenerateRequest request = cold_request(prompt, family.tokens);
      request.set_prefill(variant.prefill);
      request.set_decode(variant.decode);
      request.set_index(variant.index);
      request.set_mechanisms(variant.mechanisms);
      TRY(Served served, serve(daemons[variant.daemon], request));
      if (!first) first = served;
      if (variant.same_bits) TRY_VOID(must_agree(*first, served, variant.name));
      if (round >= 0) {
        seen[i].prefill.push_back(static_cast<double>(served.trace.prefill_ns()) * 1e-3 /
                                  static_cast<double>(family.prompt));
        seen[i].decode.push_back(static_cast<double>(served.trace.decode_ns()) * 1e-3 /
                                 static_cast<double>(family.tokens - 1));
      }
      seen[i].last = served.trace;
    }
  }
  for (const bool prefill : {true, false}) report(family, seen, prefill);
  for (DaemonProcess& daemon : daemons) TRY_VOID(daemon.stop());
  return {};
}

void Measure::report(const Family& family, const std::vector<Seen>& seen, bool prefill) {
  const auto times = [&](const Seen& one) -> const std::vector<double>& {
    return prefill ? one.prefill : one.decode;
  };
  const Summary usual = summarize(times(seen[0]));
  for (size_t i = 0; i < seen.size(); ++i) {
    const Variant& variant = family.variants[i];
    if (!(prefill ? variant.prefills : variant.decodes)) continue;
    const Summary ratio = summarize(ratios(times(seen[i]), times(seen[0])));
    char text[64];
    std::snprintf(text, sizeof text, "%.2f (%.2f .. %.2f) of the usual time; ", ratio.median, ratio.min,
                  ratio.max);
    const std::string bytes =
        prefill ? counted(seen[i].last.prefill_crossed(), static_cast<double>(family.prompt))
                : counted(seen[i].last.decode_crossed(), static_cast<double>(family.tokens - 1));
    report_.add({.group = "mechanisms",
                 .name = family.name + (prefill ? ", prefill: " : ", decode: ") + variant.name,
                 .unit = "us/token",
                 .summary = summarize(times(seen[i])),
                 .ceiling = Ceiling{"the usual", usual.median, true},
                 .note = (i == 0 ? "the usual; " : text) + bytes});
  }
}

}  // namespace

Result<void> measure_mechanisms(const Settings& settings, const ServingPlace& place, Report& report) {
  const std::string recall = place.folder + "/recall_for_mechanisms", dense = place.folder + "/dense";
  TRY_VOID(run_program({program_path("weft-recall-model"), "--out", recall}, place.folder + "/model.log"));
  TRY_VOID(write_dense_model(dense));
  Measure measure(settings, place, report);
  for (Family& family :
       std::vector<Family>{recall_on_two(recall), dense_on_two(dense), recall_on_four(recall)}) {
    TRY_VOID(measure.run(std::move(family)));
  }
  return {};
}

}  // namespace weft::bench
