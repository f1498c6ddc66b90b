// One parameter of an optimizer with its state, and a group of them: the private parts of Optimizer.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "memfit/optim/optimizer.h"

namespace memfit::optim {

/// One state tensor as it is kept. `values` has the parameter's layout with Full; flat bfloat16 or codes otherwise.
struct Optimizer::Stored {
  at::Tensor values;
  at::Tensor scales;  // of Int8Blockwise
};

struct Optimizer::Entry {
  std::string name;
  at::Tensor parameter;
  std::int64_t steps = 0;
  std::vector<Stored> state;       // by slot; empty before the first step
  bool done = false;               // in the step that goes on
  std::int64_t done_elements = 0;  // of a parameter that goes in pieces
};

struct Optimizer::Group {
  std::string name;
  double learning_rate = 0, weight_decay = 0;
  std::vector<Entry> entries;
};

}  // namespace memfit::optim
