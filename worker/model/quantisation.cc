#include "worker/model/quantisation.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "proto/vocab/check.h"

namespace weft::worker {

namespace {

constexpr uint32_t kMatchLimit = 100'000;  // far beyond what module names need
constexpr size_t kExpressionBytesMax = 4096;
constexpr const char* kServed = "fp8 (e4m3, blocks of 128 × 128), modelopt and compressed-tensors (NVFP4)";

struct Free {
  void operator()(pcre2_code* p) const { pcre2_code_free(p); }
  void operator()(pcre2_match_context* p) const { pcre2_match_context_free(p); }
  void operator()(pcre2_match_data* p) const { pcre2_match_data_free(p); }
};

// Literal text around '*', with a whole number of name parts before and behind.
std::string expression_of_glob(const std::string& glob) {
  std::string out = "(?:.*\\.)?";
  for (const char c : glob) {
    if (c == '*') {
      out += ".*";
    } else {
      if (std::string_view("\\^$.[]|()?+{}").find(c) != std::string_view::npos) out += '\\';
      out += c;
    }
  }
  return out + "(?:\\..*)?$";
}

void read_names(FieldReader& f, const char* field, ModuleNames& names) {
  for (const std::string& entry : f.texts(field)) {
    if (const Result<void> added = names.add(entry); !added) f.fail(field, added.error().message);
  }
}

void refuse_unless(FieldReader& f, bool served, const char* field, const std::string& why) {
  if (!served) f.fail(field, why, ErrorCode::kUnsupported);
}

void read_fp8(FieldReader& f, Quantisation& q) {
  q.coding = WeightCoding::kFp8;
  const std::string format = f.text("fmt", "e4m3");
  refuse_unless(f, format == "e4m3", "fmt", "'" + format + "' is not served, only e4m3");
  refuse_unless(f, f.integers("weight_block_size", 1, 1 << 20) == std::vector<int64_t>{128, 128},
                "weight_block_size", "only blocks of [128, 128] are served");
  read_names(f, "modules_to_not_convert", q.excluded);
}

void read_modelopt(FieldReader& f, Quantisation& q) {
  q.coding = WeightCoding::kNvfp4Modelopt;
  const std::string algorithm = f.text("quant_algo");
  refuse_unless(f, algorithm == "NVFP4", "quant_algo", "'" + algorithm + "' is not served, only NVFP4");
  refuse_unless(f, f.integer("group_size", 1, 1 << 20, 16) == 16, "group_size",
                "only groups of 16 are served");
  read_names(f, "ignore", q.excluded);
  read_names(f, "exclude_modules", q.excluded);
}

// One group of modules, coded as NVFP4 is.
void read_group(FieldReader& f, Quantisation& q) {
  const nlohmann::json* object = f.object("weights");
  if (object == nullptr) return f.fail("weights", "missing");
  FieldReader weights(*object, "config.json", "quantization_config.config_groups.weights.");
  const bool nvfp4 = weights.integer("num_bits", 1, 64) == 4 && weights.text("type") == "float" &&
                     weights.integer("group_size", 1, 1 << 20) == 16 && weights.boolean("symmetric", true);
  f.adopt(weights);
  refuse_unless(f, nvfp4, "weights", "only symmetric floats of 4 bits in groups of 16 (NVFP4) are served");
  q.only_targets = true;
  for (const std::string& target : f.texts("targets")) {
    if (target == "Linear") q.only_targets = false;
  }
  if (q.only_targets) read_names(f, "targets", q.targets);
}

void read_compressed_tensors(FieldReader& f, Quantisation& q) {
  q.coding = WeightCoding::kNvfp4CompressedTensors;
  const std::string format = f.text("format");
  refuse_unless(f, format == "nvfp4-pack-quantized", "format",
                "'" + format + "' is not served, only nvfp4-pack-quantized");
  const nlohmann::json* groups = f.object("config_groups");
  if (f.failed()) return;
  refuse_unless(f, groups != nullptr && groups->size() == 1 && groups->begin()->is_object(), "config_groups",
                "only one group of modules is served");
  if (f.failed()) return;
  FieldReader group(*groups->begin(), "config.json", "quantization_config.config_groups.");
  read_group(group, q);
  f.adopt(group);
  read_names(f, "ignore", q.excluded);
}

}  // namespace

struct ModuleNames::Expression {
  std::unique_ptr<pcre2_code, Free> code;
  std::unique_ptr<pcre2_match_context, Free> context;
};

Result<void> ModuleNames::add(const std::string& entry) {
  const bool expression = entry.starts_with("re:");
  if (!expression && entry.find('*') == std::string::npos) {
    names_.insert(entry);
    return {};
  }
  const std::string pattern = expression ? entry.substr(3) : expression_of_glob(entry);
  int code = 0;
  PCRE2_SIZE offset = 0;
  auto compiled = std::make_shared<Expression>();
  if (pattern.size() <= kExpressionBytesMax) {
    compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       PCRE2_ANCHORED, &code, &offset, nullptr));
  }
  if (compiled->code == nullptr) {
    return error(ErrorCode::kBadCheckpoint, "'" + entry.substr(0, 80) + "' is no regular expression");
  }
  compiled->context.reset(pcre2_match_context_create(nullptr));
  CHECK(compiled->context != nullptr);
  pcre2_set_match_limit(compiled->context.get(), kMatchLimit);
  expressions_.push_back(std::move(compiled));
  return {};
}

bool ModuleNames::match(std::string_view module) const {
  // Every run of whole name parts.
  for (size_t begin = 0; begin < module.size() && !names_.empty();) {
    for (size_t end = begin; end < module.size();) {
      end = std::min(module.find('.', end + 1), module.size());
      if (names_.contains(module.substr(begin, end - begin))) return true;
    }
    begin = std::min(module.find('.', begin + 1), module.size() - 1) + 1;
  }
  const std::unique_ptr<pcre2_match_data, Free> data(pcre2_match_data_create(1, nullptr));
  CHECK(data != nullptr);
  for (const auto& expression : expressions_) {
    // An expression that gives up matches nothing; the tensors then contradict it.
    if (pcre2_match(expression->code.get(), reinterpret_cast<PCRE2_SPTR>(module.data()), module.size(), 0, 0,
                    data.get(), expression->context.get()) >= 0) {
      return true;
    }
  }
  return false;
}

const char* coding_name(WeightCoding coding) {
  switch (coding) {
    case WeightCoding::kNone:
      return "";
    case WeightCoding::kFp8:
      return "fp8";
    case WeightCoding::kNvfp4Modelopt:
    case WeightCoding::kNvfp4CompressedTensors:
      return "nvfp4";
  }
  return "";
}

Quantisation read_quantisation(FieldReader& config, const char* field) {
  Quantisation out;
  const nlohmann::json* object = config.object(field);
  if (object == nullptr) return out;
  const bool of_modelopt = field == std::string_view("quantization");  // hf_quant_config.json
  FieldReader f(*object, of_modelopt ? "hf_quant_config.json" : "config.json", std::string(field) + ".");
  const std::string method = of_modelopt ? "modelopt" : f.text("quant_method");
  if (method == "fp8") {
    read_fp8(f, out);
  } else if (method == "modelopt") {
    read_modelopt(f, out);
  } else if (method == "compressed-tensors") {
    read_compressed_tensors(f, out);
  } else {
    f.fail("quant_method", "'" + method + "' is not served, only " + kServed, ErrorCode::kUnsupported);
  }
  config.adopt(f);
  return out;
}

}  // namespace weft::worker
