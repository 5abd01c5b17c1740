// Text to token ids and back, as a model's tokenizer.json says.
//
// Owns what was read from the file; immutable after load(), so any number of threads may use one object.
// Serves byte-level BPE: added tokens with their flags, the pre-tokenizers of pre_tokenizer.h, byte-level
// decoding and template post-processing of a single sequence. Any other part of a file (a normalizer, say) is
// kUnsupported by name: a part that was skipped would give wrong ids in silence.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/text/stream_decoder.h"
#include "proto/vocab/result.h"

namespace weft::daemon {

class Tokenizer {
 public:
  // Whether encode() adds the tokens of the post-processor's template (a beginning-of-text token, mostly).
  enum class Template : uint8_t { kApply, kSkip };

  // Reads <folder>/tokenizer.json. kNotFound, kIo, kBadCheckpoint or kUnsupported, naming the part.
  static Result<Tokenizer> load(const std::string& folder);
  static Result<Tokenizer> parse(std::string_view json);

  Tokenizer(Tokenizer&&) noexcept;
  Tokenizer& operator=(Tokenizer&&) noexcept;
  ~Tokenizer();

  // kInvalidArgument if `text` is not UTF-8 (the offset is named); kTooLarge if a regular expression gave up.
  Result<std::vector<uint32_t>> encode(std::string_view text, Template use = Template::kApply) const;

  // The bytes that a token stands for: not always whole characters (see StreamDecoder). Empty for an id that
  // the tokenizer does not know; a model's vocabulary may be larger.
  std::string_view decode(uint32_t token) const;

  // An added token with "special": true, as end-of-text is.
  bool is_special(uint32_t token) const;
  // The id of an added token by its content.
  std::optional<uint32_t> added_token(std::string_view content) const;
  // One more than the largest id.
  size_t size() const;

 private:
  struct State;
  explicit Tokenizer(std::unique_ptr<const State> state);
  std::unique_ptr<const State> state_;
};

}  // namespace weft::daemon
