#include "daemon/plan_recorder.h"

#include <google/protobuf/io/coded_stream.h>

#include <cerrno>
#include <chrono>
#include <cstring>

namespace weft::daemon {

Result<std::string> PlanRecorder::start() {
  if (file_) return path_;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  path_ = folder_ + "/plans-" +
          std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()) + ".bin";
  file_.reset(std::fopen(path_.c_str(), "wbe"));
  if (!file_) return error(ErrorCode::kIo, "cannot write " + path_ + ": " + std::strerror(errno));
  return path_;
}

Result<void> PlanRecorder::write(const std::string& plan) {
  if (!file_) return {};
  uint8_t length[10];
  const uint8_t* end = google::protobuf::io::CodedOutputStream::WriteVarint32ToArray(
      static_cast<uint32_t>(plan.size()), length);
  const auto prefix = static_cast<size_t>(end - length);
  // Flushed each time: the last plan before a crash is the one that matters.
  if (std::fwrite(length, 1, prefix, file_.get()) == prefix &&
      std::fwrite(plan.data(), 1, plan.size(), file_.get()) == plan.size() && std::fflush(file_.get()) == 0) {
    return {};
  }
  file_.reset();
  return error(ErrorCode::kIo, "cannot write " + path_ + ": " + std::strerror(errno));
}

}  // namespace weft::daemon
