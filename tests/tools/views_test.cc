// What weftctl shows people: replies as tables, widths, times and rates.
#include "tools/ctl/views.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace weft::ctl {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

void add_decode(wire::Trace& trace, const char* decode, const char* index, uint64_t tokens, uint64_t ms) {
  wire::DecodeTrace& line = *trace.add_decodes();
  line.set_decode(decode);
  line.set_index(index);
  line.set_steps(tokens);
  line.set_tokens(tokens);
  line.set_time_ns(ms * 1'000'000);
  line.mutable_crossed()->set_rows(tokens << 10);
  trace.set_decode_steps(trace.decode_steps() + tokens);
}

wire::ExplainReply some_explain(const char* state) {
  wire::ExplainReply reply;
  auto& status = *reply.mutable_status();
  status.set_request(7);
  status.set_state(state);
  status.set_prompt_tokens(1000);
  status.set_cached_tokens(200);
  status.set_computed_tokens(1040);
  status.set_completion_tokens(41);
  status.set_max_tokens(41);
  status.set_prefill("zigzag");
  status.set_decode("dcp(4)");
  status.set_index("split");
  auto& trace = *reply.mutable_trace();
  trace.set_prefill("zigzag");
  trace.add_prefill_ran("none");
  trace.set_prefill_steps(1);
  trace.set_prefill_ns(1'000'000'000);
  trace.set_switch_gap_ns(12'000);
  for (const char* decode : {"tp", "dcp(4)"}) {
    auto& cost = *reply.add_costs();
    cost.set_decode(decode);
    cost.set_index("split");
    cost.set_change_bytes(3 << 20);
  }
  reply.mutable_costs(0)->set_step_ns(25'000'000);
  return reply;
}

TEST(Explain, OneLineForEachGroupingItDecodedUnder) {
  wire::ExplainReply reply = some_explain("decode");
  auto& trace = *reply.mutable_trace();
  add_decode(trace, "tp", "copied", 10, 250);
  add_decode(trace, "dcp(4)", "split", 30, 500);
  trace.set_regroups(1);
  trace.set_regroup_bytes(45 << 20);
  reply.mutable_costs(1)->set_present(true);
  const std::string view = explain_view(reply, {});
  EXPECT_THAT(view, HasSubstr("phase    grouping             tokens  steps    time  tokens/s  crossed\n"
                              "prefill  none                    800      1  1.00 s       800  nothing\n"
                              "decode   tp                       10     10  250 ms      40.0  rows 10.0 KiB\n"
                              "decode   dcp(4), index split      30     30  500 ms      60.0  rows 30.0 KiB\n"
                              "The first token of an answer comes from prefill"));
  EXPECT_THAT(view, HasSubstr("regrouped  once, 45.0 MiB moved\n"));
  EXPECT_THAT(view, HasSubstr("asked for  prefill zigzag, decode dcp(4), index split"));
  EXPECT_THAT(view, HasSubstr("0 B moved between the last prefill and the first decode step, 12 µs apart"));
  EXPECT_THAT(view, HasSubstr("Groupings it could have (* now)"));
  EXPECT_THAT(view, HasSubstr("a change moves"));
  EXPECT_THAT(view, HasSubstr("25 ms")) << "the step time of a grouping that it has left";
  trace.set_regroups(2);
  trace.set_change_waits(true);
  EXPECT_THAT(explain_view(reply, {}),
              HasSubstr("2 times, 45.0 MiB moved; the last change asked for comes with its next step"));
}

TEST(Explain, WhatOnlyMakesSenseWhileItRunsIsLeftOut) {
  wire::ExplainReply reply = some_explain("length");
  reply.mutable_trace()->set_change_waits(true);
  const std::string ended = explain_view(reply, {});
  EXPECT_THAT(ended, HasSubstr("finished (length)"));
  EXPECT_THAT(ended, HasSubstr("Groupings it could have had\n"));
  for (const char* text : {"a change moves", "*", "3.0 MiB", "switch", "decode   ", "The first token"}) {
    EXPECT_THAT(ended, Not(HasSubstr(text)));
  }
  EXPECT_THAT(ended, HasSubstr("regrouped  never; it ended before the last change that was asked for"));
  EXPECT_THAT(ended, HasSubstr("25 ms"));
}

// A cancelled request has not computed all of its prompt.
TEST(Stats, CountWhatWasComputed) {
  wire::Finished finished;
  finished.set_request(7);
  finished.set_reason("cancelled");
  finished.mutable_usage()->set_prompt_tokens(30000);
  finished.mutable_usage()->set_computed_tokens(2000);
  finished.mutable_trace()->set_prefill("zigzag");
  finished.mutable_trace()->set_prefill_ns(2'000'000'000);
  const std::string cancelled = stats_view(finished, {});
  EXPECT_THAT(cancelled,
              HasSubstr("request 7, cancelled: 30,000 prompt tokens, 0 from the prefix cache, 0 gen"));
  EXPECT_THAT(cancelled, HasSubstr("prefill  zigzag     2,000      0  2.00 s     1,000"));
  EXPECT_THAT(cancelled, Not(HasSubstr("decode")));
  add_decode(*finished.mutable_trace(), "tp", "copied", 1, 500);
  add_decode(*finished.mutable_trace(), "dp", "copied", 4, 500);
  const std::string two = stats_view(finished, {});
  EXPECT_THAT(two, HasSubstr("decode   tp"));
  EXPECT_THAT(two, HasSubstr("decode   dp"));
}

TEST(Table, LinesUpAndGivesUpWidthOnlyWhereItMay) {
  Table table({{"id", true}, {"state"}, {"why", false, true}});
  table.add({"7", "ready", "because of \u00e9\u00e9\u00e9 and more words than fit"});
  table.add({"1234", "down", "-"});
  const std::string wide = table.text({});
  EXPECT_EQ(wide,
            "  id  state  why\n"
            "   7  ready  because of \u00e9\u00e9\u00e9 and more words than fit\n"
            "1234  down   -\n");
  Terminal narrow;
  narrow.width = 28;
  EXPECT_EQ(table.text(narrow),
            "  id  state  why\n"
            "   7  ready  because of \u00e9\u00e9\u00e9\u2026\n"
            "1234  down   -\n");
  Terminal colored;
  colored.colors = true;
  EXPECT_THAT(table.text(colored), HasSubstr("\033[1mstate\033[0m"));
}

TEST(Text, TimesAndRates) {
  EXPECT_EQ(human_time(0), "0 \u00b5s");
  EXPECT_EQ(human_time(340'000'000), "340 ms");
  EXPECT_EQ(human_time(1'254'000'000), "1.25 s");
  EXPECT_EQ(human_time(75'000'000'000), "1 min 15 s");
  EXPECT_EQ(human_time(7'500'000'000'000), "2 h 05 min");
  EXPECT_EQ(human_rate(0, 5), "-");
  EXPECT_EQ(human_rate(5, 0), "-");
  EXPECT_EQ(human_rate(5, 1'000'000'000), "5.0");
  EXPECT_EQ(human_rate(2612, 1'000'000'000), "2,612");
}

// The model's line says how weights are held: quantised ones keep their own form, the rest has the dtype.
TEST(StatusView, SaysHowWeightsAreHeld) {
  wire::StatusReply status;
  status.set_model("m");
  status.set_weight_dtype("bf16");
  status.set_cache_dtype("f32");
  EXPECT_NE(status_view(status, {}).find("m, weights bf16, cache f32"), std::string::npos);
  status.set_weight_format("fp8");
  EXPECT_NE(status_view(status, {}).find("m, weights fp8 and bf16, cache f32"), std::string::npos);
}

// Where nobody had to give way, the line says what would be done.
TEST(StatusView, SaysWhatWasDoneForRoom) {
  wire::StatusReply status;
  EXPECT_THAT(status_view(status, {}), Not(HasSubstr("on pressure")));
  wire::PressureStatus& pressure = *status.mutable_pressure();
  pressure.set_on_pressure("preempt");
  EXPECT_THAT(status_view(status, {}), HasSubstr("on pressure  preempt\n"));
  pressure.set_thinned(1200);
  pressure.set_thinned_now(3);
  pressure.set_thickened(7);
  pressure.set_preempted(2);
  pressure.set_replayed_rows(4096);
  EXPECT_THAT(status_view(status, {}),
              HasSubstr("preempt, 1,200 thinned (3 now, 7 got their copies back), 2 preempted, 4,096 rows "
                        "computed again\n"));
}

TEST(RequestsView, AThinnedOneShowsWhatItRunsUnder) {
  wire::RequestsReply reply;
  for (const bool thinned : {false, true}) {
    wire::RequestStatus& request = *reply.add_requests();
    request.set_request(thinned ? 2 : 1);
    request.set_state("decode");
    request.set_prefill("zigzag");
    request.set_decode("tp");
    request.set_index("copied");
    request.set_placement("dcp(4)");
    request.set_thinned(thinned);
  }
  const std::string view = requests_view(reply, {});
  EXPECT_THAT(view, HasSubstr("zigzag   tp               copied"));
  EXPECT_THAT(view, HasSubstr("zigzag   tp (now dcp(4))  copied"));
}

}  // namespace
}  // namespace weft::ctl
