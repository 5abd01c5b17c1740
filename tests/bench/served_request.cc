#include "tests/bench/served_request.h"

#include "proto/convert.h"
#include "tools/demo/source_text.h"

namespace weft::bench {
namespace {

constexpr Duration kRequest = std::chrono::seconds(600);

}  // namespace

std::vector<uint32_t> made_prompt(uint64_t seed, int64_t tokens) {
  const std::string text = demo::made_text(seed, static_cast<size_t>(tokens));
  std::vector<uint32_t> out;
  for (int64_t i = 0; i < tokens; ++i) out.push_back(static_cast<uint8_t>(text[static_cast<size_t>(i)]));
  return out;
}

wire::GenerateRequest cold_request(const std::vector<uint32_t>& prompt, int64_t tokens) {
  wire::GenerateRequest request;
  request.mutable_tokens()->mutable_ids()->Add(prompt.begin(), prompt.end());
  request.set_max_tokens(static_cast<uint32_t>(tokens));
  request.set_ignore_eos(true);
  request.set_no_prefix_cache(true);
  request.set_speculative("off");
  return request;
}

Result<Served> serve(DaemonProcess& daemon, const wire::GenerateRequest& request) {
  Served served;
  client::StreamHandlers handlers;
  handlers.token = [&](const wire::TokenEvent& token) { served.tokens.push_back(token.token()); };
  auto finished = daemon.client().generate(request, handlers, kRequest);
  if (!finished) return daemon.explain(finished.error());
  if (finished->reason() == "error") return daemon.explain(from_wire(finished->error()));
  served.trace = finished->trace();
  const auto as_asked = [](const std::string& asked, const std::string& got) {
    return asked.empty() || asked == got;
  };
  const bool well =
      finished->usage().prompt_tokens() == static_cast<uint64_t>(request.tokens().ids_size()) &&
      finished->usage().cached_tokens() == 0 && as_asked(request.prefill(), served.trace.prefill()) &&
      as_asked(request.decode(), served.trace.decode()) && as_asked(request.index(), served.trace.index()) &&
      served.tokens.size() == request.max_tokens();
  if (well) return served;
  return daemon.explain(error(ErrorCode::kInternal, "not served as asked: " + finished->ShortDebugString()));
}

Result<void> must_agree(const Served& a, const Served& b, const std::string& what) {
  if (a.tokens == b.tokens) return {};
  return error(ErrorCode::kInternal, what + " gave other tokens than the first configuration");
}

}  // namespace weft::bench
