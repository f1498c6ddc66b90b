// Which array of the data is which input of the model, and which is the target: told, of the same name, or the only way there is.
// Not here: reading either (data/, model/). Threads: any. Cost: none.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "memfit/data/dataset.h"
#include "memfit/model/model.h"

namespace memfit::train_cli {

struct KeyOptions {
  std::map<std::string, std::string> inputs;  // name of the model's input -> key of the data
  std::vector<std::string> targets;           // keys, in the loss's order; empty to find them
  std::size_t fewest_targets = 1, most_targets = 1;
};

struct KeyMatch {
  std::vector<std::size_t> inputs;   // fields, in the model's order
  std::vector<std::size_t> targets;  // fields, in the loss's order
};

/// Throws:   UsageError for an unknown name, with the nearest; for an input or target with none or several to choose from, listing
///           them; for a field whose type or shape is not the input's, with both.
KeyMatch match_keys(const std::vector<model::Input>& inputs, const std::vector<data::Field>& fields, const std::string& file, const KeyOptions& options);

/// "float32 [rows, 3, 8]".
std::string field_text(const data::Field& field);

}  // namespace memfit::train_cli
