#include "daemon/stream.h"

namespace weft::daemon {

ClientEndpoint::Sent Stream::push(std::string frame, Frame kind, Time now) {
  pending_.push_back({std::move(frame), kind == Frame::kToken});
  last_pushed_ = last_pushed_ || kind == Frame::kLast;
  return flush(now);
}

ClientEndpoint::Sent Stream::flush(Time now) {
  while (!pending_.empty()) {
    const Pending& next = pending_.front();
    const bool out_of_credit = next.token && limited_ && credit_ == 0;
    const auto sent = out_of_credit ? ClientEndpoint::Sent::kFull : transport_(next.frame);
    if (sent == ClientEndpoint::Sent::kGone) return sent;
    if (sent == ClientEndpoint::Sent::kFull) {
      if (!blocked_since_) blocked_since_ = now;
      return sent;
    }
    if (next.token && limited_) --credit_;
    pending_.pop_front();
    blocked_since_.reset();
  }
  blocked_since_.reset();
  return ClientEndpoint::Sent::kSent;
}

void Stream::grant(uint32_t tokens) { credit_ += tokens; }

}  // namespace weft::daemon
