#include "tests/support/local_engine.h"

#include <gtest/gtest.h>
#include <sodium.h>

#include "daemon/plan_codec.h"
#include "kv/block_hash.h"

namespace weft::test {
namespace {

LocalOptions worker_options(const EngineOptions& options) {
  LocalOptions out = options.workers;
  out.table_blocks = ceil_div(options.max_context, out.block_tokens);
  out.hot_pages = ceil_div(options.hot_tokens, out.block_tokens);
  return out;
}

controlplane::Limits limits_of(const LocalModel& model, const EngineOptions& options) {
  controlplane::Limits limits;
  limits.rank_count = options.workers.rank_count;
  if (options.start_ranks != 0) limits.topology = kv::Topology(options.start_ranks);
  limits.geometry = model.config.cache_geometry(options.workers.cache, options.workers.block_tokens);
  const int64_t index_pages =
      limits.geometry.page_bytes(kv::Stream::kIndexKeys) > 0 ? options.workers.pool.index_keys : 0;
  limits.pool_pages.assign(static_cast<size_t>(limits.rank_count),
                           {options.workers.pool.entries, index_pages});
  limits.query_bytes =
      model.config.key_width() * static_cast<int64_t>(dtype_bytes(options.workers.cache.query_dtype()));
  limits.value_width = model.config.value_width();
  limits.index_topk = model.config.index_topk;
  limits.window = model.config.window();
  limits.window_layers = model.config.window_layers();
  limits.draft_layers = model.config.draft_layers;
  limits.host_pages = {options.workers.host.entries, index_pages > 0 ? options.workers.host.index_keys : 0};
  limits.hot_tokens = options.hot_tokens;
  limits.host_window = options.host_window;
  limits.max_context = options.max_context;
  limits.table_count = options.workers.table_count;
  limits.max_running = options.workers.table_count / 2;
  limits.max_step_rows = options.workers.max_step_rows;
  limits.max_samples = options.workers.max_step_rows;
  limits.max_chunk_rows = options.max_chunk_rows;
  limits.plans_in_flight = options.plans_in_flight;
  controlplane::validate(limits).value();
  return limits;
}

}  // namespace

LocalEngine::LocalEngine(const LocalModel& model, const EngineOptions& options)
    : options_(options), workers_(model, worker_options(options)), control_plane_(limits_of(model, options)) {
  if (options.start_ranks != 0) workers_.begin_epoch(kv::Topology(options.start_ranks));
}

RequestId LocalEngine::submit(const std::vector<uint32_t>& prompt, const RequestOptions& options) {
  controlplane::RequestArrived event;
  event.request = RequestId{next_request_++};
  event.prompt = prompt;
  event.root = kv::namespace_hash("test", cache_dtype_name(options_.workers.cache.entries), options.salt);
  event.hashes = kv::block_hashes(event.root, prompt, options_.workers.block_tokens);
  event.sampling = options.sampling;
  event.max_tokens = options.max_tokens;
  event.stop_tokens = options.stop_tokens;
  event.grouping = options.grouping;
  event.speculation = options.speculation;
  event.use_prefix_cache = options.use_prefix_cache;
  event.context = options.context;
  event.digest = options.digest;
  events_.push_back(event);
  return event.request;
}

void LocalEngine::regroup(RequestId request, kv::DecodeWish decode, kv::IndexWish index) {
  controlplane::RegroupRequested event;
  event.command = next_command_++;
  event.request = request;
  event.has_decode = event.has_index = true;
  event.wish.decode = decode;
  event.wish.index = index;
  events_.push_back(event);
}

void LocalEngine::change(int rank, bool joins) {
  events_.emplace_back(controlplane::TopologyRequested{next_command_++, rank, joins});
}

void LocalEngine::notice(const controlplane::Notice& notice) {
  if (const auto* token = std::get_if<controlplane::TokenNotice>(&notice)) {
    RequestOutcome& outcome = outcomes_[token->request];
    ASSERT_EQ(token->index, std::ssize(outcome.tokens));
    outcome.tokens.push_back(token->token);
  } else if (const auto* drafts = std::get_if<controlplane::DraftNotice>(&notice)) {
    workers_.forget_logits(number(drafts->request), drafts->start + drafts->accepted + 1,
                           drafts->start + drafts->drafted + 1);
  } else if (const auto* finished = std::get_if<controlplane::FinishedNotice>(&notice)) {
    outcomes_[finished->request].finished = true;
    outcomes_[finished->request].notice = *finished;
  } else if (const auto* regrouped = std::get_if<controlplane::RegroupedNotice>(&notice)) {
    outcomes_[regrouped->request].regroups.push_back(*regrouped);
  } else if (const auto* topology = std::get_if<controlplane::TopologyNotice>(&notice)) {
    if (topology->error.code == ErrorCode::kOk) {
      ASSERT_TRUE(plans_.empty()) << "plans of the old ranks are still in flight";
      workers_.begin_epoch(kv::Topology(topology->ranks));
    }
    changes_.push_back(*topology);
  }
}

void LocalEngine::take_plans() {
  for (;;) {
    controlplane::Decision decision = control_plane_.step(now_, events_);
    events_.clear();
    now_.ns += 1;
    for (const controlplane::Notice& one : decision.notices) notice(one);
    if (!decision.plan) return;
    for (const controlplane::TableWrite& write : decision.plan->table_writes) {
      workers_.control().write_table(write.table, write.first_block, write.pages);
      workers_.control().set_table_version(write.table, write.version);
    }
    for (const controlplane::HostTableWrite& write : decision.plan->host_writes) {
      workers_.control().write_host_table(write.table, write.first_block, write.pages);
      if (write.new_table) workers_.control().write_hot_pages(write.table, write.hot_pages);
    }
    plans_.push_back(daemon::encode_plan(*decision.plan));
  }
}

bool LocalEngine::step() {
  take_plans();
  if (plans_.empty()) return false;
  const wire::StepPlan plan = plans_.front();
  plans_.erase(plans_.begin());
  if (seen) seen(plan);
  const auto results = workers_.run(plan).value();
  ++steps_;
  exchanges_ += results.front().exchanges();
  for (const wire::StepResult& result : results) {
    controlplane::StepAcknowledged event;
    event.step = StepId{result.step()};
    event.rank = static_cast<int>(result.rank());
    for (const wire::SampledToken& sample : result.samples()) {
      event.samples.push_back({RequestId{plan.spans(static_cast<int>(sample.span())).request()},
                               sample.sample_index(), sample.token(), sample.not_finite()});
    }
    for (const wire::SpanMeter& meter : result.meters()) {
      RequestOutcome& outcome = outcomes_[RequestId{meter.request()}];
      outcome.hot_hits += static_cast<int64_t>(meter.hot_hits());
      outcome.hot_misses += static_cast<int64_t>(meter.hot_misses());
      const bool prefill =
          meter.span() != 0xffffffffu && plan.spans(static_cast<int>(meter.span())).prefill();
      for (int kind = 0; kind < meter.crossed_size(); ++kind) {
        (prefill ? outcome.prefill_crossed : outcome.decode_crossed).by_kind[static_cast<size_t>(kind)] +=
            static_cast<int64_t>(meter.crossed(kind));
      }
    }
    events_.emplace_back(std::move(event));
  }
  take_plans();
  return true;
}

void LocalEngine::run_all() {
  while (step()) {
  }
}

std::string LocalEngine::digest(RequestId request, int64_t positions) {
  crypto_hash_sha256_state state;
  crypto_hash_sha256_init(&state);
  for (int64_t position = 0; position < positions; ++position) {
    const auto found = workers_.logits().find({number(request), position});
    CHECK(found != workers_.logits().end(), "no logits of position ", position, " of request ",
          number(request));
    crypto_hash_sha256_update(&state, reinterpret_cast<const unsigned char*>(found->second.data()),
                              found->second.size() * sizeof(float));
  }
  unsigned char out[crypto_hash_sha256_BYTES];
  crypto_hash_sha256_final(&state, out);
  std::string text;
  for (unsigned char byte : out) {
    char hex[3];
    std::snprintf(hex, sizeof hex, "%02x", byte);
    text += hex;
  }
  return text;
}

}  // namespace weft::test
