#include "daemon/plan_codec.h"

namespace weft::daemon {
namespace {

void encode_sampling(const controlplane::SamplingParams& from, wire::Sampling* to) {
  to->set_temperature(from.temperature);
  to->set_top_k(from.top_k);
  to->set_top_p(from.top_p);
  to->set_seed(from.seed);
}

void encode_span(const controlplane::Span& from, wire::Span* to) {
  to->set_request(number(from.request));
  to->set_table(number(from.table));
  to->set_table_version(from.table_version);
  to->set_start(static_cast<uint64_t>(from.start));
  to->set_rows(static_cast<uint32_t>(from.rows));
  to->set_split(static_cast<uint32_t>(from.split));
  to->set_group_base(static_cast<uint32_t>(from.grouping.base));
  to->set_group_width(static_cast<uint32_t>(from.grouping.width));
  to->set_group_c(static_cast<uint32_t>(from.grouping.c));
  to->set_origin(static_cast<uint32_t>(from.origin));
  to->set_index_c(static_cast<uint32_t>(from.index_c));
  to->set_no_write(from.no_write);
  to->set_prefill(from.prefill);
  to->mutable_tokens()->Add(from.tokens.begin(), from.tokens.end());
  if (from.has_input_ref) {
    to->mutable_input()->set_step(number(from.input_ref.step));
    to->mutable_input()->set_sample_index(from.input_ref.sample_index);
  }
  to->set_sample(from.sample);
  to->set_sample_index(from.sample_index);
  to->set_sampler_rank(static_cast<uint32_t>(from.sampler_rank));
  if (from.sample) encode_sampling(from.sampling, to->mutable_sampling());
  to->set_digest(from.digest);
}

Error out_of_range(const char* field) {
  return error(ErrorCode::kBadMessage, "value out of range", std::string("StepPlan.") + field);
}

Result<controlplane::Span> decode_span(const wire::Span& from) {
  controlplane::Span to;
  if (from.split() > 2) return out_of_range("span.split");
  if (from.group_width() < 1 || from.group_base() + from.group_width() > kMaxRanks)
    return out_of_range("span.group");
  if (from.group_c() < 1 || from.group_width() % from.group_c() != 0) return out_of_range("span.group_c");
  to.request = RequestId{from.request()};
  to.table = TableId{from.table()};
  to.table_version = from.table_version();
  to.start = static_cast<int64_t>(from.start());
  to.rows = from.rows();
  to.split = static_cast<kv::Split>(from.split());
  to.grouping = {static_cast<int>(from.group_base()), static_cast<int>(from.group_width()),
                 static_cast<int>(from.group_c())};
  to.origin = static_cast<int>(from.origin());
  to.index_c = static_cast<int>(from.index_c());
  to.no_write = from.no_write();
  to.prefill = from.prefill();
  to.tokens.assign(from.tokens().begin(), from.tokens().end());
  to.has_input_ref = from.has_input();
  if (from.has_input()) to.input_ref = {StepId{from.input().step()}, from.input().sample_index()};
  to.sample = from.sample();
  to.sample_index = from.sample_index();
  to.sampler_rank = static_cast<int>(from.sampler_rank());
  if (from.has_sampling()) {
    to.sampling = {from.sampling().temperature(), from.sampling().top_k(), from.sampling().top_p(),
                   from.sampling().seed()};
  }
  to.digest = from.digest();
  return to;
}

}  // namespace

wire::StepPlan encode_plan(const controlplane::Plan& plan) {
  wire::StepPlan message;
  message.set_step(number(plan.step));
  for (const controlplane::PageCopy& from : plan.copies) {
    wire::PageCopy* to = message.add_copies();
    to->set_stream(static_cast<uint32_t>(from.stream));
    to->set_from_rank(static_cast<uint32_t>(from.from_rank));
    to->set_from_page(number(from.from_page));
    to->set_to_rank(static_cast<uint32_t>(from.to_rank));
    to->set_to_page(number(from.to_page));
    to->set_request(number(from.request));
  }
  for (const controlplane::Span& span : plan.spans) encode_span(span, message.add_spans());
  message.mutable_padded()->set_prefill(plan.padded.prefill);
  message.mutable_padded()->set_decode(plan.padded.decode);
  message.mutable_padded()->set_head(plan.padded.head);
  return message;
}

Result<controlplane::Plan> decode_plan(const wire::StepPlan& message) {
  controlplane::Plan plan;
  plan.step = StepId{message.step()};
  for (const wire::PageCopy& from : message.copies()) {
    if (from.stream() >= kv::kStreams) return out_of_range("copy.stream");
    if (from.from_rank() >= kMaxRanks || from.to_rank() >= kMaxRanks) return out_of_range("copy.rank");
    plan.copies.push_back({static_cast<kv::Stream>(from.stream()), static_cast<int>(from.from_rank()),
                           PageId{from.from_page()}, static_cast<int>(from.to_rank()), PageId{from.to_page()},
                           RequestId{from.request()}});
  }
  for (const wire::Span& from : message.spans()) {
    TRY(controlplane::Span span, decode_span(from));
    plan.spans.push_back(std::move(span));
  }
  plan.padded = {message.padded().prefill(), message.padded().decode(), message.padded().head()};
  return plan;
}

std::string plan_bytes(const controlplane::Plan& plan, Duration longest_wait) {
  wire::StepPlan message = encode_plan(plan);
  message.set_wait_ms(static_cast<uint64_t>(longest_wait / std::chrono::milliseconds(1)));
  // Without map fields a message serialises the same way every time; and it is serialised once, then kept.
  return message.SerializeAsString();
}

}  // namespace weft::daemon
