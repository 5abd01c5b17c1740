#include "daemon/text/tokenizer.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "daemon/text/added_tokens.h"
#include "daemon/text/bpe.h"
#include "daemon/text/json_fields.h"
#include "daemon/text/pre_tokenizer.h"
#include "proto/utf8.h"

namespace weft::daemon {

namespace {

constexpr uintmax_t kFileBytesMax = 256u << 20;

// A part that must be absent or null.
Result<void> refuse(const nlohmann::json& root, const char* name) {
  const auto at = root.find(name);
  if (at == root.end() || at->is_null()) return {};
  return unsupported_part("the part", name);
}

Result<void> check_normalizer(const nlohmann::json& root) {
  const auto at = root.find("normalizer");
  if (at == root.end() || at->is_null()) return {};
  TRY(const std::string type, string_field(*at, "type", "normalizer"));
  if (type == "Sequence" && at->value("normalizers", nlohmann::json::array()).empty()) return {};
  return unsupported_part("normalizer", type);
}

Result<void> check_decoder(const nlohmann::json& root) {
  const auto at = root.find("decoder");
  if (at == root.end() || at->is_null()) return unsupported_part("decoder", "null");
  TRY(const std::string type, string_field(*at, "type", "decoder"));
  if (type == "ByteLevel") return {};
  if (type != "Sequence") return unsupported_part("decoder", type);
  TRY(const nlohmann::json* decoders, array_field(*at, "decoders", "decoder"));
  bool byte_level = false;
  for (const nlohmann::json& inner : *decoders) {
    TRY(const std::string inner_type, string_field(inner, "type", "decoder"));
    if (inner_type != "ByteLevel" && inner_type != "Fuse") return unsupported_part("decoder", inner_type);
    byte_level |= inner_type == "ByteLevel";
  }
  return byte_level ? Result<void>() : unsupported_part("decoder", "Sequence without ByteLevel");
}

Result<AddedTokens> parse_added(const nlohmann::json& root, const std::vector<std::string>& vocabulary) {
  AddedTokens out;
  if (!root.contains("added_tokens")) return out;
  TRY(const nlohmann::json* list, array_field(root, "added_tokens", "added_tokens"));
  for (const nlohmann::json& item : *list) {
    AddedToken token;
    TRY(token.content, string_field(item, "content", "added_tokens"));
    const std::string part = "added_tokens: " + token.content;
    if (token.content.empty()) return bad_part(part, "content must not be empty");
    const auto id = item.find("id");
    if (id == item.end()) return bad_part(part, "has no id");
    TRY(token.id, token_id_value(*id, part));
    TRY(token.special, bool_field(item, "special", false, part));
    TRY(token.normalized, bool_field(item, "normalized", !token.special, part));
    TRY(token.lstrip, bool_field(item, "lstrip", false, part));
    TRY(token.rstrip, bool_field(item, "rstrip", false, part));
    TRY(token.single_word, bool_field(item, "single_word", false, part));
    if (token.id < vocabulary.size() && !vocabulary[token.id].empty() &&
        vocabulary[token.id] != token.content) {
      return bad_part(part, "its id is that of another token of the vocabulary");
    }
    out.add(std::move(token));
  }
  return out;
}

// The tokens that a template puts before and after a single sequence.
struct Wrapping {
  std::vector<uint32_t> before, after;
};

Result<void> add_template(const nlohmann::json& part, Wrapping& out) {
  TRY(const nlohmann::json* single, array_field(part, "single", "post_processor"));
  bool seen_text = false;
  for (const nlohmann::json& item : *single) {
    if (item.is_object() && item.contains("Sequence")) {
      if (seen_text) return unsupported_part("post_processor", "with the sequence twice");
      seen_text = true;
      continue;
    }
    if (!item.is_object() || !item.contains("SpecialToken"))
      return bad_part("post_processor", "unknown template item");
    TRY(const std::string name, string_field(item["SpecialToken"], "id", "post_processor"));
    const auto specials = part.find("special_tokens");
    if (specials == part.end() || !specials->is_object() || !specials->contains(name)) {
      return bad_part("post_processor", "special token " + name + " is not defined");
    }
    TRY(const nlohmann::json* ids, array_field((*specials)[name], "ids", "post_processor"));
    for (const nlohmann::json& value : *ids) {
      TRY(const uint32_t id, token_id_value(value, "post_processor"));
      (seen_text ? out.after : out.before).push_back(id);
    }
  }
  return seen_text ? Result<void>() : bad_part("post_processor", "the template has no sequence");
}

Result<Wrapping> parse_wrapping(const nlohmann::json& root) {
  Wrapping out;
  const auto at = root.find("post_processor");
  if (at == root.end() || at->is_null()) return out;
  TRY(const std::string outer, string_field(*at, "type", "post_processor"));
  const nlohmann::json alone = nlohmann::json::array({*at});
  const nlohmann::json* parts = &alone;
  if (outer == "Sequence") {
    TRY(parts, array_field(*at, "processors", "post_processor"));
  }
  bool seen_template = false;
  for (const nlohmann::json& part : *parts) {
    TRY(const std::string type, string_field(part, "type", "post_processor"));
    if (type == "ByteLevel") continue;  // moves offsets, which nobody asks for; the ids stay
    if (type != "TemplateProcessing" || seen_template) return unsupported_part("post_processor", type);
    seen_template = true;
    TRY_VOID(add_template(part, out));
  }
  return out;
}

}  // namespace

struct Tokenizer::State {
  Bpe bpe;
  PreTokenizer pre_tokenizer;
  AddedTokens added;
  Wrapping wrapping;
  std::vector<std::string> bytes;  // by token id
  std::vector<bool> special;       // by token id
};

Tokenizer::Tokenizer(std::unique_ptr<const State> state) : state_(std::move(state)) {}
Tokenizer::Tokenizer(Tokenizer&&) noexcept = default;
Tokenizer& Tokenizer::operator=(Tokenizer&&) noexcept = default;
Tokenizer::~Tokenizer() = default;

Result<Tokenizer> Tokenizer::load(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  std::error_code failure;
  const uintmax_t size = std::filesystem::file_size(path, failure);
  if (failure == std::errc::no_such_file_or_directory) {
    return error(ErrorCode::kNotFound, "no such file: " + path, "tokenizer.json");
  }
  if (failure) return error(ErrorCode::kIo, path + ": " + failure.message(), "tokenizer.json");
  if (size > kFileBytesMax)
    return error(ErrorCode::kTooLarge, path + " is larger than 256 MiB", "tokenizer.json");
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size))) {
    return error(ErrorCode::kIo, path + ": " + std::strerror(errno), "tokenizer.json");
  }
  return parse(text);
}

