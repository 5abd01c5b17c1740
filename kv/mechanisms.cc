#include "kv/mechanisms.h"

#include <algorithm>
#include <bit>
#include <type_traits>

#include "proto/vocab/check.h"

namespace weft::kv {
namespace {

struct Key {
  const char* name;
  bool prefill;
  std::vector<const char*> values;  // by number
  uint8_t (*get)(const Mechanisms&);
  void (*set)(Mechanisms&, uint8_t);
};

template <auto Member>
Key key(const char* name, bool prefill, std::vector<const char*> values) {
  return {name, prefill, std::move(values),
          [](const Mechanisms& m) { return static_cast<uint8_t>(m.*Member); },
          [](Mechanisms& m, uint8_t value) {
            m.*Member = static_cast<std::remove_reference_t<decltype(m.*Member)>>(value);
          }};
}

const std::vector<Key>& keys() {
  static const std::vector<Key> table = {
      key<&Mechanisms::query>("query", false, {"gathered", "replicated"}),
      key<&Mechanisms::partials>("partials", false, {"all-to-all", "tree"}),
      key<&Mechanisms::context>("context", true, {"auto", "pass-kv", "pass-q"}),
      key<&Mechanisms::fetch>("fetch", true, {"view", "copies"}),
      key<&Mechanisms::form>("form", true, {"absorbed", "expanded"}),
  };
  return table;
}

Error not_one_of(const std::string& what, const std::vector<const char*>& names) {
  std::string text = what + " is not one of ";
  const char* separator = "";
  for (const char* name : names) {
    text += separator + std::string(name);
    separator = ", ";
  }
  return error(ErrorCode::kInvalidArgument, text, "mechanisms");
}

Result<void> set_one(const std::string& word, Mechanisms& mechanisms) {
  const std::string name = word.substr(0, word.find('='));
  std::vector<const char*> names;
  for (const Key& key : keys()) {
    names.push_back(key.name);
    if (name != key.name) continue;
    const std::string value = word.size() > name.size() ? word.substr(name.size() + 1) : "";
    for (size_t i = 0; i < key.values.size(); ++i) {
      if (value != key.values[i]) continue;
      key.set(mechanisms, static_cast<uint8_t>(i));
      return {};
    }
    return not_one_of(name + ": '" + value + "'", key.values);
  }
  return not_one_of("'" + name + "'", names);
}

}  // namespace

Result<Mechanisms> parse_mechanisms(const std::string& text, Mechanisms base) {
  for (size_t begin = 0; begin <= text.size() && !text.empty();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    TRY_VOID(set_one(text.substr(begin, end - begin), base));
    begin = end + 1;
  }
  return base;
}

std::vector<MechanismChoice> mechanism_choices() {
  std::vector<MechanismChoice> choices;
  for (const Key& key : keys()) {
    for (const char* value : key.values) {
      choices.push_back({std::string(key.name) + "=" + value, key.prefill});
    }
  }
  return choices;
}

std::string mechanisms_name(const Mechanisms& mechanisms) {
  std::string text;
  for (const Key& key : keys()) {
    const uint8_t value = key.get(mechanisms);
    if (value == key.get({})) continue;
    text += (text.empty() ? "" : ",") + std::string(key.name) + "=" + key.values[value];
  }
  return text;
}

Result<void> validate_mechanisms(const Mechanisms& mechanisms, DecodeWish decode) {
  if (mechanisms.partials != PartialsPath::kTree || std::has_single_bit(static_cast<unsigned>(decode.c))) {
    return {};
  }
  return error(ErrorCode::kInvalidArgument,
               "partials=tree needs a cache split over a power of two of workers, not " + decode_name(decode),
               "mechanisms");
}

int class_reader(const CacheGeometry& geometry, const Grouping& grouping, int owner, int64_t part,
                 int residue, int origin, int rank_count) {
  if (grouping.width == 1) return grouping.base;
  const Pattern pattern = group_pattern(grouping, grouping.c, rank_count);
  const int member = class_owner(residue, origin, grouping.c);
  for (int i = 0; i < rank_count; ++i) {
    const int rank = (owner + i) % rank_count;
    if (!grouping.contains(rank) || (rank - grouping.base) % grouping.c != member) continue;
    const Range held = held_parts(geometry, Stream::kEntries, pattern, rank, rank_count);
    if (part >= held.begin && part < held.end) return rank;
  }
  CHECK(false, "part ", part, " of class ", residue, " has no holder");
  return -1;
}

}  // namespace weft::kv
