// The functions behind the commands, one per row of the table in command.cc.
//
// Each sends what the arguments ask for, writes the answer to context.out in the wanted form, and returns the
// error that main turns into a message and an exit code.
#pragma once

#include "proto/control.pb.h"
#include "proto/vocab/clock.h"
#include "proto/vocab/result.h"
#include "tools/ctl/context.h"

namespace weft::ctl {

Result<void> run_status(Context& context);
Result<void> run_generate(Context& context);
Result<void> run_requests(Context& context);
Result<void> run_explain(Context& context);
Result<void> run_regroup(Context& context);
Result<void> run_cancel(Context& context);
Result<void> run_pin(Context& context);
Result<void> run_unpin(Context& context);
Result<void> run_pins(Context& context);
Result<void> run_workers(Context& context);
Result<void> run_drain(Context& context);
Result<void> run_history(Context& context);
Result<void> run_version(Context& context);
Result<void> run_record(Context& context);
Result<void> run_stop(Context& context);
Result<void> run_help(Context& context);

// Shared by them.
std::string control_path(const Arguments& arguments);
Duration timeout_of(const Arguments& arguments, Duration otherwise);
Result<wire::ControlReply> ask(const Context& context, wire::ControlRequest request);
// {"weftctl": …, "weftd": `daemon`}
Json versions_json(Json daemon);
// A text that is all there is to say: as it is, or as a document.
void put_help(Context& context, const std::string& text);

inline constexpr Duration kControlTimeout = std::chrono::seconds(10);

}  // namespace weft::ctl
