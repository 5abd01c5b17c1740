// Goal: a safetensors file is read exactly, and a broken one is refused with its file, tensor and reason;
// nothing that a file can contain crashes the reader. Method: files written byte by byte, one defect each,
// then random ones.
#include "worker/model/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>

#include "proto/vocab/random.h"
#include "tests/worker/checkpoint_files.h"
#include "worker/model/checkpoint.h"

namespace weft::worker {
namespace {

using test::f32_tensor;
using test::TempFolder;
using ::testing::HasSubstr;

void expect_bad(const std::string& path, const std::string& field, const std::string& why) {
  const auto file = SafetensorsFile::open(path);
  ASSERT_FALSE(file.has_value()) << why;
  EXPECT_EQ(file.error().code, ErrorCode::kBadCheckpoint) << file.error().text();
  EXPECT_EQ(file.error().field, field) << file.error().text();
  EXPECT_THAT(file.error().message, HasSubstr(why));
}

std::string entry(const std::string& name, const std::string& type, const std::string& shape, int64_t begin,
                  int64_t end) {
  return "\"" + name + R"(":{"dtype":")" + type + R"(","shape":)" + shape + R"(,"data_offsets":[)" +
         std::to_string(begin) + "," + std::to_string(end) + "]}";
}

TEST(Safetensors, ReadsNamesShapesAndBytes) {
  const TempFolder folder;
  test::RawTensors tensors;
  tensors["a"] = f32_tensor({2, 3}, {1, 2, 3, 4, 5, 6});
  tensors["scalar"] = f32_tensor({}, {7});
  tensors["empty"] = f32_tensor({0, 4}, {});
  tensors["half"] = {"F16", {2}, "abcd"};
  for (int spaces = 0; spaces < 4; ++spaces) {  // whatever the alignment
    test::write_safetensors(folder.file("x.safetensors"), tensors, spaces);
    const auto file = SafetensorsFile::open(folder.file("x.safetensors"));
    ASSERT_TRUE(file.has_value()) << file.error().text();
    ASSERT_EQ(file->tensors().size(), 4u);
    for (const auto& [name, raw] : tensors) {
      const Tensor* tensor = file->find(name);
      ASSERT_NE(tensor, nullptr);
      EXPECT_EQ(tensor->shape, raw.shape);
      EXPECT_EQ(tensor->type_name, raw.type);
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor->data), static_cast<size_t>(tensor->bytes)),
                raw.bytes);
    }
    EXPECT_EQ(file->find("a")->type, TensorType::kF32);
    EXPECT_EQ(file->find("half")->type, TensorType::kF16);
    EXPECT_EQ(file->find("scalar")->count(), 1);
    EXPECT_EQ(file->find("b"), nullptr);
  }
}

TEST(Safetensors, AbsentFile) {
  const TempFolder folder;
  const auto file = SafetensorsFile::open(folder.file("x.safetensors"));
  ASSERT_FALSE(file.has_value());
  EXPECT_EQ(file.error().code, ErrorCode::kNotFound);
}

// Without a writer, opening it would wait for ever.
TEST(Safetensors, AFifoIsNoFile) {
  const TempFolder folder;
  const std::string path = folder.file("model.safetensors");
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  const auto opened = SafetensorsFile::open(path);
  ASSERT_FALSE(opened.has_value());
  EXPECT_EQ(opened.error().code, ErrorCode::kIo);
}

TEST(Safetensors, HeaderLength) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  test::write_file(path, "1234567");
  expect_bad(path, "x.safetensors", "too short");
  test::write_raw_safetensors(path, "{}", "", 3);
  expect_bad(path, "x.safetensors", "beyond the end");
  test::write_raw_safetensors(path, "{}", "", 100'000'001);
  expect_bad(path, "x.safetensors", "beyond the limit");
  test::write_raw_safetensors(path, "{}", "", INT64_MAX);
  expect_bad(path, "x.safetensors", "beyond the limit");
  test::write_file(path, std::string(8, '\xff'));
  expect_bad(path, "x.safetensors", "beyond the limit");
}

TEST(Safetensors, HeaderThatIsNotOneObject) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  for (const char* header :
       {"", "{", "[]", "7", "{}{}", "{\"a\":}", "{\"a\":\"\xff\xfe\"}", "\x01\x02\x03"}) {
    test::write_raw_safetensors(path, header, "");
    const auto file = SafetensorsFile::open(path);
    ASSERT_FALSE(file.has_value()) << header;
    EXPECT_EQ(file.error().code, ErrorCode::kBadCheckpoint);
    EXPECT_EQ(file.error().field, "x.safetensors");
  }
  test::write_raw_safetensors(path, "{\"a\":" + std::string(100'000, '[') + std::string(100'000, ']') + "}",
                              "");
  expect_bad(path, "x.safetensors", "nested deeper");
  const std::string a = entry("a", "F32", "[1]", 0, 4);
  test::write_raw_safetensors(path, "{" + a + "," + a + "}", "1234");
  expect_bad(path, "x.safetensors", "'a' appears twice");
}

