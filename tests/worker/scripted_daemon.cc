#include "tests/worker/scripted_daemon.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>

#include "kv/layout.h"
#include "proto/version.h"
#include "proto/vocab/random.h"

namespace weft::worker {

WorkerHandle WorkerHandle::start() {
  auto [ours, theirs] = kv::packet_socket_pair().value();
  WorkerHandle worker;
  worker.socket = std::move(ours);
  const std::string fd = std::to_string(theirs.get());
  worker.pid = ::fork();
  CHECK_GE(worker.pid, 0);
  if (worker.pid == 0) {
    ::fcntl(theirs.get(), F_SETFD, 0);
    ::execl(WEFT_WORKER_BINARY, "weft-worker", "--socket-fd", fd.c_str(), nullptr);
    ::_exit(127);
  }
  return worker;
}

void WorkerHandle::send(const wire::ToWorker& message, std::span<const int> descriptors) const {
  const std::string bytes = message.SerializeAsString();
  kv::send_packet(socket.get(), std::as_bytes(std::span(bytes)), descriptors).value();
}

wire::FromWorker WorkerHandle::receive() const {
  for (;;) {
    const kv::Packet packet = std::move(*kv::receive_packet(socket.get()).value());
    wire::FromWorker message;
    CHECK(message.ParseFromArray(packet.bytes.data(), static_cast<int>(packet.bytes.size())));
    if (!message.has_progress()) return message;
  }
}

int WorkerHandle::wait_exit() const {
  int status = -1;
  CHECK_EQ(::waitpid(pid, &status, 0), pid);
  return status;
}

ScriptedDaemon::ScriptedDaemon(std::string model_path, int rank_count)
    : model_path_(std::move(model_path)),
      rank_count_(rank_count),
      workers_(static_cast<size_t>(rank_count)),
      loaded_(static_cast<size_t>(rank_count)) {}

ScriptedDaemon::~ScriptedDaemon() {
  for (WorkerHandle& worker : workers_) {
    worker.socket.reset();
    if (worker.pid > 0) ::waitpid(worker.pid, nullptr, 0);  // already reaped: ECHILD
  }
}

wire::ToWorker ScriptedDaemon::describe_message(int rank) const {
  wire::ToWorker message;
  wire::Describe* describe = message.mutable_describe();
  describe->set_protocol_version(kWorkerProtocol);
  describe->set_rank(static_cast<uint32_t>(rank));
  describe->set_rank_count(static_cast<uint32_t>(rank_count_));
  describe->set_model_path(model_path_);
  describe->set_cache_dtype(wire::CACHE_DTYPE_F32);
  describe->set_index_cache_dtype(wire::CACHE_DTYPE_F32);
  describe->set_block_tokens(kBlockTokens);
  describe->set_threads(1);
  describe->set_max_step_rows(64);
  return message;
}

void ScriptedDaemon::make_arenas() {
  kv::ControlLimits limits;
  limits.rank_count = rank_count_;
  limits.block_tokens = kBlockTokens;
  limits.table_count = 2;
  limits.table_blocks = kBlocks;
  limits.max_samples = 4;
  limits.parts = description_.index_layers() > 0 ? 2 : 1;
  limits.plan_bytes_max = 1 << 16;
  limits.result_bytes_max = 1 << 16;
  const auto pool = static_cast<size_t>(kBlocks * kBlockTokens) *
                    (description_.layers() * description_.entry_bytes() +
                     description_.index_layers() * description_.index_key_bytes());
  auto add = [this](const char* label, size_t bytes) {
    memory_.push_back(kv::create_memory(label, bytes).value());
    memory_bytes_.push_back(bytes);
  };
  add("control", kv::control_arena_bytes(limits));
  add("weights", description_.weight_arena_bytes());
  for (int rank = 0; rank < rank_count_; ++rank) add("mailbox", description_.mailbox_bytes());
  for (int rank = 0; rank < rank_count_; ++rank) add("pool", pool);
  event_ = kv::Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  auto mapping = kv::Mapping::map(memory_[0].get(), memory_bytes_[0]).value();
  control_ = std::make_unique<kv::ControlArena>(kv::ControlArena::format(std::move(mapping), limits).value());
  std::vector<PageId> pages;
  for (uint32_t block = 0; block < kBlocks; ++block) {
    pages.insert(pages.end(), static_cast<size_t>(limits.parts * rank_count_), PageId{block});
  }
  control_->write_table(TableId{0}, 0, pages);
  control_->set_table_version(TableId{0}, 1);
}

wire::ToWorker ScriptedDaemon::map_message() const {
  wire::ToWorker message;
  wire::MapArenas* map = message.mutable_map_arenas();
  map->set_control_bytes(memory_bytes_[0]);
  map->set_weight_bytes(memory_bytes_[1]);
  map->set_mailbox_bytes(memory_bytes_[2]);
  for (int rank = 0; rank < rank_count_; ++rank) {
    map->add_pool_bytes(memory_bytes_.back());
    wire::StreamPages* pages = map->add_pool_pages();
    pages->set_entries(kBlocks);
    pages->set_index_keys(kBlocks);
  }
  return message;
}

std::vector<int> ScriptedDaemon::map_descriptors() const {
  std::vector<int> fds{memory_[0].get(), memory_[1].get(), event_.get()};
  for (size_t i = 2; i < memory_.size(); ++i) fds.push_back(memory_[i].get());
  return fds;
}

void ScriptedDaemon::start_worker(int rank) {
  WorkerHandle& handle = worker(rank);
  handle = WorkerHandle::start();
  handle.send(describe_message(rank));
  const wire::FromWorker answer = handle.receive();
  CHECK(answer.has_description(), answer.ShortDebugString());
  description_ = answer.description();
  if (memory_.empty()) make_arenas();
  handle.send(map_message(), map_descriptors());
  const wire::FromWorker mapped = handle.receive();
  CHECK(mapped.has_loaded(), mapped.ShortDebugString());
  loaded_[static_cast<size_t>(rank)] = mapped.loaded();
}

WorkerHandle ScriptedDaemon::start_spare() const {
  WorkerHandle handle = WorkerHandle::start();
  wire::ToWorker message = describe_message(0);
  message.mutable_describe()->set_spare(true);
  handle.send(message);
  const wire::FromWorker answer = handle.receive();
  CHECK(answer.has_description(), answer.ShortDebugString());
  handle.send(map_message(), map_descriptors());
  const wire::FromWorker mapped = handle.receive();
  CHECK(mapped.has_loaded(), mapped.ShortDebugString());
  return handle;
}

void ScriptedDaemon::take_rank(int rank, WorkerHandle spare) {
  wire::ToWorker message;
  message.mutable_take_rank()->set_rank(static_cast<uint32_t>(rank));
  spare.send(message);
  const wire::FromWorker answer = spare.receive();
  CHECK(answer.has_loaded(), answer.ShortDebugString());
  worker(rank) = std::move(spare);
}

void ScriptedDaemon::begin(uint32_t epoch) {
  wire::ToWorker message;
  message.mutable_begin()->set_epoch(epoch);
  message.mutable_begin()->set_plan_sequence(control_->plans_published());
  for (const WorkerHandle& handle : workers_) handle.send(message);
}

void ScriptedDaemon::publish(uint32_t epoch, const wire::StepPlan& plan) {
  const std::string bytes = plan.SerializeAsString();
  control_->publish_plan(Epoch{epoch}, std::as_bytes(std::span(bytes)));
}

std::map<int, wire::StepResult> ScriptedDaemon::results() {
  std::map<int, wire::StepResult> results;
  for (int rank = 0; rank < rank_count_; ++rank) {
    const kv::RankState& state = control_->rank_state(rank);
    for (;;) {
      if (auto bytes = control_->take_result(rank)) {
        CHECK(results[rank].ParseFromArray(bytes->data(), static_cast<int>(bytes->size())));
        break;
      }
      kv::futex_wait(state.results_written, state.results_read.load(), std::chrono::hours(1));
    }
  }
  return results;
}

wire::StepPlan ScriptedDaemon::plan(uint64_t step, uint64_t start, uint32_t rows) const {
  wire::StepPlan plan;
  plan.set_step(step);
  wire::Span* span = plan.add_spans();
  span->set_request(1);
  span->set_table_version(1);
  span->set_start(start);
  span->set_rows(rows);
  span->set_group_width(static_cast<uint32_t>(rank_count_));
  span->set_group_c(1);
  span->set_index_c(1);
  span->set_prefill(true);
  for (uint64_t position = start; position < start + rows; ++position) {
    span->add_tokens(static_cast<uint32_t>(mix64(position) % description_.vocabulary()));
  }
  span->set_sample_rows(1);
  span->set_digest(true);
  return plan;
}

}  // namespace weft::worker
