// Shapes of published models as config.json has them, and what the tests of config.h ask of one.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "tests/worker/checkpoint_files.h"
#include "worker/model/config.h"

namespace weft::worker {

using nlohmann::json;

// What becomes of a config.json, with or without generation_config.json beside it.
Result<ModelConfig> read(const json& config, const std::string& generation = {});
Result<ModelConfig> read_with_draft_layers(const json& config);
void expect_refused(const json& config, const std::string& field, ErrorCode code = ErrorCode::kBadCheckpoint);

json golden(const std::string& name);
json large();  // the published shape of DeepSeek-V3
json llama();  // the published shape of Llama-3.1-8B

// One letter for each layer.
std::string indexers(const ModelConfig& config);       // F full, S shared, - none
std::string feed_forwards(const ModelConfig& config);  // m experts, d dense

}  // namespace weft::worker
