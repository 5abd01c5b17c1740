// weftctl's exit codes. Stable: scripts depend on them.
#pragma once

#include <span>

#include "proto/vocab/result.h"

namespace weft::ctl {

enum ExitCode : int {
  kExitOk = 0,
  kExitFailed = 1,
  kExitUsage = 2,
  kExitNotFound = 4,
  kExitRefused = 5,
  kExitTimeout = 6,
  kExitUnreachable = 69,
  kExitNotPermitted = 77,
  kExitInterrupted = 130,
};

struct ExitCodeHelp {
  ExitCode code;
  const char* meaning;
};

// Every code and what it means, for the help and the reference page.
std::span<const ExitCodeHelp> exit_codes();
ExitCode exit_code_of(const Error& error);

}  // namespace weft::ctl
