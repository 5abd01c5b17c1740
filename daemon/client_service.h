// Answers clients: from frames to requests of the engine, from the engine's notices to streams of replies.
//
// Owns the streams and the prompts that are being tokenized (off the loop). Keeps: a request belongs to the
// client that started it, and only that client may cancel it or grant credit; a client that is gone, or that
// leaves its stream unread for the stall limit, has its requests cancelled. Every refusal is a typed
// WireError. Loop thread only.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <string>

#include "daemon/client_endpoint.h"
#include "daemon/engine.h"
#include "daemon/stream.h"
#include "daemon/text/tokenizer.h"
#include "daemon/validate.h"
#include "proto/client.pb.h"

namespace weft::daemon {

class ClientService : public ClientEndpoint::Listener {
 public:
  ClientService(Loop& loop, const EventLog& log, Duration stall_limit,
                const controlplane::GroupingWish& defaults);
  ~ClientService() override;

  void attach(ClientEndpoint& endpoint) { endpoint_ = &endpoint; }
  // The model is loaded: requests are taken from now on. `tokenizer` may be empty; why, says `no_tokenizer`.
  // It is shared with work off the loop that may outlast this object.
  void serve(Engine& engine, ModelFacts model, std::string cache_format,
             std::shared_ptr<const Tokenizer> tokenizer, std::string no_tokenizer);
  // Ends every stream with a typed reply; refuses requests from now on.
  void stop();

  // ---- ClientEndpoint::Listener
  void client_frame(const ClientIdentity& client, std::string_view frame) override;
  void client_bad_message(const ClientIdentity& client) override;
  void client_gone(const ClientIdentity& client) override;

  // ---- from the engine
  void token(const controlplane::TokenNotice& notice);
  void prefill(const controlplane::PrefillNotice& notice);
  void digest(RequestId request, int64_t position, const std::string& sha256);
  void finished(const controlplane::FinishedNotice& notice, const RequestRecord& record);

 private:
  struct Request;  // a running one and its stream
  struct Prompt;   // one that is being tokenized

  void generate(const ClientIdentity& client, uint64_t tag, const wire::GenerateRequest& request);
  Error no_context(RequestId parent) const;
  void submit(Prompt& prompt);
  void cancel(const ClientIdentity& client, uint64_t tag, const wire::CancelRequest& request);
  void list_models(const ClientIdentity& client, uint64_t tag);
  void tokenize(const ClientIdentity& client, uint64_t tag, const wire::TokenizeRequest& request);
  void credit(const ClientIdentity& client, uint64_t tag, const wire::CreditRequest& request);

  void fill_finished(controlplane::FinishReason reason, const RequestRecord& record,
                     wire::Finished& to) const;
  // Null, and the client is told, if it has no such running request.
  Request* own_request(const ClientIdentity& client, uint64_t tag, uint64_t request);
  void send(const ClientIdentity& client, const wire::ClientReply& reply);
  void send_error(const ClientIdentity& client, uint64_t tag, const Error& failure);
  void push(RequestId id, wire::ClientReply& reply, Stream::Frame kind);
  void settle(RequestId id, ClientEndpoint::Sent sent);
  void look_after_blocked();
  void drop(RequestId id);

  Loop& loop_;
  const EventLog& log_;
  Duration stall_limit_;
  const controlplane::GroupingWish& defaults_;
  ClientEndpoint* endpoint_ = nullptr;
  Engine* engine_ = nullptr;
  ModelFacts model_;
  std::string cache_format_, no_tokenizer_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::map<RequestId, std::unique_ptr<Request>> requests_;
  std::map<ClientIdentity, std::set<RequestId>> by_client_;
  std::map<uint64_t, std::shared_ptr<Prompt>> prompts_;  // shared with the work off the loop
  std::set<RequestId> blocked_;
  uint64_t next_request_ = 1, next_prompt_ = 1;
  bool stopping_ = false;
  Timer blocked_timer_;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);  // work that ends later holds it weakly
};

}  // namespace weft::daemon
