// Hash models, written when first asked for, in folders that go when the program does.
#pragma once

#include <map>
#include <string>

#include "tests/support/temp_folder.h"
#include "tools/hash_model/hash_checkpoint.h"

namespace weft::test {

// `name` stands for the options: one folder for each.
inline const std::string& hash_folder(const std::string& name, hash_checkpoint::Options options) {
  struct Folders {
    test::TempFolder root;
    std::map<std::string, std::string> of;
  };
  static Folders folders;
  auto [found, fresh] = folders.of.try_emplace(name, folders.root.file(name));
  if (fresh) {
    options.folder = found->second;
    hash_checkpoint::write_checkpoint(options).value();
  }
  return found->second;
}

}  // namespace weft::test
