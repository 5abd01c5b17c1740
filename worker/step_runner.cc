#include "worker/step_runner.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>

#include "kernels/attention.h"
#include "worker/model/attention.h"
#include "worker/model/cache_view.h"
#include "worker/model/draft.h"
#include "worker/model/inputs.h"

namespace weft::worker {

size_t outbox_bytes(const ModelConfig& config, DType query_dtype, int rank_count, int64_t max_step_rows) {
  int64_t nodes_max = 1, slice_max = 0;
  for (int width = 2; width <= rank_count; ++width) {  // one rank alone passes nothing
    for (int place = 0; place < width; ++place) {
      nodes_max = std::max(nodes_max, std::ssize(kv::tree_nodes(kv::owned_segments(place, width))));
      slice_max = std::max(slice_max, vocabulary_slice(config.vocabulary, place, width).size());
    }
  }
  const int64_t rows = max_step_rows;
  const int64_t entries =
      rows * config.heads * config.key_width() * static_cast<int64_t>(dtype_bytes(query_dtype)) +
      rows * (16 + 8 * config.index_topk) + 192;  // offers, on cache lines
  const int64_t partials = rows * config.heads * kernels::partial_words(config.value_width()) * 4;
  const int64_t attention_sums = (nodes_max + 1) * rows * config.hidden * 4;
  const int64_t feed_forward_sums = nodes_max * rows * config.hidden * 4;
  const int64_t head = kHeadBatch * std::max(config.hidden, slice_max) * 4;
  return static_cast<size_t>(
      round_up(std::max({entries, partials, attention_sums, feed_forward_sums, head}), int64_t{4096}));
}

namespace {

using RequestBytes = std::map<uint64_t, kv::CrossedBytes>;

wire::SpanMeter* add_meter(wire::StepResult& result, uint32_t span, uint64_t request,
                           const kv::CrossedBytes& crossed) {
  wire::SpanMeter* meter = result.add_meters();
  meter->set_span(span);
  meter->set_request(request);
  for (int64_t value : crossed.by_kind) meter->add_crossed(static_cast<uint64_t>(value));
  return meter;
}

// A step that is left in the middle leaves its copies too.
struct MoverGuard {
  PageMover* mover;
  ~MoverGuard() {
    if (mover != nullptr) mover->stop();
  }
};

}  // namespace

struct StepRunner::State {
  explicit State(RunnerSetup setup)
      : step(std::move(setup)),
        attention(step),
        feed_forward(step),
        head(step),
        draft(step, attention, feed_forward, head) {}

  std::optional<std::pair<Epoch, Time>> last_done;
  StepState step;
  AttentionPhase attention;
  FeedForwardPhase feed_forward;
  Head head;
  DraftPhase draft;

