#include "daemon/memory_budget.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>

#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

std::string content(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::optional<int64_t> leading_number(std::string_view text) {
  text.remove_prefix(std::min(text.find_first_not_of(' '), text.size()));
  int64_t value = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), value).ec != std::errc()) return std::nullopt;
  return value;
}

// memory.max of this process's control group (version 2); "max" is no number.
std::optional<int64_t> group_limit() {
  const std::string groups = content("/proc/self/cgroup");
  constexpr std::string_view kVersion2 = "0::";
  if (groups.rfind(kVersion2, 0) != 0) return std::nullopt;
  const std::string path = groups.substr(kVersion2.size(), groups.find('\n') - kVersion2.size());
  return leading_number(content("/sys/fs/cgroup" + path + "/memory.max"));
}

}  // namespace

std::optional<int64_t> parse_available(const std::string& meminfo) {
  constexpr std::string_view kField = "MemAvailable:";
  const size_t at = meminfo.find(kField);
  if (at == std::string::npos) return std::nullopt;
  const auto kib = leading_number(std::string_view(meminfo).substr(at + kField.size()));
  return kib ? std::optional(*kib * kKiB) : std::nullopt;
}

int64_t available_memory() {
  constexpr int64_t kUnknown = std::numeric_limits<int64_t>::max();
  return std::min(parse_available(content("/proc/meminfo")).value_or(kUnknown),
                  group_limit().value_or(kUnknown));
}

Result<void> check_fits_memory(const ArenaSizes& sizes, const char* pool_option, int64_t available) {
  const auto ranks = static_cast<int64_t>(sizes.pool_pages.size());
  int64_t pools = 0;
  for (const kv::PoolPages& pages : sizes.pool_pages) {
    pools += static_cast<int64_t>(kv::pool_bytes(sizes.geometry, pages));
  }
  const int64_t mailboxes = ranks * sizes.mailbox_bytes;
  const int64_t host = sizes.host_bytes();
  const int64_t needed = pools + mailboxes + sizes.weight_bytes + host;
  const int64_t usable = usable_memory(available);
  if (needed <= usable) return {};
  // The largest part is what to make smaller.
  const char* field = host >= std::max({pools, mailboxes, sizes.weight_bytes}) ? "--host-pool"
                      : pools >= std::max(mailboxes, sizes.weight_bytes)       ? pool_option
                      : mailboxes >= sizes.weight_bytes                        ? "--max-step-rows"
                                                                               : "--model";
  return error(
      ErrorCode::kResourceExhausted,
      human_bytes(pools) + " of page pools, " + (host > 0 ? human_bytes(host) + " of host pool, " : "") +
          human_bytes(mailboxes) + " of mailboxes and " + human_bytes(sizes.weight_bytes) +
          " of weights are more than " + human_bytes(usable) + ": of the " + human_bytes(available) +
          " of memory that are available, one part in " + std::to_string(kMemoryShareKept) + " is kept free",
      field);
}

ArenaSizes sizes_of_one_more(const ArenaSizes& sizes) {
  ArenaSizes one = sizes;
  one.weight_bytes = 0;
  one.host_pages = {};
  one.pool_pages.resize(1);
  return one;
}

}  // namespace weft::daemon
