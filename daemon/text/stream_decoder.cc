#include "daemon/text/stream_decoder.h"

#include "proto/utf8.h"

namespace weft::daemon {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

}  // namespace

std::string StreamDecoder::push(std::string_view bytes) {
  held_.append(bytes);
  std::string out;
  std::string_view rest = held_;
  while (!rest.empty()) {
    const Utf8Step step = utf8_step(rest);
    if (step.truncated) break;
    out.append(step.valid ? rest.substr(0, step.length) : kReplacement);
    rest.remove_prefix(step.length);
  }
  held_.erase(0, held_.size() - rest.size());
  return out;
}

std::string StreamDecoder::finish() {
  // What is held is one truncated code point: one replacement.
  const bool incomplete = !held_.empty();
  held_.clear();
  return incomplete ? std::string(kReplacement) : std::string();
}

}  // namespace weft::daemon