TEST(Safetensors, EntriesThatDoNotFit) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  const auto one = [&](const std::string& text, const std::string& data, const std::string& why) {
    test::write_raw_safetensors(path, "{" + text + "}", data);
    expect_bad(path, "x.safetensors: a", why);
  };
  one(R"("a":5)", "", "not an object");
  one(R"("a":{"shape":[1],"data_offsets":[0,4]})", "1234", "no dtype");
  one(R"("a":{"dtype":"F32","data_offsets":[0,4]})", "1234", "no shape");
  one(R"("a":{"dtype":"F32","shape":[1]})", "1234", "data_offsets");
  one(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0]})", "1234", "data_offsets");
  one(entry("a", "F33", "[1]", 0, 4), "1234", "unknown dtype 'F33'");
  one(entry("a", "F32", "[2]", 0, 4), "1234", "needs 8");
  one(entry("a", "F32", "[]", 0, 8), "12345678", "needs 4");
  one(entry("a", "F32", "[-1]", 0, 4), "1234", "impossible shape");
  one(entry("a", "F32", "[1.5]", 0, 4), "1234", "impossible shape");
  one(entry("a", "F32", "[4611686018427387904,4]", 0, 0), "", "impossible shape");
  one(entry("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4), "1234", "shape");
  one(entry("a", "F32", "[1]", 0, 5), "1234", "outside the file");
  one(entry("a", "F32", "[1]", 4, 8), "1234", "outside the file");
  one(entry("a", "F32", "[1]", -4, 0), "1234", "outside the file");
  one(entry("a", "F32", "[1]", 4, 0), "1234", "outside the file");
  one(R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,18446744073709551615]})", "1234",
      "outside the file");
}

TEST(Safetensors, TensorsMustCoverTheDataExactly) {
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  const auto two = [&](int64_t begin_b, const std::string& data) {
    test::write_raw_safetensors(
        path,
        "{" + entry("b", "F32", "[1]", begin_b, begin_b + 4) + "," + entry("a", "F32", "[1]", 0, 4) + "}",
        data);
  };
  two(4, "12345678");
  EXPECT_TRUE(SafetensorsFile::open(path).has_value());
  two(2, "123456");
  expect_bad(path, "x.safetensors: b", "overlap");
  two(0, "1234");
  EXPECT_FALSE(SafetensorsFile::open(path).has_value());
  two(6, "1234567890");
  expect_bad(path, "x.safetensors: b", "2 bytes before it");
  two(4, "123456789");
  expect_bad(path, "x.safetensors", "1 bytes after the last");
  two(4, "1234567");  // truncated
  expect_bad(path, "x.safetensors: b", "outside the file");
}

// Whatever the bytes: an error, or tensors that lie inside the file.
TEST(Safetensors, RandomDamageNeverCrashes) {
  constexpr uint64_t kSeed = 20240611;
  const TempFolder folder;
  const std::string path = folder.file("x.safetensors");
  test::write_safetensors(path, {{"a", f32_tensor({2, 2}, {1, 2, 3, 4})}, {"b", f32_tensor({3}, {5, 6, 7})}});
  const std::string whole = test::read_file(path);
  int refused = 0;
  for (uint64_t round = 0; round < 3000; ++round) {
    SplitMix64 random(kSeed + round);
    std::string bytes = whole;
    const uint64_t changes = 1 + random.below(3);
    for (uint64_t i = 0; i < changes; ++i) {
      const size_t at = random.below(bytes.size());
      switch (random.below(4)) {
        case 0:
          bytes[at] = static_cast<char>(random.below(256));
          break;
        case 1:
          bytes[at] = "0123456789[]{},:\"-"[random.below(18)];
          break;
        case 2:
          bytes.erase(at, 1 + random.below(4));
          break;
        default:
          bytes.insert(at, 1 + random.below(4), bytes[random.below(bytes.size())]);
      }
      if (bytes.size() < 2) break;
    }
    test::write_file(path, bytes);
    const auto file = SafetensorsFile::open(path);
    if (!file.has_value()) {
      ++refused;
      continue;
    }
    int64_t total = 0;
    for (const auto& [name, tensor] : file->tensors()) {
      total += tensor.bytes;
      volatile char touched = 0;
      for (int64_t i = 0; i < tensor.bytes; ++i) touched = static_cast<char>(tensor.data[i]);
      (void)touched;
    }
    EXPECT_LE(total, static_cast<int64_t>(bytes.size())) << "seed " << kSeed << " round " << round;
  }
  EXPECT_GT(refused, 1000);
}

