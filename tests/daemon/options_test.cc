// The command line: good values land in Options, each bad one is an error that names its option.
#include "daemon/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/vocab/units.h"

namespace weft::daemon {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

Result<ParsedOptions> parse(std::vector<std::string> extra) {
  std::vector<std::string> arguments = {"--model", "/tmp", "--worker-binary", "/bin/true"};
  arguments.insert(arguments.end(), extra.begin(), extra.end());
  return parse_options(arguments);
}

Options must(std::vector<std::string> extra) {
  auto parsed = parse(std::move(extra));
  CHECK(parsed.has_value(), parsed.error().text());
  CHECK(parsed->options.has_value());
  return *parsed->options;
}

TEST(Options, Defaults) {
  const Options options = must({});
  EXPECT_EQ(options.model_folder, "/tmp");
  EXPECT_EQ(options.model_name, "tmp");
  EXPECT_EQ(options.workers, 1);
  EXPECT_GE(options.threads_per_worker, 1);
  EXPECT_EQ(options.pool_bytes, 128 * kMiB);
  EXPECT_EQ(options.max_step_rows, 2048);
  EXPECT_FALSE(options.decode.has_value());
  EXPECT_EQ(options.devices.size(), 1u);
}

TEST(Options, Values) {
  const Options options = must({"--workers",
                                "4",
                                "--decode",
                                "dcp(4)",
                                "--prefill=interleave",
                                "--index=split",
                                "--pool-bytes",
                                "64MiB",
                                "--state-dir",
                                "/tmp/weft-x",
                                "--cache-dtype",
                                "bf16",
                                "--weight-dtype",
                                "f32",
                                "--hang-deadline",
                                "2.5",
                                "--devices",
                                "cpu:0,cpu,cpu,cpu",
                                "--threads-per-worker",
                                "2",
                                "--name",
                                "toy"});
  EXPECT_EQ(options.decode, (kv::DecodeWish{kv::DecodeKind::kDcp, 4}));
  EXPECT_EQ(options.prefill, kv::Split::kInterleave);
  EXPECT_EQ(options.index, kv::IndexKind::kSplit);
  EXPECT_EQ(options.pool_bytes, 64 * kMiB);
  EXPECT_EQ(options.client_endpoint, "ipc:///tmp/weft-x/client.sock");
  EXPECT_EQ(options.control_socket, "/tmp/weft-x/control.sock");
  EXPECT_EQ(options.cache, CacheFormat(DType::kBF16));
  EXPECT_EQ(options.weight_dtype, DType::kF32);
  EXPECT_FALSE(must({}).weight_dtype.has_value());
  EXPECT_EQ(options.hang_deadline, std::chrono::milliseconds(2500));
  EXPECT_THAT(options.devices[0].cores, ElementsAre(0));
  EXPECT_EQ(options.model_name, "toy");
}

TEST(Options, IndexKeysFollowTheEntriesUnlessTold) {
  EXPECT_EQ(must({}).cache, CacheFormat());
  EXPECT_EQ(must({}).index_cache_option, nullptr);
  const Options mla = must({"--cache-dtype", "fp8_ds_mla"});
  EXPECT_EQ(mla.cache.entries, CacheDType::kFp8DsMla);
  EXPECT_EQ(mla.cache.index_keys, CacheDType::kFp8);
  EXPECT_EQ(mla.cache.index_name(), "fp8");
  const Options told = must({"--cache-dtype", "fp8", "--index-cache-dtype", "bf16", "--index-hadamard"});
  EXPECT_EQ(told.cache.entries, CacheDType::kFp8);
  EXPECT_EQ(told.cache.index_name(), "bf16, Hadamard");
  EXPECT_STREQ(told.index_cache_option, "index-hadamard");
  EXPECT_EQ(must({"--index-cache-dtype=fp8", "--index-scales=f32"}).cache.index_name(), "fp8, float scales");
}

TEST(Options, ThePoolsSizeIsNamedAsItWasGiven) {
  EXPECT_STREQ(pool_option_of(must({})), "--pool-bytes");
  EXPECT_STREQ(pool_option_of(must({"--pool-bytes", "1GiB"})), "--pool-bytes");
  EXPECT_STREQ(pool_option_of(must({"--pool-tokens", "1000"})), "--pool-tokens");
}

TEST(Options, HelpAndVersionAreMessages) {
  auto help = parse({"--help"});
  ASSERT_TRUE(help.has_value());
  EXPECT_FALSE(help->options.has_value());
  EXPECT_THAT(help->message, HasSubstr("--max-step-rows"));
  EXPECT_THAT(parse({"--version"})->message, HasSubstr("weftd 0."));
}

TEST(Options, ListDevicesNeedsNoModel) {
  const auto table = parse_options({"--list-devices", "--worker-binary", "/bin/true"});
  ASSERT_TRUE(table.has_value()) << table.error().text();
  EXPECT_FALSE(table->options.has_value());
  ASSERT_TRUE(table->device_query.has_value());
  EXPECT_EQ(table->device_query->worker_binary, "/bin/true");
  EXPECT_FALSE(table->device_query->json);
  EXPECT_TRUE(parse({"--list-devices", "-o", "json"})->device_query->json);
  EXPECT_FALSE(parse({})->device_query.has_value());
  EXPECT_EQ(parse({"--devices", "cuda:0"}).error().code, ErrorCode::kUnsupported);
}

struct BadOption {
  std::vector<std::string> arguments;
  const char* says;
};

TEST(Options, BadValuesAreNamed) {
  const BadOption cases[] = {
      {{"--workers", "0"}, "--workers"},
      {{"--workers", "9"}, "--workers"},
      {{"--workers", "four"}, "--workers"},
      {{"--workers", "4", "--decode", "dcp(3)"}, "--decode"},
      {{"--decode", "quick"}, "--decode"},
      {{"--prefill", "ring"}, "--prefill"},
      {{"--max-context", "1"}, "--max-context: must be a whole number, at least 2, not \"1\""},
      {{"--mechanisms", "query=none"}, "--mechanisms: query: 'none' is not one of gathered, replicated"},
      {{"--workers", "3", "--decode", "dcp(3)", "--mechanisms", "partials=tree"}, "power of two"},
      {{"--mechanisms", "ring=on"}, "'ring' is not one of query, partials, context, fetch, form"},
      {{"--index", "half"}, "--index"},
      {{"--block-tokens", "48"}, "--block-tokens"},
      {{"--block-tokens", "512"}, "--block-tokens"},
      {{"--cache-dtype", "fp9"}, "must be f32, bf16, fp8_ds_mla or fp8, not 'fp9'"},
      {{"--index-cache-dtype", "fp8_ds_mla"},
       "--index-cache-dtype: must be f32, bf16 or fp8, not 'fp8_ds_mla'"},
      {{"--index-scales", "e8"}, "--index-scales"},
      {{"--index-scales", "f32"}, "index keys are stored as f32, which has no scales"},
      {{"--weight-dtype", "int4"}, "--weight-dtype"},
      {{"--workers", "2", "--devices", "cpu:0"}, "2 ranks but only 1 devices"},
      {{"--workers", "1", "--devices", "cpu:0,cpu:0"}, "2 devices but --workers 1"},
      {{"--devices", "cpu:banana"}, "--devices"},
      {{"--devices", "cpu:1023"}, "not available"},
      {{"--devices", "tpu"}, "--devices"},
      {{"--devices", "cuda:0"}, "listed (--list-devices) but not served yet"},
      {{"--list-devices", "-o", "yaml"}, "--output"},
      {{"-o", "json"}, "--list-devices"},
      {{"--list-devices", "--worker-binary", "/nowhere/weft-worker"}, "--worker-binary"},
      {{"--client-endpoint", "tcp://0.0.0.0:5555"}, "loopback"},
      {{"--client-endpoint", "ipc://" + std::string(200, 'x')}, "--client-endpoint"},
      {{"--control-socket", "/tmp/" + std::string(200, 'x')}, "--control-socket"},
      {{"--log-level", "loud"}, "log-level"},
      {{"--pool-tokens", "100", "--pool-bytes", "1MiB"}, "--pool"},
      {{"--max-step-rows", "0"}, "--max-step-rows"},
      {{"--max-step-rows", "32"}, "at least --max-running"},
      {{"--worker-binary", "/nowhere/weft-worker"}, "--worker-binary"},
      {{"--name", "\xff"}, "'?' is not UTF-8"},
      {{"--state-dir", "/tmp/\xc3"}, "--state-dir: '/tmp/?' is not UTF-8"},
      {{"--no-such-option"}, "--no-such-option"},
  };
  for (const BadOption& bad : cases) {
    auto parsed = parse(bad.arguments);
    ASSERT_FALSE(parsed.has_value()) << bad.arguments[0];
    EXPECT_THAT(parsed.error().text(), HasSubstr(bad.says));
  }
  EXPECT_THAT(parse_options({}).error().text(), HasSubstr("--model"));
  EXPECT_EQ(parse_options({"--model", "/proc/nowhere"}).error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace weft::daemon
