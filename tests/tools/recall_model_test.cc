// The recall model as a checkpoint: well-formed for the loader, right in a slow reference forward, and such
// that no part can be left out: the dense layer, every expert, the router's choice, the shared expert. The
// position part is checked over all distances up to 2^20.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "daemon/text/tokenizer.h"
#include "proto/utf8.h"
#include "tests/tools/recall_folder.h"
#include "tests/tools/recall_forward.h"
#include "tests/tools/recall_text.h"
#include "tools/recall_model/checkpoint_writer.h"
#include "tools/recall_model/shape.h"
#include "worker/model/weights.h"

namespace weft {
namespace {

using test::best_of;
using test::lead_of;
using test::RecallForward;
using test::Row;

const std::string& folder(DType dtype) { return test::recall_folder(dtype); }

std::string file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

constexpr size_t kContext = 1100;
using test::babble;
using test::RecallQuestion;
using test::tokens_of;

// What the model says where the answer stands; its own answers equal these rows as long as they are right.
std::string answer_of(const RecallForward& model, const RecallQuestion& q, double* least_lead = nullptr) {
  const std::vector<Row> after_first = model.first_layer(tokens_of(q.text));
  std::string out;
  for (size_t i = q.text.size() - q.answer.size() - 1; i + 1 < q.text.size(); ++i) {
    const Row logits = model.logits(after_first, static_cast<int64_t>(i));
    out.push_back(static_cast<char>(best_of(logits)));
    if (least_lead != nullptr) *least_lead = std::min(*least_lead, lead_of(logits));
  }
  return out;
}

TEST(RecallCheckpoint, LoadsAsAnyOther) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto config = worker::read_model_config(folder(dtype));
    ASSERT_TRUE(config) << config.error().text();
    EXPECT_EQ(config->model_type, "glm_moe_dsa");
    EXPECT_EQ(config->checkpoint_dtype, dtype);
    EXPECT_EQ(config->max_context, 1 << 20);
    EXPECT_EQ(config->eos_tokens, std::vector<uint32_t>{257});
    // Every rank of 8 has something to do.
    EXPECT_GE(config->heads, 8);
    EXPECT_GE(config->experts, 8);
    EXPECT_GE(config->dense_width, 8 * 64);
    EXPECT_EQ(config->layers[0].feed_forward, worker::FeedForward::kDense);
    EXPECT_EQ(config->layers[1].feed_forward, worker::FeedForward::kMoe);
    EXPECT_EQ(config->index_layers(), 2);
    EXPECT_GT(config->index_heads, 1);
    EXPECT_GT(config->index_width, config->rope);

    // Every expected tensor is there exactly once, with its shape, and nothing else is.
    const int64_t bytes = worker::weight_arena_bytes(*config, dtype);
    std::vector<std::max_align_t> arena(static_cast<size_t>(bytes) / sizeof(std::max_align_t) + 8);
    auto* start = reinterpret_cast<std::byte*>(arena.data());
    start += (64 - reinterpret_cast<uintptr_t>(start) % 64) % 64;
    const auto counts =
        worker::load_weights(folder(dtype), *config, dtype, start, bytes, 0, 1, [](const auto&) {});
    ASSERT_TRUE(counts) << counts.error().text();
    EXPECT_EQ(counts->tensors_done, counts->tensors_total);
    EXPECT_TRUE(worker::view_weights(*config, dtype, start, bytes));
  }
}

TEST(RecallCheckpoint, RepeatingGivesTheSameBytesAndSaysWhatItIs) {
  const std::string other = folder(DType::kF32) + "_again";
  recall::write_checkpoint({.folder = other}).value();
  recall::write_checkpoint({.folder = other}).value();  // over itself
  size_t files = 0;
  for (const auto& item : std::filesystem::directory_iterator(folder(DType::kF32))) {
    EXPECT_EQ(file_bytes(item.path()), file_bytes(other + "/" + item.path().filename().string()))
        << item.path();
    ++files;
  }
  EXPECT_EQ(files, 6u);
  EXPECT_THAT(file_bytes(other + "/README.md"), ::testing::HasSubstr("constructed, not trained"));
}

