// Where the client API listens, and a connection to it. Shared by weftctl generate and weft-demo.
#pragma once

#include "proto/vocab/result.h"
#include "tools/client/client.h"
#include "tools/ctl/context.h"

namespace weft::ctl {

// --client; else what the daemon says over its control socket; else the default place.
std::string client_endpoint(const Context& context);
// From here on Ctrl-C is the command's to handle.
Result<client::Client> connect_client(Context& context);

}  // namespace weft::ctl
