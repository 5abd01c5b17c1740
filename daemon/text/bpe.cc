#include "daemon/text/bpe.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>
#include <queue>

#include "daemon/text/byte_alphabet.h"
#include "daemon/text/json_fields.h"
#include "proto/vocab/check.h"

namespace weft::daemon {

namespace {

constexpr uint32_t kNone = UINT32_MAX;

Result<void> refuse_options(const nlohmann::json& model) {
  TRY(const std::string type, string_field(model, "type", "model"));
  if (type != "BPE") return unsupported_part("model", type);
  for (const char* name : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const auto at = model.find(name);
    if (at != model.end() && !at->is_null() && *at != "") return unsupported_part("BPE option", name);
  }
  const auto dropout = model.find("dropout");
  if (dropout != model.end() && !dropout->is_null() && *dropout != 0.0) {
    return unsupported_part("BPE option", "dropout");
  }
  return {};
}

// Names the first byte that has no token, if there is one and the file wants more than its being left out.
Result<void> check_missing_bytes(const nlohmann::json& model, const std::array<uint32_t, 256>& tokens) {
  const auto missing = std::find(tokens.begin(), tokens.end(), kNone);
  if (missing == tokens.end()) return {};  // unk_token and its kin speak of nothing
  for (const char* name : {"unk_token", "byte_fallback"}) {
    const auto at = model.find(name);
    if (at == model.end() || at->is_null() || *at == false) continue;
    return unsupported_part(
        "without a token for byte " + std::to_string(missing - tokens.begin()) + ", the BPE option", name);
  }
  return {};
}

}  // namespace

Result<Bpe> Bpe::parse(const nlohmann::json& model) {
  Bpe out;
  TRY_VOID(refuse_options(model));
  std::unordered_map<std::string, uint32_t> ids;
  TRY_VOID(out.read_vocabulary(model, ids));
  TRY_VOID(out.read_merges(model, ids));
  TRY(const bool ignore_merges, bool_field(model, "ignore_merges", false, "model"));
  if (ignore_merges) {
    for (uint32_t id = 0; id < out.bytes_.size(); ++id) {
      if (!out.bytes_[id].empty()) out.whole_.emplace(out.bytes_[id], id);
    }
  }
  return out;
}

Result<void> Bpe::read_vocabulary(const nlohmann::json& model,
                                  std::unordered_map<std::string, uint32_t>& ids) {
  const auto vocabulary = model.find("vocab");
  if (vocabulary == model.end() || !vocabulary->is_object())
    return bad_part("model", "vocab must be an object");
  byte_token_.fill(kNone);
  ids.reserve(vocabulary->size());
  for (const auto& [spelled, value] : vocabulary->items()) {
    TRY(const uint32_t id, token_id_value(value, "vocab: " + spelled));
    if (id >= bytes_.size()) bytes_.resize(id + 1);
    if (!bytes_[id].empty()) return bad_part("vocab: " + spelled, "token id used twice");
    // Specials of some vocabularies are spelled in plain text.
    bytes_[id] = bytes_of_spelling(spelled).value_or(spelled);
    const std::optional<std::string> bytes = bytes_of_spelling(spelled);
    if (bytes && bytes->size() == 1) byte_token_[static_cast<uint8_t>((*bytes)[0])] = id;
    ids.emplace(spelled, id);
  }
  return check_missing_bytes(model, byte_token_);
}

Result<void> Bpe::read_merges(const nlohmann::json& model,
                              const std::unordered_map<std::string, uint32_t>& ids) {
  const auto merges = model.find("merges");
  if (merges == model.end()) return {};
  if (!merges->is_array()) return bad_part("merges", "must be a list");
  merges_.reserve(merges->size());
  for (size_t rank = 0; rank < merges->size(); ++rank) {
    const nlohmann::json& merge = (*merges)[rank];
    const std::string where = "merges: " + std::to_string(rank);
    std::string left, right;
    if (merge.is_string()) {
      const std::string& text = merge.get_ref<const std::string&>();
      const size_t space = text.find(' ');
      if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
        return bad_part(where, "must be two tokens with one space between");
      }
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0].get<std::string>();
      right = merge[1].get<std::string>();
    } else {
      return bad_part(where, "must be \"a b\" or [\"a\", \"b\"]");
    }
    const auto l = ids.find(left), r = ids.find(right), both = ids.find(left + right);
    if (l == ids.end() || r == ids.end() || both == ids.end()) {
      return bad_part(where, "names a token that is not in the vocabulary");
    }
    merges_.insert_or_assign(pair_key(l->second, r->second),
                             Merge{static_cast<uint32_t>(rank), both->second});
  }
  return {};
}

const Bpe::Merge* Bpe::find_merge(uint32_t left, uint32_t right) const {
  const auto at = merges_.find(pair_key(left, right));
  return at == merges_.end() ? nullptr : &at->second;
}

void Bpe::encode(std::string_view piece, std::vector<uint32_t>& tokens) const {
  if (!whole_.empty()) {
    const auto at = whole_.find(std::string(piece));
    if (at != whole_.end()) {
      tokens.push_back(at->second);
      return;
    }
  }
  if (merges_.empty() || piece.size() == 1) {
    for (const char c : piece) {
      const uint32_t token = byte_token_[static_cast<uint8_t>(c)];
      if (token != kNone) tokens.push_back(token);
    }
    return;
  }
  merge_all(piece, tokens);
}

void Bpe::merge_all(std::string_view piece, std::vector<uint32_t>& tokens) const {
  // A list of symbols linked by index; a merged-away symbol has token kNone.
  struct Symbol {
    uint32_t token, previous, next;
  };
  struct Proposal {  // merge symbol `at` with its next one into `token`
    uint32_t rank, at, token;
    bool operator<(const Proposal& other) const {  // the top of the queue is the lowest (rank, at)
      return rank != other.rank ? rank > other.rank : at > other.at;
    }
  };
  CHECK_LT(piece.size(), size_t{kNone});
  std::vector<Symbol> symbols;
  symbols.reserve(piece.size());
  for (const char c : piece) {
    const auto i = static_cast<uint32_t>(symbols.size());
    const uint32_t token = byte_token_[static_cast<uint8_t>(c)];
    if (token != kNone) symbols.push_back({token, i == 0 ? kNone : i - 1, i + 1});
  }
  if (symbols.empty()) return;
  symbols.back().next = kNone;
  const auto count = static_cast<uint32_t>(symbols.size());
  std::priority_queue<Proposal> queue;
  const auto propose = [&](uint32_t at) {
    if (at == kNone || symbols[at].next == kNone) return;
    if (const Merge* merge = find_merge(symbols[at].token, symbols[symbols[at].next].token)) {
      queue.push({merge->rank, at, merge->token});
    }
  };
  for (uint32_t i = 0; i + 1 < count; ++i) propose(i);
  while (!queue.empty()) {
    const Proposal top = queue.top();
    queue.pop();
    Symbol& left = symbols[top.at];
    if (left.token == kNone || left.next == kNone) continue;
    Symbol& right = symbols[left.next];
    const Merge* merge = find_merge(left.token, right.token);
    if (merge == nullptr || merge->rank != top.rank) continue;  // stale: a neighbour has changed since
    left.token = top.token;
    right.token = kNone;
    left.next = right.next;
    if (left.next != kNone) symbols[left.next].previous = top.at;
    propose(left.previous);
    propose(top.at);
  }
  for (uint32_t i = 0; i != kNone; i = symbols[i].next) tokens.push_back(symbols[i].token);
}

}  // namespace weft::daemon