TEST(RecallCheckpoint, ContextIsDeclaredAndLimited) {
  const std::string other = folder(DType::kF32) + "_short";
  recall::write_checkpoint({.folder = other, .max_context = 4096}).value();
  EXPECT_EQ(worker::read_model_config(other)->max_context, 4096);
  for (const int64_t wrong : {int64_t{-1}, int64_t{0}, recall::kContextMin - 1, recall::kContextMax + 1}) {
    const auto written = recall::write_checkpoint({.folder = other, .max_context = wrong});
    ASSERT_FALSE(written);
    EXPECT_EQ(written.error().code, ErrorCode::kInvalidArgument);
  }
  const auto nowhere = recall::write_checkpoint({.folder = folder(DType::kF32) + "/config.json/below"});
  ASSERT_FALSE(nowhere);
  EXPECT_EQ(nowhere.error().code, ErrorCode::kIo);
}

TEST(RecallCheckpoint, ATokenIsAByte) {
  const auto tokenizer = daemon::Tokenizer::load(folder(DType::kF32));
  ASSERT_TRUE(tokenizer) << tokenizer.error().text();
  std::string all;
  for (uint32_t c = 0; c < 0x180; ++c) append_utf8(c, all);
  EXPECT_EQ(tokenizer->encode(all).value(), tokens_of(all));
  for (uint32_t byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(tokenizer->decode(byte), std::string(1, static_cast<char>(byte)));
  }
  EXPECT_EQ(tokenizer->encode("a<|end|>b<|begin|><|pad|>").value(),
            (std::vector<uint32_t>{'a', 257, 'b', 256, 258}));
  EXPECT_TRUE(tokenizer->is_special(257));
}

TEST(RecallAnswers, AreRightInBothFormats) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const RecallForward model = RecallForward::load(folder(dtype));
    double least_lead = INFINITY;
    for (size_t asked = 0; asked < 3; ++asked) {
      const RecallQuestion q = test::recall_question(kContext, asked);
      EXPECT_EQ(answer_of(model, q, &least_lead), q.answer) << dtype_name(dtype);
    }
    EXPECT_GT(least_lead, 15) << dtype_name(dtype);
  }
}

TEST(RecallAnswers, EndOfTextIsRecalledToo) {
  const RecallForward model = RecallForward::load(folder(DType::kF32));
  std::vector<uint32_t> tokens = tokens_of(babble(300, 1) + "Is this the end of the text?");
  tokens.push_back(257);
  for (const uint32_t t : tokens_of(babble(300, 2) + "Is this the end of the text?")) tokens.push_back(t);
  const Row logits = model.logits(model.first_layer(tokens), static_cast<int64_t>(tokens.size()) - 1);
  EXPECT_EQ(best_of(logits), 257);
  EXPECT_GT(lead_of(logits), 5);
}

TEST(RecallParts, WithoutTheDenseLayerNothingMatches) {
  RecallForward model = RecallForward::load(folder(DType::kF32));
  model.matrix("model.layers.0.mlp.down_proj.weight").clear();
  const RecallQuestion q = test::recall_question(kContext, 0);
  EXPECT_NE(answer_of(model, q), q.answer);
}

TEST(RecallParts, AWrongRouterOrNoExpertsGiveWrongAnswers) {
  const RecallQuestion q = test::recall_question(kContext, 0);
  RecallForward model = RecallForward::load(folder(DType::kF32));
  const std::vector<Row> after_first = model.first_layer(tokens_of(q.text));
  const auto row =
      static_cast<int64_t>(q.text.size() - q.answer.size());  // its logits are for the first digit
  ASSERT_EQ(best_of(model.logits(after_first, row)), '2');
  for (const int64_t shift : {1, 2, 8, 16, 31}) {
    model.expert_shift = shift;
    EXPECT_NE(best_of(model.logits(after_first, row)), '2') << shift;
  }
  model.expert_shift = 0;
  for (int64_t e = 0; e < model.config().experts; ++e) {
    model.matrix("model.layers.1.mlp.experts." + std::to_string(e) + ".down_proj.weight").clear();
  }
  EXPECT_NE(best_of(model.logits(after_first, row)), '2');
}

