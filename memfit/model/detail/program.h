// A serialized torch.export program: its graph, and what each of the graph's inputs and outputs stands for.
// Not here: running it as a Model (exported_model.cpp). Threads: one. Cost: weights are read once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "memfit/model/detail/archive.h"
#include "memfit/model/detail/graph.h"

namespace memfit::model::detail {

/// Where a graph's input comes from: the caller's input of that number, or a weight, buffer or constant.
struct Source {
  int input = -1;
  c10::IValue value;
};

struct Program {
  std::string file;
  std::shared_ptr<const Graph> graph;
  std::vector<Source> sources;                                          // one an input of the graph
  std::vector<at::Tensor> mutated;                                      // one an output: the buffer it is written to, or undefined
  std::vector<Input> inputs;                                            // the caller's
  std::map<std::string, std::pair<std::int64_t, std::int64_t>> ranges;  // of symbols
};

struct Weights {
  std::map<std::string, at::Tensor> by_name;
  std::vector<NamedTensor> parameters, buffers;  // each once
  std::vector<NamedTensor> state;                // all persistent names
};

/// Read the program of `archive` and fill `weights`, from `shared` where that is given: then no weights are read.
Program read_program(Archive& archive, Weights& weights, const Weights* shared);

/// The tensors of "data/weights" or "data/constants" by name. Those of one record and one shape are one tensor.
void read_tensors(Archive& archive, const std::string& folder, const std::string& config, std::map<std::string, at::Tensor>& tensors);

}  // namespace memfit::model::detail
