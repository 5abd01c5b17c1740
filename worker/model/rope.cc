#include "worker/model/rope.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <optional>
#include <string>

namespace weft::worker {

namespace {

constexpr double kFactorMax = 1e6;
constexpr double kContextMax = 1 << 30;

double magnitude(double factor, double m) { return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0; }

double mscale_all_dim(FieldReader& r) { return r.number("mscale_all_dim", 0, 100, 0.0); }

// Every frequency is slowed by the same factor: positions are interpolated.
void apply_linear(Rope& rope, double factor) {
  for (double& frequency : rope.inverse_frequency) frequency /= factor;
}

// Wavelengths beyond original / low_freq_factor are stretched by `factor`, those below original /
// high_freq_factor are kept, and between the two a linear mixture.
void apply_llama3(FieldReader& r, Rope& rope, double factor, double original) {
  const double low = r.number("low_freq_factor", 1e-3, kFactorMax);
  const double high = r.number("high_freq_factor", 1e-3, kFactorMax);
  if (!r.failed() && high <= low) r.fail("high_freq_factor", "must be above low_freq_factor");
  if (r.failed()) return;
  for (double& frequency : rope.inverse_frequency) {
    const double turns = original * frequency / (2 * std::numbers::pi);  // within the original context
    const double kept = std::clamp((turns - low) / (high - low), 0.0, 1.0);
    frequency *= (1 - kept) / factor + kept;
  }
}

// Pairs that turn often keep their frequency, pairs that turn less than beta_slow times within the original
// context are slowed by `factor`, with a linear ramp over the pairs between.
void apply_yarn(FieldReader& r, Rope& rope, double theta, double factor, double original) {
  const double fast = r.number("beta_fast", 1e-3, kFactorMax, 32.0);
  const double slow = r.number("beta_slow", 1e-3, kFactorMax, 1.0);
  const double m = r.number("mscale", 0, 100, 0.0);
  const double m_all = mscale_all_dim(r);
  const bool truncate = r.boolean("truncate", true);
  if (fast < slow) r.fail("beta_fast", "must not be below beta_slow");
  const auto width = static_cast<double>(2 * rope.inverse_frequency.size());
  const auto pair_that_turns = [&](double turns) {
    return width * std::log(original / (2 * std::numbers::pi * turns)) / (2 * std::log(theta));
  };
  double low = pair_that_turns(fast);
  double high = pair_that_turns(slow);
  if (truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, width - 1);
  if (low == high) high += 0.001;
  for (size_t j = 0; j < rope.inverse_frequency.size(); ++j) {
    const double slowed = std::clamp((static_cast<double>(j) - low) / (high - low), 0.0, 1.0);
    rope.inverse_frequency[j] *= slowed / factor + (1 - slowed);
  }
  const double by_default =
      m != 0 && m_all != 0 ? magnitude(factor, m) / magnitude(factor, m_all) : magnitude(factor, 1);
  rope.factor = r.number("attention_factor", 0, 1e3, by_default);
}

void apply_scaling(FieldReader& r, Rope& rope, double theta, double max_context) {
  const char* kind_field = r.has("rope_type") ? "rope_type" : "type";
  const std::string kind = r.text(kind_field, "default");
  if (kind == "default" || r.failed()) return;
  if (kind != "linear" && kind != "llama3" && kind != "yarn") {
    return r.fail(kind_field, "'" + kind + "' is not served; default, linear, llama3 and yarn are",
                  ErrorCode::kUnsupported);
  }
  const double original = r.number("original_max_position_embeddings", 1, kContextMax, max_context);
  std::optional<double> missing;
  if (kind == "yarn") missing = max_context / original;
  const double factor = r.number("factor", 1, kFactorMax, missing);
  if (kind == "linear") apply_linear(rope, factor);
  if (kind == "llama3") apply_llama3(r, rope, factor, original);
  if (kind == "yarn") apply_yarn(r, rope, theta, factor, original);
  const double m_all = mscale_all_dim(r);
  if (m_all != 0) rope.score_growth = std::pow(magnitude(factor, m_all), 2);
}

// The object that says how positions turn, in whichever spelling; empty if there is none.
FieldReader rope_fields(FieldReader& f) {
  static const nlohmann::json nothing = nlohmann::json::object();
  const char* field = f.has("rope_parameters") ? "rope_parameters" : "rope_scaling";
  const nlohmann::json* given = f.object(field);
  return {given != nullptr ? *given : nothing, "config.json", std::string(field) + "."};
}

}  // namespace

Rope read_rope(FieldReader& f, int64_t width, int64_t max_context) {
  FieldReader r = rope_fields(f);
  const double theta =
      r.has("rope_theta") ? r.number("rope_theta", 1.001, 1e12) : f.number("rope_theta", 1.001, 1e12);
  Rope rope;
  rope.inverse_frequency.resize(static_cast<size_t>(width / 2));
  for (size_t j = 0; j < rope.inverse_frequency.size(); ++j) {
    rope.inverse_frequency[j] = std::pow(theta, -2.0 * static_cast<double>(j) / static_cast<double>(width));
  }
  apply_scaling(r, rope, theta, static_cast<double>(max_context));
  f.adopt(r);
  return rope;
}

double read_rotary_share(FieldReader& f, double missing, bool partial) {
  FieldReader r = rope_fields(f);
  FieldReader& given = r.has("partial_rotary_factor") ? r : f;
  constexpr const char* kField = "partial_rotary_factor";
  const double share = given.number(kField, 0, 1, missing);
  if (!partial && share != 1)
    given.fail(kField, "below 1 is not served for this model_type", ErrorCode::kUnsupported);
  f.adopt(r);
  return share;
}

}  // namespace weft::worker
