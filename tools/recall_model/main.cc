// weft-recall-model: writes the constructed recall model as a checkpoint folder.
#include <cstdio>

#include "proto/command_line.h"
#include "tools/recall_model/checkpoint_writer.h"
#include "tools/recall_model/shape.h"

int main(int argc, char** argv) {
  using namespace weft::command_line;
  weft::recall::Options options;
  std::string dtype = "f32";
  CLI::App app(
      "Writes the recall model: a constructed checkpoint that continues a text by looking up what followed "
      "the "
      "same 16 bytes earlier in the context. It was not trained and knows nothing else.",
      "weft-recall-model");
  app.add_option("--out", options.folder, "folder to write to; created if absent")
      ->type_name("FOLDER")
      ->required();
  app.add_option("--dtype", dtype, "type of the weights")
      ->type_name("TYPE")
      ->check(one_of({"f32", "bf16"}))
      ->capture_default_str();
  app.add_option("--max-context", options.max_context,
                 "tokens of the longest context that the model declares")
      ->type_name("N")
      ->check(between(weft::recall::kContextMin, weft::recall::kContextMax))
      ->capture_default_str();
  const auto asked = parse_words(app, {argv + 1, argv + argc});
  if (!asked) {
    std::fprintf(stderr, "weft-recall-model: %s\n", asked.error().text().c_str());
    return 2;
  }
  if (*asked == Asked::kHelp) {
    std::fputs(help_text(app).c_str(), stdout);
    return 0;
  }
  options.dtype = dtype == "f32" ? weft::DType::kF32 : weft::DType::kBF16;
  const weft::Result<void> written = weft::recall::write_checkpoint(options);
  if (!written) {
    std::fprintf(stderr, "weft-recall-model: %s\n", written.error().text().c_str());
    return written.error().code == weft::ErrorCode::kInvalidArgument ? 2 : 1;
  }
  std::printf("recall model (constructed, %s weights) written to %s\n", dtype.c_str(),
              options.folder.c_str());
  return 0;
}
