// All tensors of a checkpoint folder, by name, wherever their file is.
//
// model.safetensors if it exists, else the shards that model.safetensors.index.json lists. The index and the
// shards must agree exactly: every listed tensor lies in the shard named for it, and a shard holds nothing
// else. Views live as long as the Checkpoint. Errors as in safetensors.h; kNotFound if the folder has neither
// file.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <string_view>

#include "proto/vocab/result.h"
#include "worker/model/safetensors.h"

namespace weft::worker {

class Checkpoint {
 public:
  struct Item {
    const Tensor* tensor = nullptr;
    std::string file;  // name without folder, for messages
  };

  static Result<Checkpoint> open(const std::string& folder);

  const std::map<std::string, Item, std::less<>>& items() const { return items_; }
  const Item* find(std::string_view name) const;

 private:
  Result<void> open_shards(const std::string& folder);

  std::deque<SafetensorsFile> files_;  // a deque: items point into its elements
  std::map<std::string, Item, std::less<>> items_;
};

}  // namespace weft::worker
