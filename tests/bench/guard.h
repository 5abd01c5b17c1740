// Runs a program's work in a child process and cleans up after it, however it ends.
//
// The child gets a temporary folder. When it has ended (returned, failed a CHECK, was killed or interrupted)
// every process that came from it is waited for, killed if it stays, and the folder is removed. If the guard
// itself is killed, the child dies with it. Call it before any thread is started; one guard per process.
#pragma once

#include <functional>
#include <string>

namespace weft::bench {

// The exit code for main: the child's own, or 128 + signal; 1 if processes had to be killed.
int run_guarded(const std::string& name, const std::function<int(const std::string& folder)>& work);

}  // namespace weft::bench
