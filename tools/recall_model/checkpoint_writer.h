// Writes the recall model as an ordinary checkpoint folder.
//
// config.json, model.safetensors, tokenizer.json, tokenizer_config.json, generation_config.json and a
// README.md that says what the model is. Each file appears whole or not at all (temporary file, then rename),
// config.json last: in a folder that was empty, where it is, all is. Repeating gives the same bytes.
#pragma once

#include <cstdint>
#include <string>

#include "proto/vocab/ids.h"
#include "proto/vocab/result.h"

namespace weft::recall {

inline constexpr int64_t kContextMin = 64;

struct Options {
  std::string folder;  // created if absent
  DType dtype = DType::kF32;
  int64_t max_context = 1 << 20;  // kContextMin … 2^20
};

// kInvalidArgument for the context, kIo with path and reason.
Result<void> write_checkpoint(const Options& options);

}  // namespace weft::recall
