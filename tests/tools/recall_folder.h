// The recall model, written once per test program, in a folder that goes when the program does.
#pragma once

#include <string>

#include "tests/support/temp_folder.h"
#include "tools/recall_model/checkpoint_writer.h"

namespace weft::test {

inline const std::string& recall_folder(DType dtype) {
  struct Folders {
    test::TempFolder root;
    std::string of[2];
    Folders() {
      for (const DType type : {DType::kF32, DType::kBF16}) {
        std::string& path = of[static_cast<size_t>(type)];
        path = root.file(dtype_name(type));
        recall::write_checkpoint({.folder = path, .dtype = type}).value();
      }
    }
  };
  static const Folders folders;
  return folders.of[static_cast<size_t>(dtype)];
}

}  // namespace weft::test
