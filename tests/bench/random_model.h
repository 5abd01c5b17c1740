// A small model of random weights with dense latent attention, for mechanisms that the recall model's rows,
// which select entries, never use.
#pragma once

#include <string>

#include "proto/vocab/result.h"

namespace weft::bench {

// An ordinary checkpoint folder without a tokenizer: deepseek_v3, 2 layers, 16 heads of 128 + 32. kIo names
// the file.
Result<void> write_dense_model(const std::string& folder);

}  // namespace weft::bench