// ---- folders ----------------------------------------------------------------------------------------

class Shards : public ::testing::Test {
 protected:
  void write(const std::string& index) {
    test::write_safetensors(folder_.file("m1.safetensors"),
                            {{"a", f32_tensor({1}, {1})}, {"b", f32_tensor({1}, {2})}});
    test::write_safetensors(folder_.file("m2.safetensors"), {{"c", f32_tensor({1}, {3})}});
    test::write_file(folder_.file("model.safetensors.index.json"), index);
  }
  void expect_refused(const std::string& index, const std::string& field, const std::string& why) {
    write(index);
    const auto checkpoint = Checkpoint::open(folder_.path());
    ASSERT_FALSE(checkpoint.has_value()) << why;
    EXPECT_EQ(checkpoint.error().code, ErrorCode::kBadCheckpoint);
    EXPECT_EQ(checkpoint.error().field, field) << checkpoint.error().text();
    EXPECT_THAT(checkpoint.error().message, HasSubstr(why));
  }
  TempFolder folder_;
};

TEST_F(Shards, AllTensorsByName) {
  write(R"({"metadata":{},"weight_map":{"a":"m1.safetensors","b":"m1.safetensors","c":"m2.safetensors"}})");
  auto opened = Checkpoint::open(folder_.path());
  ASSERT_TRUE(opened.has_value()) << opened.error().text();
  const Checkpoint checkpoint = std::move(opened).value();  // views survive the move
  ASSERT_EQ(checkpoint.items().size(), 3u);
  float value = 0;
  std::memcpy(&value, checkpoint.find("c")->tensor->data, 4);
  EXPECT_EQ(value, 3);
  EXPECT_EQ(checkpoint.find("c")->file, "m2.safetensors");
  EXPECT_EQ(checkpoint.find("d"), nullptr);
}

TEST_F(Shards, IndexAndFilesMustAgree) {
  expect_refused(R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors","c":"m3.safetensors"}})",
                 "m3.safetensors", "no such file");
  expect_refused(R"({"weight_map":{"a":"m1.safetensors","b":"m2.safetensors","c":"m2.safetensors"}})",
                 "m2.safetensors: b", "but it is not");
  expect_refused(R"({"weight_map":{"a":"m1.safetensors","c":"m2.safetensors"}})", "m1.safetensors: b",
                 "does not list it");
  expect_refused(
      R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors","c":"m2.safetensors","d":"m2.safetensors"}})",
      "m2.safetensors: d", "but it is not");
  expect_refused(R"({"weight_map":{"a":"../m1.safetensors"}})", "model.safetensors.index.json: a",
                 "of this folder");
  expect_refused(R"({"weight_map":{"a":"/etc/passwd"}})", "model.safetensors.index.json: a",
                 "of this folder");
  expect_refused(R"({"weight_map":{"a":7}})", "model.safetensors.index.json: a", "of this folder");
  expect_refused(R"({"weight_map":[]})", "model.safetensors.index.json: weight_map", "object");
  expect_refused(R"({})", "model.safetensors.index.json: weight_map", "object");
  expect_refused(R"({"weight_map":)", "model.safetensors.index.json", "not JSON");
  expect_refused(R"({"weight_map":{"a":"m1.safetensors","a":"m2.safetensors"}})",
                 "model.safetensors.index.json", "twice");
}

TEST_F(Shards, TheSameTensorInTwoShards) {
  write(R"({"weight_map":{"a":"m1.safetensors","b":"m1.safetensors","c":"m2.safetensors"}})");
  test::write_safetensors(folder_.file("m2.safetensors"),
                          {{"b", f32_tensor({1}, {9})}, {"c", f32_tensor({1}, {3})}});
  const auto checkpoint = Checkpoint::open(folder_.path());
  ASSERT_FALSE(checkpoint.has_value());
  EXPECT_EQ(checkpoint.error().field, "m2.safetensors: b");
  EXPECT_THAT(checkpoint.error().message, HasSubstr("says it is in m1.safetensors"));
}

TEST_F(Shards, EmptyFolder) {
  const auto checkpoint = Checkpoint::open(folder_.path());
  ASSERT_FALSE(checkpoint.has_value());
  EXPECT_EQ(checkpoint.error().code, ErrorCode::kNotFound);
}

}  // namespace
}  // namespace weft::worker
