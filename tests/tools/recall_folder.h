// The recall model, written once per test program, in a folder that goes when the program does.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "proto/vocab/check.h"
#include "tools/recall_model/checkpoint_writer.h"

namespace weft::testing {

inline const std::string& recall_folder(DType dtype) {
  struct Folders {
    std::filesystem::path root;
    std::string of[2];
    Folders() {
      std::string pattern = (std::filesystem::temp_directory_path() / "recall_model_test.XXXXXX").string();
      CHECK(mkdtemp(pattern.data()) != nullptr);
      root = pattern;
      for (const DType type : {DType::kF32, DType::kBF16}) {
        std::string& path = of[static_cast<size_t>(type)];
        path = (root / dtype_name(type)).string();
        recall::write_checkpoint({.folder = path, .dtype = type}).value();
      }
    }
    ~Folders() {
      std::error_code ignored;
      std::filesystem::remove_all(root, ignored);
    }
  };
  static const Folders folders;
  return folders.of[static_cast<size_t>(dtype)];
}

}  // namespace weft::testing