// The residual of a row whose attention recalled `byte`.
Row recalled(uint32_t byte) {
  Row x(recall::kHidden);
  for (int64_t i = 0; i < recall::kRecalled; ++i) x[static_cast<size_t>(i)] = (i * 5 / 3) % 2 == 0 ? 1 : -1;
  for (int64_t b = 0; b < recall::kCode; ++b) {
    x[static_cast<size_t>(recall::kRecalled + b)] = (byte >> b & 1) != 0 ? 1 : -1;
  }
  x[recall::kConstant] = recall::kConstantValue;
  return x;
}

// For every byte: right as built; and of all single parts of the mixture, which ones is it wrong without? A
// part that is missing leaves bits undecided: the best answers tie, or the end token, with its larger gain,
// leads by up to 5.
TEST(RecallParts, EveryExpertIsNeededForItsBytesAndForNoOthers) {
  const RecallForward whole = RecallForward::load(folder(DType::kF32));
  const auto is_right = [](uint32_t byte, const Row& logits) {
    return best_of(logits) == (byte == recall::kEndByte ? recall::kEndToken : byte) && lead_of(logits) > 7;
  };
  for (uint32_t byte = 0; byte < 256; ++byte)
    EXPECT_TRUE(is_right(byte, whole.finish(recalled(byte)))) << byte;

  std::vector<int> needs(256);
  for (int64_t e = 0; e < recall::kExperts; ++e) {
    RecallForward without = whole;
    without.matrix("model.layers.1.mlp.experts." + std::to_string(e) + ".down_proj.weight").clear();
    int wrong = 0;
    for (uint32_t byte = 0; byte < 256; ++byte) {
      if (is_right(byte, without.finish(recalled(byte)))) continue;
      ++wrong;
      ++needs[byte];
    }
    EXPECT_EQ(wrong, 16) << e;
  }
  EXPECT_THAT(needs, ::testing::Each(2));  // one expert for each nibble

  RecallForward without_shared = whole;
  without_shared.matrix("model.layers.1.mlp.shared_experts.down_proj.weight").clear();
  for (uint32_t byte = 0; byte < 256; ++byte) {
    if (byte == recall::kEndByte || byte == (recall::kEndByte | 8)) continue;  // the pair of the end token
    EXPECT_LT(lead_of(without_shared.finish(recalled(byte))), 1e-6) << byte;
  }
}

// Layer 0 sees only distances, so rows of one text at one position stand for all: query at 2^20 − 1, keys
// before it.
TEST(RecallPositions, HoldUpToAMillionTokens) {
  const int64_t last = recall::kContextMax - 1;
  const RecallForward model = RecallForward::load(folder(DType::kF32));
  Row row(recall::kHidden, 0.0);
  for (int64_t b = 0; b < recall::kCode; ++b)
    row[static_cast<size_t>(recall::place(0) + b)] = b % 2 == 0 ? 1 : -1;
  row[recall::kConstant] = recall::kConstantValue;

  const Row scores = model.index_scores_of_equal_rows(row, last);
  double worst = INFINITY;
  for (int64_t back = 1; back <= recall::kLookBack; ++back) {
    worst = std::min(worst, scores[static_cast<size_t>(last - back)]);
  }
  const auto rank = std::count_if(scores.begin(), scores.end(), [&](double s) { return s >= worst; });
  EXPECT_LE(rank, 64);
  EXPECT_LE(rank * 4, model.config().index_topk);

  for (const int64_t head : {int64_t{0}, recall::kHeads - 1}) {
    const Row logits = model.attention_logits_of_equal_rows(head, row, last);
    EXPECT_EQ(best_of(logits), last - head - 1);
    EXPECT_GT(lead_of(logits), 25);
  }
}

}  // namespace
}  // namespace weft
