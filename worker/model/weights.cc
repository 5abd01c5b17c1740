#include "worker/model/weights.h"

#include <xxhash.h>

#include <atomic>
#include <cstring>
#include <map>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "kernels/quantised.h"
#include "proto/vocab/check.h"
#include "worker/model/checkpoint.h"
#include "worker/model/pack_place.h"
#include "worker/model/weight_plan.h"

namespace weft::worker {

namespace {

constexpr size_t kNamesShownMax = 5;

// ---- directory --------------------------------------------------------------------------------------

// The atomic words at the start of the arena. Ranks of several processes use them at once.
class Directory {
 public:
  explicit Directory(const std::byte* arena)
      : words_(reinterpret_cast<uint64_t*>(const_cast<std::byte*>(arena))),
        seals_(words_ + kDirectoryHeaderBytes / static_cast<int64_t>(sizeof(uint64_t))) {}

  uint64_t fingerprint() const { return at(words_).load(std::memory_order_acquire); }
  // Claims a fresh arena for the plan; false if it belongs to another.
  bool claim(const WeightPlan& plan) {
    uint64_t found = 0;
    at(words_).compare_exchange_strong(found, plan.fingerprint);
    at(words_ + 1).store(plan.places.size(), std::memory_order_relaxed);
    return found == 0 || found == plan.fingerprint;
  }
  uint64_t seal(size_t place) const { return at(seals_ + place).load(std::memory_order_acquire); }
  void set_seal(size_t place, uint64_t seal) { at(seals_ + place).store(seal, std::memory_order_release); }

