// weft-recall-model: writes the constructed recall model as a checkpoint folder.
#include <CLI/CLI.hpp>
#include <cstdio>

#include "tools/recall_model/checkpoint_writer.h"

int main(int argc, char** argv) {
  weft::recall::Options options;
  std::string dtype = "f32";
  CLI::App app{
      "Writes the recall model: a constructed checkpoint that continues a text by looking up what followed "
      "the\n"
      "same 16 bytes earlier in the context. It was not trained and knows nothing else."};
  app.name("weft-recall-model");
  app.add_option("--out", options.folder, "Folder to write to; created if absent")->required();
  app.add_option("--dtype", dtype, "Type of the weights")
      ->check(CLI::IsMember({"f32", "bf16"}))
      ->capture_default_str();
  app.add_option("--max-context", options.max_context, "Longest context, in tokens, that the model declares")
      ->capture_default_str();
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& problem) {
    return app.exit(problem) == 0 ? 0 : 2;
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
