// Goal: angles turn as the model's authors mean, in both spellings. Method: frequencies and factors that
// transformers computes for the same fields, written out.
#include <cmath>

#include "tests/worker/config_cases.h"

namespace weft::worker {
namespace {

// Frequencies that transformers computes (float32) for the same fields.
TEST(Config, YarnFrequencies) {
  auto config = read(large());
  ASSERT_TRUE(config.has_value());
  ASSERT_EQ(config->inverse_frequency.size(), 32u);
  const std::pair<size_t, double> expected[] = {{0, 1.0},
                                                {1, 0.749894202},
                                                {10, 0.0562341288},
                                                {11, 0.0390069261},
                                                {15, 0.0083345091},
                                                {16, 0.00550000044},
                                                {19, 0.00137051346},
                                                {22, 0.00017782794},
                                                {23, 3.3338034e-05},
                                                {31, 3.33380353e-06}};
  for (const auto& [j, frequency] : expected) {
    EXPECT_NEAR(config->inverse_frequency[j], frequency, 1e-6 * frequency) << j;
  }
  json other = large();
  other["rope_scaling"]["truncate"] = false;
  other["rope_scaling"]["beta_fast"] = 16;
  other["rope_scaling"]["beta_slow"] = 2;
  config = read(other);
  ASSERT_TRUE(config.has_value());
  EXPECT_NEAR(config->inverse_frequency[13], 0.0233312435, 1e-8);
  EXPECT_NEAR(config->inverse_frequency[20], 0.000123952457, 1e-9);
}

TEST(Config, YarnMagnitudes) {
  json config = large();
  json& rope = config["rope_scaling"];
  rope["mscale"] = 0.707;
  EXPECT_NEAR(read(config)->rope_factor, 0.9210423553163399, 1e-12);
  rope.erase("mscale");
  rope.erase("mscale_all_dim");
  EXPECT_NEAR(read(config)->rope_factor, 1.3688879454113936, 1e-12);
  EXPECT_NEAR(read(config)->scale, std::pow(192.0, -0.5), 1e-8);
  rope["attention_factor"] = 0.5;
  EXPECT_EQ(read(config)->rope_factor, 0.5);
  // Without a factor the ratio of the two context lengths takes its place; here they agree.
  rope.erase("factor");
  rope["mscale_all_dim"] = 1.0;
  EXPECT_EQ(read(config)->inverse_frequency, read(large())->inverse_frequency);
}

// Frequencies that transformers computes (float32) for the same fields.
TEST(Config, Llama3Frequencies) {
  json config = large();
  config["rope_theta"] = 500000;
  config["rope_scaling"] = {{"rope_type", "llama3"},
                            {"factor", 8},
                            {"low_freq_factor", 1},
                            {"high_freq_factor", 4},
                            {"original_max_position_embeddings", 8192}};
  const auto llama3 = read(config);
  ASSERT_TRUE(llama3.has_value()) << llama3.error().text();
  const std::pair<size_t, double> expected[] = {{0, 1.0},
                                                {8, 0.0376060307},
                                                {14, 0.00321144611},
                                                {15, 0.00137189368},
                                                {16, 0.000524846022},
                                                {17, 0.000178507791},
                                                {18, 7.78465546e-05},
                                                {31, 3.7673226e-07}};
  for (const auto& [j, frequency] : expected) {
    EXPECT_NEAR(llama3->inverse_frequency[j], frequency, 2e-6 * frequency) << j;
  }
  EXPECT_EQ(llama3->rope_factor, 1.0);
  EXPECT_NEAR(llama3->scale, std::pow(192.0, -0.5), 1e-8);
  config["rope_scaling"]["high_freq_factor"] = 1;
  expect_refused(config, "rope_scaling.high_freq_factor");
  for (const char* field : {"factor", "low_freq_factor", "high_freq_factor"}) {
    json without = config;
    without["rope_scaling"].erase(field);
    expect_refused(without, std::string("rope_scaling.") + field);
  }
}

TEST(Config, BothRopeSpellings) {
  json newer = large();
  newer["rope_parameters"] = newer["rope_scaling"];
  newer.erase("rope_scaling");
  newer["rope_parameters"]["rope_theta"] = newer["rope_theta"];
  newer.erase("rope_theta");
  newer["rope_parameters"]["rope_type"] = "yarn";
  newer["rope_parameters"].erase("type");
  newer["dtype"] = newer["torch_dtype"];
  newer.erase("torch_dtype");
  const auto a = read(large());
  const auto b = read(newer);
  ASSERT_TRUE(b.has_value()) << b.error().text();
  EXPECT_EQ(a->inverse_frequency, b->inverse_frequency);
  EXPECT_EQ(a->scale, b->scale);
  EXPECT_EQ(b->checkpoint_dtype, DType::kBF16);
}

TEST(Config, PlainAndLinearRope) {
  json config = large();
  config["rope_scaling"] = nullptr;
  auto read_config = read(config);
  ASSERT_TRUE(read_config.has_value());
  for (size_t j = 0; j < 32; ++j) {
    EXPECT_NEAR(read_config->inverse_frequency[j], std::pow(10000.0, -static_cast<double>(j) / 32), 1e-12);
  }
  config["rope_scaling"] = {{"type", "linear"}, {"factor", 4}};
  EXPECT_NEAR(read(config)->inverse_frequency[0], 0.25, 1e-12);
  EXPECT_NEAR(read(config)->inverse_frequency[31], 3.33380376e-05, 1e-10);
  // The softmax scale grows with the field, not with the kind of scaling.
  config["rope_scaling"]["mscale_all_dim"] = 0.707;
  EXPECT_NEAR(read(config)->scale, std::pow(192.0, -0.5) * 1.2056281810045126, 1e-8);
}

// Only a rotation of the whole width is served in families that know no other, wherever the field stands.
TEST(Config, PartialRotation) {
  json config = golden("glm4_moe_lite");
  ASSERT_EQ(config["partial_rotary_factor"], 1.0);
  config["partial_rotary_factor"] = 0.5;
  expect_refused(config, "partial_rotary_factor", ErrorCode::kUnsupported);
  config = large();
  config["rope_scaling"]["partial_rotary_factor"] = 0.5;
  expect_refused(config, "rope_scaling.partial_rotary_factor", ErrorCode::kUnsupported);
  for (const char* family : {"llama", "qwen2", "qwen3"}) {
    config = llama();
    config.update({{"model_type", family}, {"partial_rotary_factor", 1.0}});
    EXPECT_EQ(read(config)->rope, 128);
    config["partial_rotary_factor"] = 0.5;
    expect_refused(config, "partial_rotary_factor", ErrorCode::kUnsupported);
  }
}

}  // namespace
}  // namespace weft::worker
