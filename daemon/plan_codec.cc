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
  to->set_index_copied(from.index_copied);
  to->set_host_blocks(static_cast<uint32_t>(from.host_blocks));
  to->set_replicate_query(from.replicate_query);
  to->set_tree_partials(from.tree_partials);
  to->set_pass_query(from.pass_query);
  to->set_copy_context(from.copy_context);
  to->set_expand_context(from.expand_context);
  to->set_no_write(from.no_write);
  to->set_prefill(from.prefill);
  to->mutable_tokens()->Add(from.tokens.begin(), from.tokens.end());
  if (from.has_input_ref) {
    to->mutable_input()->set_step(number(from.input_ref.step));
    to->mutable_input()->set_sample_index(from.input_ref.sample_index);
  }
  to->set_sample_rows(static_cast<uint32_t>(from.sample_rows));
  to->set_sample_index(from.sample_index);
  to->set_sampler_rank(static_cast<uint32_t>(from.sampler_rank));
  encode_sampling(from.sampling, to->mutable_sampling());
  to->set_digest(from.digest);
  to->set_draft_tokens(static_cast<uint32_t>(from.draft_tokens));
  to->mutable_next_tokens()->Add(from.next_tokens.begin(), from.next_tokens.end());
}

void encode_host_copy(const controlplane::HostCopy& from, wire::HostCopy* to) {
  to->set_stream(static_cast<uint32_t>(from.stream));
  to->set_rank(static_cast<uint32_t>(from.rank));
  to->set_page(number(from.page));
  to->set_host_page(number(from.host_page));
  to->set_request(number(from.request));
}

}  // namespace

wire::StepPlan encode_plan(const controlplane::Plan& plan) {
  wire::StepPlan message;
  message.set_step(number(plan.step));
  message.set_ranks(plan.ranks);
  for (const controlplane::PageCopy& from : plan.copies) {
    wire::PageCopy* to = message.add_copies();
    to->set_stream(static_cast<uint32_t>(from.stream));
    to->set_from_rank(static_cast<uint32_t>(from.from_rank));
    to->set_from_page(number(from.from_page));
    to->set_to_rank(static_cast<uint32_t>(from.to_rank));
    to->set_to_page(number(from.to_page));
    to->set_request(number(from.request));
  }
  for (const controlplane::HostCopy& from : plan.spills) encode_host_copy(from, message.add_spills());
  for (const controlplane::HostCopy& from : plan.loads) encode_host_copy(from, message.add_loads());
  for (const controlplane::Span& span : plan.spans) encode_span(span, message.add_spans());
  message.mutable_padded()->set_prefill(plan.padded.prefill);
  message.mutable_padded()->set_decode(plan.padded.decode);
  message.mutable_padded()->set_head(plan.padded.head);
  return message;
}

std::string plan_bytes(const controlplane::Plan& plan, Duration longest_wait) {
  wire::StepPlan message = encode_plan(plan);
  message.set_wait_ms(static_cast<uint64_t>(longest_wait / std::chrono::milliseconds(1)));
  // Without map fields a message serialises the same way every time; and it is serialised once, then kept.
  return message.SerializeAsString();
}

}  // namespace weft::daemon