Result<Tokenizer> Tokenizer::parse(std::string_view json) {
  const nlohmann::json root = nlohmann::json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!root.is_object()) return error(ErrorCode::kBadCheckpoint, "is not a JSON object", "tokenizer.json");
  for (const char* name : {"truncation", "padding"}) TRY_VOID(refuse(root, name));
  TRY_VOID(check_normalizer(root));
  TRY_VOID(check_decoder(root));
  if (!root.contains("model")) return bad_part("model", "is missing");
  TRY(Bpe bpe, Bpe::parse(root["model"]));
  TRY(PreTokenizer pre_tokenizer, PreTokenizer::parse(root.value("pre_tokenizer", nlohmann::json())));
  TRY(AddedTokens added, parse_added(root, bpe.token_bytes()));
  TRY(Wrapping wrapping, parse_wrapping(root));

  auto state = std::make_unique<State>(
      State{std::move(bpe), std::move(pre_tokenizer), std::move(added), std::move(wrapping), {}, {}});
  state->bytes = state->bpe.token_bytes();
  for (const AddedToken& token : state->added.tokens()) {
    if (token.id >= state->bytes.size()) state->bytes.resize(token.id + 1);
    state->bytes[token.id] = token.content;
  }
  state->special.resize(state->bytes.size());
  for (const AddedToken& token : state->added.tokens()) state->special[token.id] = token.special;
  return Tokenizer(std::move(state));
}

Result<std::vector<uint32_t>> Tokenizer::encode(std::string_view text, Template use) const {
  const size_t valid = utf8_valid_prefix(text);
  if (valid != text.size()) {
    return error(ErrorCode::kInvalidArgument, "is not UTF-8 at byte " + std::to_string(valid), "text");
  }
  std::vector<uint32_t> tokens;
  const bool wrap = use == Template::kApply;
  if (wrap) tokens = state_->wrapping.before;
  std::vector<std::string_view> pieces;
  for (const AddedTokens::Segment& segment : state_->added.split(text)) {
    if (segment.token != nullptr) {
      tokens.push_back(segment.token->id);
      continue;
    }
    TRY_VOID(state_->pre_tokenizer.cut(segment.text, pieces));
    for (const std::string_view piece : pieces) state_->bpe.encode(piece, tokens);
  }
  if (wrap) tokens.insert(tokens.end(), state_->wrapping.after.begin(), state_->wrapping.after.end());
  return tokens;
}

std::string_view Tokenizer::decode(uint32_t token) const {
  return token < state_->bytes.size() ? std::string_view(state_->bytes[token]) : std::string_view();
}

bool Tokenizer::is_special(uint32_t token) const {
  return token < state_->special.size() && state_->special[token];
}

std::optional<uint32_t> Tokenizer::added_token(std::string_view content) const {
  for (const AddedToken& token : state_->added.tokens()) {
    if (token.content == content) return token.id;
  }
  return std::nullopt;
}

size_t Tokenizer::size() const { return state_->bytes.size(); }

}  // namespace weft::daemon
