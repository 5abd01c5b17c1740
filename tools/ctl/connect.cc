#include "tools/ctl/connect.h"

#include "proto/endpoints.h"
#include "tools/ctl/run.h"

namespace weft::ctl {

std::string client_endpoint(const Context& context) {
  const Arguments& arguments = context.arguments;
  if (!arguments.client_endpoint.empty()) return arguments.client_endpoint;
  wire::ControlRequest request;
  request.mutable_status();
  const auto reply = ask(context, std::move(request));
  if (reply && !reply->status().client_endpoint().empty()) return reply->status().client_endpoint();
  return client_endpoint_in(arguments.state_dir.empty() ? default_run_folder() : arguments.state_dir);
}

Result<client::Client> connect_client(Context& context) {
  client::ClientOptions options;
  options.endpoint = client_endpoint(context);
  context.catch_interrupts();
  options.interrupt_fd = context.interrupt_fd;
  return client::Client::connect(options);
}

}  // namespace weft::ctl
