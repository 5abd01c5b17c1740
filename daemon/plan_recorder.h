// Writes every plan to a file in the state folder while it is on, so that an incident can be looked at
// (weftctl plans).
//
// The file is a sequence of wire::StepPlan, each after its length as a protobuf varint. Loop thread only.
#pragma once

#include <cstdio>
#include <memory>
#include <string>

#include "proto/vocab/result.h"

namespace weft::daemon {

class PlanRecorder {
 public:
  explicit PlanRecorder(std::string folder) : folder_(std::move(folder)) {}

  // Opens a new file; its path. Harmless when on.
  Result<std::string> start();
  void stop() { file_.reset(); }
  bool on() const { return file_ != nullptr; }
  const std::string& path() const { return path_; }
  // kIo ends the recording.
  Result<void> write(const std::string& plan);

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::string folder_;
  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace weft::daemon