  Result<void> copy_pages(const wire::StepPlan& plan, wire::StepResult& result);
  Result<void> run_rows(const wire::StepPlan& plan, wire::StepResult& result);
  std::vector<HostMove> host_moves(const google::protobuf::RepeatedPtrField<wire::HostCopy>& copies,
                                   RequestBytes& bytes) const;
};

// Who makes a copy: the first of these ranks that takes part in the step.
int copier(std::initializer_list<uint32_t> ranks, const kv::Topology& topology) {
  for (const uint32_t rank : ranks) {
    if (topology.contains(static_cast<int>(rank))) return static_cast<int>(rank);
  }
  return topology.rank(0);
}

std::vector<HostMove> StepRunner::State::host_moves(
    const google::protobuf::RepeatedPtrField<wire::HostCopy>& copies, RequestBytes& bytes) const {
  std::vector<HostMove> moves;
  for (const wire::HostCopy& copy : copies) {
    if (copier({copy.rank()}, step.topology) != step.setup.rank) continue;
    const auto stream = static_cast<kv::Stream>(copy.stream());
    moves.push_back({stream, PageId{copy.page()}, PageId{copy.host_page()}, static_cast<int>(copy.rank())});
    bytes[copy.request()][kv::CrossKind::kHost] += step.geometry.page_bytes(stream);
  }
  return moves;
}

// This rank's share of the plan's copies, counted by request: those between ranks are made here, those to and
// from the host pool begin.
Result<void> StepRunner::State::copy_pages(const wire::StepPlan& plan, wire::StepResult& result) {
  RequestBytes bytes;
  if (step.mover != nullptr) {
    auto loads = host_moves(plan.loads(), bytes);
    step.mover->start(std::move(loads), host_moves(plan.spills(), bytes),
                      [this] { return step.setup.control->aborted(step.epoch); });
  } else if (plan.loads_size() + plan.spills_size() > 0) {
    return error(ErrorCode::kInvalidArgument, "copies to or from a host pool that there is not", "plan");
  }
  std::vector<kv::CopyPiece> pieces;
  for (const wire::PageCopy& copy : plan.copies()) {
    if (copier({copy.to_rank(), copy.from_rank()}, step.topology) != step.setup.rank) continue;
    const auto stream = static_cast<kv::Stream>(copy.stream());
    const int64_t page_bytes = step.geometry.page_bytes(stream);
    pieces.push_back({step.setup.pools[copy.to_rank()].page(stream, PageId{copy.to_page()}),
                      step.setup.pools[copy.from_rank()].page(stream, PageId{copy.from_page()}),
                      static_cast<size_t>(page_bytes)});
    bytes[copy.request()][kv::CrossKind::kRegroup] += page_bytes;
  }
  kv::copy_pieces(pieces);
  for (const auto& [request, crossed] : bytes) add_meter(result, 0xffffffffu, request, crossed);
  // A plan without rows has no later exchange point behind which its loads are there for all.
  if (plan.spans_size() == 0 && step.mover != nullptr) TRY_VOID(step.mover->finish(step.exchange.deadline()));
  if (step.layout.passes_copies()) TRY_VOID(step.exchange.pass(ExchangePoint::kCopies, -1));
  return {};
}

// The forward pass and what it draws.
Result<void> StepRunner::State::run_rows(const wire::StepPlan& plan, wire::StepResult& result) {
  kv::RankState& progress = step.setup.control->rank_state(step.setup.rank);
  TRY_VOID(make_views(step, plan));
  TRY_VOID(take_tokens(step, plan));
  turn_angles(step);
  scratch(step.x, step.home_count() * step.config.hidden);
  for (int64_t i = 0; i < step.home_count(); ++i) {
    embed(step, step.tokens[static_cast<size_t>(i)], step.x.data() + i * step.config.hidden);
  }
  attention.begin_step();
  step.ended(Stage::kInputs);
  for (int64_t layer = 0; layer < step.config.main_layers(); ++layer) {
    progress.layer.store(static_cast<uint32_t>(layer), std::memory_order_relaxed);
    progress.heartbeat.fetch_add(1, std::memory_order_relaxed);
    TRY_VOID(attention.run(layer));
    TRY_VOID(feed_forward.run(layer));
    step.ended(Stage::kFeedForward);
  }
  TRY_VOID(head.run(plan, result));
  if (step.config.draft_layers > 0) {
    progress.layer.store(static_cast<uint32_t>(step.config.main_layers()), std::memory_order_relaxed);
    TRY_VOID(draft.run(plan, result));
  }
  step.ended(Stage::kHead);
  return {};
}

StepRunner::StepRunner(RunnerSetup setup) : state_(std::make_unique<State>(std::move(setup))) {}
StepRunner::~StepRunner() = default;

Result<wire::StepResult> StepRunner::run(const wire::StepPlan& plan, Epoch epoch) {
  const Time begin = monotonic_now();
  StepState& step = state_->step;
  const uint32_t passed_before = step.exchange.passed();
  const Duration waited_before = step.exchange.waited();
  if (plan.ranks() != 0 && plan.ranks() != step.topology.ranks()) {
    return error(ErrorCode::kInvalidArgument,
                 "ranks " + kv::Topology(plan.ranks()).text() + " take part, but in this epoch " +
                     step.topology.text() + " do",
                 "plan");
  }
  TRY(step.layout, StepLayout::make(plan, step.config.index_topk, step.rank_count));
  if (step.layout.row_count() > step.setup.max_step_rows) {
    return error(ErrorCode::kTooLarge,
                 std::to_string(step.layout.row_count()) + " rows; the limit is " +
                     std::to_string(step.setup.max_step_rows),
                 "plan");
  }
  step.epoch = epoch;
  step.exchange.set_deadline(plan.wait_ms() == 0 ? Exchange::kDefaultDeadline
                                                 : std::chrono::milliseconds(plan.wait_ms()));
  step.crossed.assign(step.layout.spans().size(), {});
  step.hot_counts.assign(step.layout.spans().size(), {});

  wire::StepResult result;
  result.set_step(plan.step());
  result.set_rank(static_cast<uint32_t>(step.setup.rank));
  if (state_->last_done && state_->last_done->first == epoch)
    result.set_gap_ns(static_cast<uint64_t>((begin - state_->last_done->second).count()));
  kv::RankState& progress = step.setup.control->rank_state(step.setup.rank);
  progress.step_low.store(static_cast<uint32_t>(plan.step()), std::memory_order_relaxed);
  const MoverGuard guard{step.mover.get()};
  const int64_t exchanges = step.layout.exchange_count(step.config);
  TRY_VOID(state_->copy_pages(plan, result));
  if (step.layout.row_count() > 0) TRY_VOID(state_->run_rows(plan, result));
  if (step.mover != nullptr) TRY_VOID(step.mover->finish(step.exchange.deadline()));
  for (size_t span = 0; span < step.crossed.size(); ++span) {
    const StepState::HotCount& hot = step.hot_counts[span];
    if (step.crossed[span] == kv::CrossedBytes{} && hot.hits == 0) continue;
    wire::SpanMeter* meter = add_meter(result, static_cast<uint32_t>(span),
                                       plan.spans(static_cast<int>(span)).request(), step.crossed[span]);
    meter->set_hot_hits(static_cast<uint64_t>(hot.hits));
    meter->set_hot_misses(static_cast<uint64_t>(hot.misses));
  }
  result.set_exchanges(step.exchange.passed() - passed_before);
  CHECK_EQ(static_cast<int64_t>(result.exchanges()), exchanges);
  const Duration waited = step.exchange.waited() - waited_before;
  result.set_wait_ns(static_cast<uint64_t>(waited.count()));
  const Time end = monotonic_now();
  result.set_compute_ns(static_cast<uint64_t>((end - begin - waited).count()));
  state_->last_done = {epoch, end};
  progress.step_low.store(0, std::memory_order_relaxed);
  return result;
}

}  // namespace weft::worker
