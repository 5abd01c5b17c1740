#include "daemon/client_service.h"

#include "kv/block_hash.h"
#include "proto/convert.h"
#include "proto/version.h"

namespace weft::daemon {
namespace {

constexpr Duration kRetryBlocked = std::chrono::milliseconds(20);
constexpr Duration kProgressInterval = std::chrono::milliseconds(200);
constexpr size_t kPromptsMax = 4096;  // being tokenized at once

wire::ClientReply reply_to(uint64_t tag) {
  wire::ClientReply reply;
  reply.set_version(kClientProtocol);
  reply.set_tag(tag);
  return reply;
}

}  // namespace

struct ClientService::Prompt {
  ClientIdentity client;
  uint64_t tag = 0;
  const char* field = "text";
  CheckedRequest checked;
  ModelFacts model;
  std::string text;
  std::vector<uint32_t> tokens;
  std::string cache_format;
  std::shared_ptr<const Tokenizer> tokenizer;
  bool only_tokenize = false;
  RequestId parent{0};
  controlplane::ContextTail context;  // of the parent
  // Results of the work.
  Result<void> outcome;
  kv::BlockHash root;
  std::vector<kv::BlockHash> hashes;

  void work(int64_t block_tokens) {
    if (!text.empty()) {
      const bool begins = number(parent) == 0;
      auto ids = tokenizer->encode(text, begins ? Tokenizer::Template::kApply : Tokenizer::Template::kSkip);
      if (!ids) {
        outcome = error(ids.error().code, ids.error().message, field);
        return;
      }
      tokens = std::move(ids).value();
    }
    if (only_tokenize) return;
    outcome = validate_prompt(tokens, field, model);
    if (!outcome) return;
    root = kv::namespace_hash(model.name,
                              checked.grouping.mechanisms.form == kv::AttentionForm::kExpanded
                                  ? cache_format + "/expanded"
                                  : cache_format,
                              checked.cache_salt);
    if (number(parent) == 0) {
      hashes = kv::block_hashes(root, tokens, block_tokens);
      return;
    }
    if (context.root != root) {  // of another tenant
      outcome = controlplane::unknown_parent(parent);
      return;
    }
    std::vector<uint32_t> behind = context.rest;
    behind.insert(behind.end(), tokens.begin(), tokens.end());
    hashes = kv::block_hashes(context.last, behind, block_tokens);
  }
};

struct ClientService::Request {
  Request(const Prompt& prompt, Stream::Transport transport)
      : client(prompt.client),
        tag(prompt.tag),
        prompt_field(prompt.field),
        stream(std::move(transport), prompt.checked.credit) {}
  ClientIdentity client;
  uint64_t tag;
  const char* prompt_field;
  Stream stream;
  StreamDecoder decoder;
  bool paused = false;
  std::optional<Error> ended_by_us;  // why this side cancelled it
  std::optional<Time> last_progress;
  // Rows whose digest has been sent: a row that ran again (after a loss, or alone) is told once.
  std::set<int64_t> digests;
};

ClientService::ClientService(Loop& loop, const EventLog& log, Duration stall_limit,
                             const controlplane::GroupingWish& defaults)
    : loop_(loop), log_(log), stall_limit_(stall_limit), defaults_(defaults), blocked_timer_(loop, [this] {
        look_after_blocked();
      }) {}

ClientService::~ClientService() = default;

void ClientService::serve(Engine& engine, ModelFacts model, std::string cache_format,
                          std::shared_ptr<const Tokenizer> tokenizer, std::string no_tokenizer) {
  engine_ = &engine;
  model_ = std::move(model);
  cache_format_ = std::move(cache_format);
  tokenizer_ = std::move(tokenizer);
  no_tokenizer_ = std::move(no_tokenizer);
  model_.has_tokenizer = tokenizer_ != nullptr;
}

void ClientService::stop() {
  stopping_ = true;
  const Error why = error(ErrorCode::kUnavailable, "the daemon is stopping");
  for (const auto& [id, prompt] : prompts_) send_error(prompt->client, prompt->tag, why);
  prompts_.clear();
  for (auto& [id, request] : requests_) {
    request->stream.lift_limit();
    if (request->stream.last_pushed()) {  // its own end waits there, and the book may have forgotten it
      (void)request->stream.flush(loop_.now());
      continue;
    }
    // The engine will not get to say it: its steps end with the workers.
    const RequestRecord* record = engine_->book().find(id);
    CHECK(record != nullptr, "request ", number(id), " has no record");
    wire::ClientReply reply = reply_to(request->tag);
    wire::Finished* finished = reply.mutable_finished();
    fill_finished(controlplane::FinishReason::kCancelled, *record, *finished);
    finished->set_text(request->decoder.finish());
    fill_error(why, finished->mutable_error());
    // Behind the tokens that wait there.
    (void)request->stream.push(reply.SerializeAsString(), Stream::Frame::kLast, loop_.now());
    engine_->post(controlplane::CancelRequested{id});
  }
  requests_.clear();
  by_client_.clear();
  blocked_.clear();
  blocked_timer_.stop();
}

// ---- frames

void ClientService::client_frame(const ClientIdentity& client, std::string_view frame) {
  wire::ClientRequest request;
  if (!request.ParseFromArray(frame.data(), static_cast<int>(frame.size()))) {
    // What came before the fault was read: with the tag, the client knows which of its requests is meant.
    return send_error(
        client, request.tag(),
        error(ErrorCode::kBadMessage, "the frame is no ClientRequest (all text must be UTF-8)"));
  }
  if (request.version() != kClientProtocol) {
    return send_error(client, request.tag(),
                      error(ErrorCode::kBadMessage,
                            "protocol version " + std::to_string(request.version()) +
                                "; this daemon speaks " + std::to_string(kClientProtocol),
                            "version"));
  }
  if (stopping_ || engine_ == nullptr) {
    return send_error(client, request.tag(),
                      error(ErrorCode::kUnavailable,
                            stopping_ ? "the daemon is stopping" : "the model is still being loaded"));
  }
  switch (request.body_case()) {
    case wire::ClientRequest::kGenerate:
      return generate(client, request.tag(), request.generate());
    case wire::ClientRequest::kCancel:
      return cancel(client, request.tag(), request.cancel());
    case wire::ClientRequest::kListModels:
      return list_models(client, request.tag());
    case wire::ClientRequest::kTokenize:
      return tokenize(client, request.tag(), request.tokenize());
    case wire::ClientRequest::kCredit:
      return credit(client, request.tag(), request.credit());
    case wire::ClientRequest::BODY_NOT_SET:
      break;
  }
  send_error(client, request.tag(), error(ErrorCode::kBadMessage, "the request is empty or unknown"));
}

void ClientService::client_bad_message(const ClientIdentity& client) {
  send_error(client, 0, error(ErrorCode::kBadMessage, "a message is one frame"));
}

void ClientService::client_gone(const ClientIdentity& client) {
  for (auto prompt = prompts_.begin(); prompt != prompts_.end();) {
    prompt = prompt->second->client == client ? prompts_.erase(prompt) : std::next(prompt);
  }
  const auto found = by_client_.find(client);
  if (found == by_client_.end()) return;
  const std::set<RequestId> theirs = found->second;
  for (const RequestId id : theirs) {
    log_.info("client_gone", {{"request", number(id)}});
    engine_->post(controlplane::CancelRequested{id});
    drop(id);
  }
}

// ---- requests

void ClientService::generate(const ClientIdentity& client, uint64_t tag,
                             const wire::GenerateRequest& request) {
  const int places = engine_->plane().limits().places();
  auto checked = validate_request(request, model_, controlplane::fitted(defaults_, places), places);
  if (!checked) {
    Error failure = checked.error();
    if (failure.code == ErrorCode::kUnsupported && !no_tokenizer_.empty())
      failure.message += " (" + no_tokenizer_ + ")";
    return send_error(client, tag, failure);
  }
  const RequestId parent{request.parent()};
  std::optional<controlplane::ContextTail> context;
  if (number(parent) != 0) {
    context = engine_->plane().context(parent);
    if (!context) return send_error(client, tag, no_context(parent));
  }
  if (prompts_.size() >= kPromptsMax) {
    return send_error(
        client, tag,
        error(ErrorCode::kResourceExhausted, std::to_string(kPromptsMax) + " prompts are being tokenized"));
  }
  auto prompt = std::make_shared<Prompt>();
  prompt->client = client;
  prompt->tag = tag;
  prompt->field = prompt_field(request);
  prompt->checked = std::move(checked).value();
  prompt->model = model_;
  prompt->cache_format = cache_format_;
  prompt->tokenizer = tokenizer_;
  prompt->parent = parent;
  if (context) prompt->context = std::move(*context);
  if (request.prompt_case() == wire::GenerateRequest::kText) {
    prompt->text = request.text();
  } else {
    prompt->tokens.assign(request.tokens().ids().begin(), request.tokens().ids().end());
  }
  const uint64_t id = next_prompt_++;
  prompts_.emplace(id, prompt);
  const int64_t block_tokens = engine_->plane().limits().geometry.block_tokens;
  run_off_loop(
      loop_, [prompt, block_tokens] { prompt->work(block_tokens); },
      [this, id, prompt, alive = std::weak_ptr<bool>(alive_)] {
        // Not there any more: the client has left, or the daemon stops.
        if (!alive.expired() && prompts_.erase(id) == 1) submit(*prompt);
      });
}

Error ClientService::no_context(RequestId parent) const {
  if (!engine_->plane().request(parent)) return controlplane::unknown_parent(parent);
  return error(ErrorCode::kFailedPrecondition,
               "request " + std::to_string(number(parent)) + " has not ended yet", "parent");
}

void ClientService::submit(Prompt& prompt) {
  if (!prompt.outcome) return send_error(prompt.client, prompt.tag, prompt.outcome.error());
  const RequestId id{next_request_++};
  auto transport = [this, client = prompt.client](const std::string& frame) {
    return endpoint_->send(client, frame);
  };
  requests_.emplace(id, std::make_unique<Request>(prompt, std::move(transport)));
  by_client_[prompt.client].insert(id);

  controlplane::RequestArrived event;
  event.request = id;
  event.parent = prompt.parent;
  event.prompt = std::move(prompt.tokens);
  event.root = prompt.root;
  event.hashes = std::move(prompt.hashes);
  event.sampling = prompt.checked.sampling;
  event.max_tokens = prompt.checked.max_tokens;
  event.stop_tokens = std::move(prompt.checked.stop_tokens);
  event.grouping = prompt.checked.grouping;
  event.speculation = std::move(prompt.checked.speculation);
  event.use_prefix_cache = prompt.checked.use_prefix_cache;
  event.context = prompt.checked.context;
  event.digest = prompt.checked.digest;
  event.priority = prompt.checked.priority;
  event.deadline = prompt.checked.deadline;
  const uint64_t prompt_tokens = static_cast<uint64_t>(prompt.context.tokens) + event.prompt.size();
  log_.info("request_arrived", {{"request", number(id)},
                                {"parent", number(event.parent)},
                                {"prompt_tokens", prompt_tokens},
                                {"max_tokens", event.max_tokens},
                                {"prefill", kv::split_name(event.grouping.prefill)},
                                {"decode", kv::decode_name(event.grouping.decode)},
                                {"index", kv::index_name(event.grouping.index)},
                                {"speculative", controlplane::draft_source_name(event.speculation.source)},
                                {"mechanisms", kv::mechanisms_name(event.grouping.mechanisms)}});
  wire::ClientReply reply;
  reply.mutable_accepted()->set_request(number(id));
  reply.mutable_accepted()->set_prompt_tokens(prompt_tokens);
  engine_->arrive(std::move(event), static_cast<int64_t>(prompt_tokens));
  push(id, reply, Stream::Frame::kOther);
}

void ClientService::cancel(const ClientIdentity& client, uint64_t tag, const wire::CancelRequest& request) {
  Request* own = own_request(client, tag, request.request());
  if (own == nullptr) return;
  engine_->post(controlplane::CancelRequested{RequestId{request.request()}});
  wire::ClientReply reply = reply_to(tag);
  reply.mutable_cancel()->set_request(request.request());
  send(client, reply);
  own->stream.lift_limit();
  settle(RequestId{request.request()}, own->stream.flush(loop_.now()));
}

void ClientService::list_models(const ClientIdentity& client, uint64_t tag) {
  wire::ClientReply reply = reply_to(tag);
  wire::ModelCard* card = reply.mutable_models()->add_models();
  card->set_name(model_.name);
  card->set_model_type(model_.model_type);
  card->set_max_context(static_cast<uint64_t>(model_.max_context));
  card->set_vocabulary(static_cast<uint64_t>(model_.vocabulary));
  card->mutable_eos_tokens()->Add(model_.eos_tokens.begin(), model_.eos_tokens.end());
  send(client, reply);
}

void ClientService::tokenize(const ClientIdentity& client, uint64_t tag,
                             const wire::TokenizeRequest& request) {
  if (auto known = validate_model(request.model(), model_); !known)
    return send_error(client, tag, known.error());
  if (tokenizer_ == nullptr) {
    return send_error(client, tag,
                      error(ErrorCode::kUnsupported, "the model has no usable tokenizer: " + no_tokenizer_));
  }
  auto prompt = std::make_shared<Prompt>();
  prompt->client = client;
  prompt->tag = tag;
  prompt->text = request.text();
  prompt->tokenizer = tokenizer_;
  prompt->only_tokenize = true;
  const uint64_t id = next_prompt_++;
  prompts_.emplace(id, prompt);
  run_off_loop(
      loop_, [prompt] { prompt->work(1); },
      [this, id, prompt, alive = std::weak_ptr<bool>(alive_)] {
        if (alive.expired() || prompts_.erase(id) == 0) return;
        if (!prompt->outcome) return send_error(prompt->client, prompt->tag, prompt->outcome.error());
        wire::ClientReply reply = reply_to(prompt->tag);
        reply.mutable_tokenize()->mutable_ids()->Add(prompt->tokens.begin(), prompt->tokens.end());
        send(prompt->client, reply);
      });
}

void ClientService::credit(const ClientIdentity& client, uint64_t tag, const wire::CreditRequest& request) {
  Request* own = own_request(client, tag, request.request());
  if (own == nullptr) return;
  own->stream.grant(request.tokens());
  settle(RequestId{request.request()}, own->stream.flush(loop_.now()));
}

// ---- notices

void ClientService::token(const controlplane::TokenNotice& notice) {
  const auto found = requests_.find(notice.request);
  if (found == requests_.end()) return;
  wire::ClientReply reply;
  wire::TokenEvent* event = reply.mutable_token();
  event->set_request(number(notice.request));
  event->set_index(static_cast<uint64_t>(notice.index));
  event->set_token(notice.token);
  if (tokenizer_ != nullptr && !tokenizer_->is_special(notice.token)) {
    event->set_text(found->second->decoder.push(tokenizer_->decode(notice.token)));
  }
  push(notice.request, reply, Stream::Frame::kToken);
}

void ClientService::prefill(const controlplane::PrefillNotice& notice) {
  const auto found = requests_.find(notice.request);
  if (found == requests_.end()) return;
  Request& request = *found->second;
  const Time now = loop_.now();
  const bool due = !request.last_progress || now - *request.last_progress >= kProgressInterval;
  if (!due && notice.done < notice.total) return;
  request.last_progress = now;
  wire::ClientReply reply;
  reply.mutable_progress()->set_request(number(notice.request));
  reply.mutable_progress()->set_done(static_cast<uint64_t>(notice.done));
  reply.mutable_progress()->set_total(static_cast<uint64_t>(notice.total));
  push(notice.request, reply, Stream::Frame::kOther);
}

void ClientService::digest(RequestId id, int64_t position, const std::string& sha256) {
  const auto found = requests_.find(id);
  if (found == requests_.end() || !found->second->digests.insert(position).second) return;
  wire::ClientReply reply;
  reply.mutable_digest()->set_request(number(id));
  reply.mutable_digest()->set_position(static_cast<uint64_t>(position));
  reply.mutable_digest()->set_sha256(sha256);
  push(id, reply, Stream::Frame::kOther);
}

void ClientService::finished(const controlplane::FinishedNotice& notice, const RequestRecord& record) {
  log_.info("request_finished",
            {{"request", number(notice.request)},
             {"reason", controlplane::finish_reason_name(notice.reason)},
             {"error", notice.reason == controlplane::FinishReason::kError ? notice.error.text() : ""},
             {"prompt_tokens", notice.prompt_tokens},
             {"cached_tokens", notice.cached_tokens},
             {"completion_tokens", notice.completion_tokens},
             {"drafted_tokens", notice.drafted_tokens},
             {"accepted_tokens", notice.accepted_tokens},
             {"seconds", seconds(loop_.now() - record.arrived)}});
  const auto found = requests_.find(notice.request);
  if (found == requests_.end()) return;
  Request& request = *found->second;
  wire::ClientReply reply;
  wire::Finished* finished = reply.mutable_finished();
  fill_finished(notice.reason, record, *finished);
  if (notice.reason == controlplane::FinishReason::kError) {
    Error failure = notice.error;
    // The control plane names the fields of its own event.
    if (failure.field == "prompt") failure.field = request.prompt_field;
    fill_error(failure, finished->mutable_error());
  }
  if (request.ended_by_us) fill_error(*request.ended_by_us, finished->mutable_error());
  finished->set_text(request.decoder.finish());
  const bool given_up = request.ended_by_us.has_value();
  // One that is cut off awaits its end: tokens that were made before do not hold that back.
  const bool cut_off = notice.reason == controlplane::FinishReason::kCancelled ||
                       notice.reason == controlplane::FinishReason::kError;
  if (cut_off) request.stream.lift_limit();
  push(notice.request, reply, Stream::Frame::kLast);
  if (given_up) drop(notice.request);  // it did not read before; it gets this only if there is room now
}

// All but the text and the error.
void ClientService::fill_finished(controlplane::FinishReason reason, const RequestRecord& record,
                                  wire::Finished& to) const {
  to.set_request(number(record.id));
  to.set_reason(controlplane::finish_reason_name(reason));
  to.mutable_usage()->set_prompt_tokens(static_cast<uint64_t>(record.prompt_tokens));
  to.mutable_usage()->set_cached_tokens(static_cast<uint64_t>(record.cached_tokens));
  to.mutable_usage()->set_completion_tokens(static_cast<uint64_t>(record.completion_tokens));
  to.mutable_usage()->set_computed_tokens(static_cast<uint64_t>(computed_of_prompt(record)));
  engine_->fill_trace(record, to.mutable_trace());
}

// ---- streams

ClientService::Request* ClientService::own_request(const ClientIdentity& client, uint64_t tag,
                                                   uint64_t request) {
  const auto found = requests_.find(RequestId{request});
  if (found != requests_.end() && found->second->client == client) return found->second.get();
  send_error(
      client, tag,
      error(ErrorCode::kNotFound, "no running request " + std::to_string(request) + " of yours", "request"));
  return nullptr;
}

void ClientService::send(const ClientIdentity& client, const wire::ClientReply& reply) {
  // Answers outside of streams are small and few; one that finds no room is lost with a client that reads
  // nothing.
  if (endpoint_->send(client, reply.SerializeAsString()) != ClientEndpoint::Sent::kSent) {
    log_.debug("reply_lost", {{"tag", reply.tag()}});
  }
}

void ClientService::send_error(const ClientIdentity& client, uint64_t tag, const Error& failure) {
  wire::ClientReply reply = reply_to(tag);
  fill_error(failure, reply.mutable_error());
  send(client, reply);
}

void ClientService::push(RequestId id, wire::ClientReply& reply, Stream::Frame kind) {
  Request& request = *requests_.at(id);
  reply.set_version(kClientProtocol);
  reply.set_tag(request.tag);
  settle(id, request.stream.push(reply.SerializeAsString(), kind, loop_.now()));
}

// Draws the consequences of what the transport said.
void ClientService::settle(RequestId id, ClientEndpoint::Sent sent) {
  Request& request = *requests_.at(id);
  if (sent == ClientEndpoint::Sent::kGone) {
    log_.info("client_gone", {{"request", number(id)}});
    if (!request.stream.last_pushed()) engine_->post(controlplane::CancelRequested{id});
    return drop(id);
  }
  if (request.stream.complete()) return drop(id);
  const bool blocked = request.stream.blocked();
  if (blocked != request.paused && !request.stream.last_pushed()) {
    request.paused = blocked;
    engine_->post(controlplane::PauseChanged{id, blocked});
  }
  if (!blocked) {
    blocked_.erase(id);
  } else if (blocked_.insert(id).second && blocked_.size() == 1) {
    blocked_timer_.start(kRetryBlocked, kRetryBlocked);
  }
}

void ClientService::look_after_blocked() {
  const Time now = loop_.now();
  const std::set<RequestId> ids = blocked_;
  for (const RequestId id : ids) {
    if (!requests_.contains(id)) continue;
    Request& request = *requests_.at(id);
    if (request.stream.stalled(now) < stall_limit_) {
      settle(id, request.stream.flush(now));
      continue;
    }
    if (request.stream.last_pushed()) {
      request.stream.lift_limit();  // it gets what there is room for, rather than silence
      (void)request.stream.flush(now);
      drop(id);
    } else if (!request.ended_by_us) {
      log_.warning("client_stalled", {{"request", number(id)}, {"seconds", seconds(stall_limit_)}});
      const auto limit_ms = std::chrono::duration_cast<std::chrono::milliseconds>(stall_limit_).count();
      request.ended_by_us = error(ErrorCode::kDeadlineExceeded,
                                  "the stream was left unread for " + std::to_string(limit_ms) + " ms");
      request.stream.lift_limit();
      engine_->post(controlplane::CancelRequested{id});
    }
  }
  if (blocked_.empty()) blocked_timer_.stop();
}

void ClientService::drop(RequestId id) {
  const auto found = requests_.find(id);
  if (found == requests_.end()) return;
  const auto theirs = by_client_.find(found->second->client);
  theirs->second.erase(id);
  if (theirs->second.empty()) by_client_.erase(theirs);
  blocked_.erase(id);
  requests_.erase(found);
}

}  // namespace weft::daemon
