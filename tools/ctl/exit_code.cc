#include "tools/ctl/exit_code.h"

#include "tools/client/client.h"

namespace weft::ctl {
namespace {

constexpr ExitCodeHelp kExitCodes[] = {
    {kExitOk, "done"},
    {kExitFailed, "failed: anything not named below; the error says what"},
    {kExitUsage, "usage: the command line or the request can never be right as written"},
    {kExitNotFound, "not found: no such request, model or file"},
    {kExitRefused, "refused by the present state (not ready, no room): may work later"},
    {kExitTimeout, "timeout: nothing came within --timeout, or it was not done by its --deadline"},
    {kExitUnreachable, "the daemon is unreachable"},
    {kExitNotPermitted, "not permitted: the daemon belongs to another user"},
    {kExitInterrupted, "interrupted with Ctrl-C"},
};

}  // namespace

std::span<const ExitCodeHelp> exit_codes() { return kExitCodes; }

ExitCode exit_code_of(const Error& error) {
  if (client::is_interrupt(error)) return kExitInterrupted;
  switch (error.code) {
    case ErrorCode::kOk:
      return kExitOk;
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kTooLarge:
      return kExitUsage;
    case ErrorCode::kNotFound:
      return kExitNotFound;
    case ErrorCode::kResourceExhausted:
    case ErrorCode::kFailedPrecondition:
      return kExitRefused;
    case ErrorCode::kUnavailable:
      return kExitUnreachable;
    case ErrorCode::kDeadlineExceeded:
      return kExitTimeout;
    case ErrorCode::kNotPermitted:
      return kExitNotPermitted;
    case ErrorCode::kCancelled:
    case ErrorCode::kBadCheckpoint:
    case ErrorCode::kIo:
    case ErrorCode::kBadMessage:
    case ErrorCode::kUnsupported:
    case ErrorCode::kNumerical:
    case ErrorCode::kInternal:
      return kExitFailed;
  }
  return kExitFailed;
}

}  // namespace weft::ctl
