// weft-hash-model: writes a hash model as a checkpoint folder.
#include <cstdio>

#include "proto/command_line.h"
#include "tools/hash_model/hash_checkpoint.h"

int main(int argc, char** argv) {
  using namespace weft::command_line;
  using weft::hash_checkpoint::Attention;
  weft::hash_checkpoint::Options options;
  std::string dtype = "f32", attention = "grouped";
  CLI::App app(
      "Writes a hash model: the next token is a hash of everything that the cache holds of the tokens before "
      "it. It tests an engine's memory; it knows nothing.",
      "weft-hash-model");
  const auto number = [&](const char* name, int64_t& value, int64_t low, int64_t high, const char* what) {
    app.add_option(name, value, what)->type_name("N")->check(between(low, high))->capture_default_str();
  };
  app.add_option("--out", options.folder, "folder to write to; created if absent")
      ->type_name("FOLDER")
      ->required();
  app.add_option("--attention", attention, "kind of attention; dsa is mla with an indexer")
      ->type_name("KIND")
      ->check(one_of({"grouped", "mla", "dsa"}))
      ->capture_default_str();
  app.add_option("--dtype", dtype, "type of the weights")
      ->type_name("TYPE")
      ->check(one_of({"f32", "bf16"}))
      ->capture_default_str();
  number("--layers", options.layers, 1, 64, "layers");
  number("--heads", options.heads, 1, 64, "query heads");
  number("--kv-heads", options.kv_heads, 1, 64, "KV heads of grouped queries");
  number("--width", options.width, 4, 64, "of a head or latent: width - 2 digits of 3 bits, 21 at most");
  number("--vocabulary", options.vocabulary, 2, 1 << 18, "tokens");
  number("--max-context", options.max_context, 64, 1 << 20, "tokens of the longest context");
  number("--window", options.window, 0, 1 << 20,
         "keys that every second layer of grouped queries sees; 0: all");
  number("--index-topk", options.index_topk, 1, 1 << 20, "keys that the indexer of dsa selects");
  const auto asked = parse_words(app, {argv + 1, argv + argc});
  if (!asked) {
    std::fprintf(stderr, "weft-hash-model: %s\n", asked.error().text().c_str());
    return 2;
  }
  if (*asked == Asked::kHelp) {
    std::fputs(help_text(app).c_str(), stdout);
    return 0;
  }
  options.dtype = dtype == "f32" ? weft::DType::kF32 : weft::DType::kBF16;
  options.attention = attention == "grouped" ? Attention::kGrouped
                      : attention == "mla"   ? Attention::kMla
                                             : Attention::kDsa;
  const weft::Result<void> written = weft::hash_checkpoint::write_checkpoint(options);
  if (!written) {
    std::fprintf(stderr, "weft-hash-model: %s\n", written.error().text().c_str());
    return written.error().code == weft::ErrorCode::kInvalidArgument ? 2 : 1;
  }
  std::printf("hash model (%s) written to %s\n", attention.c_str(), options.folder.c_str());
  return 0;
}