 private:
  static std::atomic_ref<uint64_t> at(uint64_t* word) { return std::atomic_ref<uint64_t>(*word); }
  uint64_t* words_;
  uint64_t* seals_;
};

uint64_t seal_of(const std::byte* arena, const WeightPlace& place) {
  const uint64_t hash = XXH3_64bits(arena + place.offset, static_cast<size_t>(place.bytes));
  return hash == 0 ? 1 : hash;
}

// ---- what the checkpoint must hold ------------------------------------------------------------------

// Scales of activations or of another cache's keys and values, beside quantised weights.
bool is_other_scale(std::string_view name, const Quantisation& quantisation) {
  const size_t dot = name.rfind('.');
  if (dot == std::string_view::npos || !quantisation.quantises(name.substr(0, dot))) return false;
  const std::string_view last = name.substr(dot + 1);
  return last == "input_scale" || last == "input_global_scale" || last == "k_scale" || last == "v_scale";
}

// "model.layers.61.…" of a draft layer, a rotary table that older exports left behind, or a scale of what is
// not quantised here.
bool may_be_ignored(std::string_view name, const ModelConfig& config) {
  if (is_other_scale(name, config.quantisation)) return true;
  if (name.ends_with("rotary_emb.inv_freq")) return true;
  constexpr std::string_view kPrefix = "model.layers.";
  if (!name.starts_with(kPrefix)) return false;
  int64_t layer = 0;
  size_t at = kPrefix.size();
  for (; at < name.size() && name[at] >= '0' && name[at] <= '9' && layer <= INT32_MAX; ++at) {
    layer = layer * 10 + (name[at] - '0');
  }
  const auto layers = static_cast<int64_t>(config.layers.size());  // loaded ones, draft layers among them
  return at < name.size() && name[at] == '.' && layer >= layers &&
         layer < config.main_layers() + config.extra_layers;
}

// What a tensor repeats, or empty: released draft layers bring embedding and head again, and an export may
// write out a tied head.
std::string repeated(std::string_view name, const ModelConfig& config) {
  const char* const embedding = "model.embed_tokens.weight";
  const char* const head = config.tied_embeddings ? embedding : "lm_head.weight";
  if (config.tied_embeddings && name == "lm_head.weight") return embedding;
  for (int64_t layer = config.main_layers(); layer < std::ssize(config.layers); ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".";
    if (name == prefix + "embed_tokens.weight") return embedding;
    if (name == prefix + "shared_head.head.weight") return head;
  }
  return "";
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.type == b.type && a.shape == b.shape &&
         std::memcmp(a.data, b.data, static_cast<size_t>(a.bytes)) == 0;
}

std::string place_of(const Checkpoint::Item& item, const WeightSource& source) {
  return item.file + ": " + source.name;
}

// The tensor of a source, with the shape and one of the types that it should have.
Result<const Checkpoint::Item*> find_tensor(const Checkpoint& checkpoint, const WeightSource& source) {
  const Checkpoint::Item* item = checkpoint.find(source.name);
  if (item == nullptr)
    return error(ErrorCode::kBadCheckpoint, "the checkpoint has no such tensor", source.name);
  // A scalar may also be written as a vector of one.
  const bool scalar = source.shape.empty() && item->tensor->shape == std::vector<int64_t>{1};
  if (item->tensor->shape != source.shape && !scalar) {
    return error(ErrorCode::kBadCheckpoint,
                 "has shape " + shape_text(item->tensor->shape) + ", but config.json implies " +
                     shape_text(source.shape),
                 place_of(*item, source));
  }
  return item;
}

bool is_number(TensorType type) {
  return type == TensorType::kF32 || type == TensorType::kBF16 || type == TensorType::kF16;
}

Error bad_type(const Checkpoint::Item& item, const WeightSource& source, const std::string& why) {
  return error(ErrorCode::kBadCheckpoint, "is " + item.tensor->type_name + ", but " + why,
               place_of(item, source));
}

Result<void> check_plain_type(const Checkpoint::Item& item, const WeightSource& source) {
  const TensorType type = item.tensor->type;
  if (is_number(type)) return {};
  if (type == TensorType::kE4M3 || type == TensorType::kU8) {
    return bad_type(item, source, "config.json does not say that its module is quantised");
  }
  return error(ErrorCode::kUnsupported, "weights of type " + item.tensor->type_name + " are not served",
               place_of(item, source));
}

// Of codes, and of the small scales of NVFP4.
Result<void> check_code_type(const WeightPlace& place, TensorType wanted, const Checkpoint::Item& item,
                             const WeightSource& source) {
  if (item.tensor->type == wanted) return {};
  return bad_type(
      item, source,
      std::string("config.json says that its module is quantised (") + coding_name(place.coding) + ")");
}

// Of the scales that are numbers; those of FP8 blocks may be bare exponents.
Result<void> check_scale_type(const WeightPlace& place, const Checkpoint::Item& item,
                              const WeightSource& source) {
  if (place.coding == WeightCoding::kFp8 && item.tensor->type == TensorType::kE8M0) return {};
  return check_plain_type(item, source);
}

// A plain tensor in one of its spellings.
Result<FoundSource> find_plain(const Checkpoint& checkpoint, const WeightSource& source) {
  FoundSource out{.source = &source};
  // The type first: where config.json contradicts it, the shape would only confuse.
  const Checkpoint::Item* item = checkpoint.find(source.name);
  if (item != nullptr) TRY_VOID(check_plain_type(*item, source));
  TRY(out.item, find_tensor(checkpoint, source));
  return out;
}

Result<FoundSource> find_quantised(const Checkpoint& checkpoint, const WeightPlace& place) {
  const bool fp8 = place.coding == WeightCoding::kFp8;
  FoundSource out{.source = &place.source, .coding = place.coding};
  const Checkpoint::Item* item = checkpoint.find(out.source->name);
  if (item != nullptr) {
    TRY_VOID(check_code_type(place, fp8 ? TensorType::kE4M3 : TensorType::kU8, *item, *out.source));
  }
  TRY(out.item, find_tensor(checkpoint, *out.source));
  for (const WeightSource& scale : place.scales) {
    TRY(const Checkpoint::Item* found, find_tensor(checkpoint, scale));
    const bool small = !fp8 && &scale == place.scales.data();
    TRY_VOID(small ? check_code_type(place, TensorType::kE4M3, *found, scale)
                   : check_scale_type(place, *found, scale));
    out.scales.push_back(found);
  }
  if (!fp8 && out.source->shape[1] % (kernels::kFp4Block / 2) != 0) {
    return error(ErrorCode::kBadCheckpoint,
                 "has rows of " + std::to_string(out.source->shape[1] * 2) +
                     " weights, but NVFP4 comes in groups of 16",
                 place_of(*out.item, *out.source));
  }
  return out;
}

// Refuses quantised experts in one tensor, whatever the rest of its name: "gate_up_proj",
// "gate_up_proj_packed".
Result<void> refuse_fused(const Checkpoint& checkpoint, const WeightPlace& place) {
  if (place.fused.name.empty() || checkpoint.find(place.source.name) != nullptr) return {};
  const auto at = checkpoint.items().lower_bound(place.fused.name);
  if (at == checkpoint.items().end() || !at->first.starts_with(place.fused.name)) return {};
  return error(ErrorCode::kUnsupported,
               std::string("holds all experts of a layer, which is not served where they are quantised (") +
                   coding_name(place.coding) + "): they must be one tensor each",
               at->second.file + ": " + at->first);
}

Result<FoundSource> find_source(const Checkpoint& checkpoint, const WeightPlace& place) {
  if (place.coding == WeightCoding::kNone) {
    const bool fused = !place.fused.name.empty() && checkpoint.find(place.fused.name) != nullptr;
    return find_plain(checkpoint, fused ? place.fused : place.source);
  }
  TRY_VOID(refuse_fused(checkpoint, place));
  const auto* plain = place.plain.name.empty() ? nullptr : checkpoint.find(place.plain.name);
  if (plain != nullptr && is_number(plain->tensor->type)) return find_plain(checkpoint, place.plain);
  return find_quantised(checkpoint, place);
}

// Every place's source, after checking that the checkpoint holds these tensors and no others.
Result<std::vector<FoundSource>> account(const Checkpoint& checkpoint, const WeightPlan& plan,
                                         const ModelConfig& config) {
  std::vector<FoundSource> sources;
  std::set<std::string_view> used;
  for (const WeightPlace& place : plan.places) {
    TRY(const FoundSource found, find_source(checkpoint, place));
    sources.push_back(found);
    used.insert(found.source->name);
    for (size_t i = 0; i < found.scales.size(); ++i) used.insert(place.scales[i].name);
  }
  std::string names;
  size_t count = 0;
  for (const auto& [name, item] : checkpoint.items()) {
    if (used.contains(name) || may_be_ignored(name, config)) continue;
    const std::string original = repeated(name, config);
    if (!original.empty() && same_bytes(*item.tensor, *checkpoint.find(original)->tensor)) continue;
    if (++count <= kNamesShownMax) names += (count == 1 ? "" : ", ") + item.file + ": " + name;
  }
  if (count > kNamesShownMax) names += " and " + std::to_string(count - kNamesShownMax) + " more";
  if (count > 0) {
    return error(ErrorCode::kBadCheckpoint, "config.json does not account for: " + names,
                 "unexpected tensors");
  }
  return sources;
}

void check_arena(const std::byte* arena, int64_t arena_bytes, const WeightPlan& plan) {
  CHECK(arena != nullptr && reinterpret_cast<uintptr_t>(arena) % kWeightAlignment == 0, "arena alignment");
  CHECK_GE(arena_bytes, plan.arena_bytes);
}

Error other_model() {
  return error(ErrorCode::kFailedPrecondition, "the weight arena was laid out for another model or dtype",
               "arena");
}

}  // namespace

int64_t weight_arena_bytes(const ModelConfig& config, DType dtype) {
  ModelWeights unused;
  return plan_weights(config, dtype, unused).arena_bytes;
}

Result<LoadCounts> load_weights(const std::string& folder, const ModelConfig& config, DType dtype,
                                std::byte* arena, int64_t arena_bytes, int rank, int packers,
                                const std::function<void(const LoadCounts&)>& progress) {
  CHECK(rank >= 0 && packers >= 1, rank, " of ", packers);
  ModelWeights unused;
  const WeightPlan plan = plan_weights(config, dtype, unused);
  check_arena(arena, arena_bytes, plan);
  TRY(const Checkpoint checkpoint, Checkpoint::open(folder));
  TRY(const std::vector<FoundSource> sources, account(checkpoint, plan, config));
  Directory directory(arena);
  if (!directory.claim(plan)) return other_model();

  LoadCounts counts;
  const size_t first = rank < packers ? static_cast<size_t>(rank) : plan.places.size();
  const auto stride = static_cast<size_t>(packers);
  for (size_t i = first; i < plan.places.size(); i += stride) {
    ++counts.tensors_total;
    counts.bytes_total += plan.places[i].bytes;
  }
  for (size_t i = first; i < plan.places.size(); i += stride) {
    const WeightPlace& place = plan.places[i];
    const uint64_t sealed = directory.seal(i);
    if (sealed == 0 || sealed != seal_of(arena, place)) {
      directory.set_seal(i, 0);
      TRY_VOID(pack_place(place, sources[i], arena + place.offset));
      directory.set_seal(i, seal_of(arena, place));
      ++counts.tensors_packed;
    }
    ++counts.tensors_done;
    counts.bytes_done += place.bytes;
    if (progress) progress(counts);
  }
  return counts;
}

Result<ModelWeights> view_weights(const ModelConfig& config, DType dtype, const std::byte* arena,
                                  int64_t arena_bytes) {
  ModelWeights weights;
  const WeightPlan plan = plan_weights(config, dtype, weights);
  check_arena(arena, arena_bytes, plan);
  const Directory directory(arena);
  if (directory.fingerprint() != 0 && directory.fingerprint() != plan.fingerprint) return other_model();
  for (size_t i = 0; i < plan.places.size(); ++i) {
    const WeightPlace& place = plan.places[i];
    if (directory.seal(i) == 0) {
      return error(ErrorCode::kFailedPrecondition, "is not packed yet", place.source.name);
    }
  }
  set_views(plan, arena);
  return weights;
}

}  // namespace weft::worker
