// What a weftctl command line said, after parsing and checking.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft::ctl {

struct Arguments {
  // Every command.
  std::string output = "table";
  std::string state_dir;
  std::string control_socket;
  std::string client_endpoint;
  std::optional<double> timeout_s;  // absent: the command's own; 0: wait for ever

  // status, requests
  bool watch = false;
  double interval_s = 1;
  bool wait = false;
  bool all = false;

  // explain, regroup, cancel, record, help
  uint64_t request = 0;
  std::vector<uint64_t> requests;
  std::string prefill;
  std::string decode;
  std::string index;
  std::string mechanisms;
  bool defaults = false;
  bool dry_run = false;
  bool no_wait = false;
  std::string on_or_off;
  std::string topic;
  bool markdown = false;

  // drain, workers, history
  uint32_t rank = 0;
  std::string action;
  std::string what;
  std::optional<uint32_t> drained_rank;
  uint32_t limit = 100;

  // generate
  std::string prompt;
  std::string file;
  std::vector<uint32_t> tokens;
  std::string model;
  uint32_t max_tokens = 16;
  double temperature = 0;
  uint32_t top_k = 0;
  std::optional<double> top_p;
  uint64_t seed = 0;
  bool ignore_eos = false;
  std::vector<uint32_t> stop_tokens;
  bool digest = false;
  bool no_prefix_cache = false;
  std::string cache_salt;
  uint32_t credit = 0;
  std::string speculative;
  uint32_t draft_tokens = 0;
  int32_t priority = 0;
  uint64_t parent = 0;
  std::string context;
  std::optional<double> deadline_s;
  bool stats = false;

  bool json() const { return output == "json"; }
};

}  // namespace weft::ctl
