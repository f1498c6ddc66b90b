// An exported graph made ready to run: operators looked up, constants converted, every value a numbered slot that is
// emptied after its last use.
// Not here: where weights come from (exported_model.cpp). Threads: run() of one graph on one thread at a time.
// Cost: reading is linear in the file; about 1 us a node when run, beside the operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memfit/model/model.h"

namespace memfit::model::detail {

struct Graph;

/// A constant, a value, a list of such, or a graph (of the few operators that take one).
struct Operand {
  c10::IValue constant;
  int slot = -1;
  std::optional<std::vector<Operand>> items;
  std::shared_ptr<const Graph> graph;
  bool is_constant() const { return slot < 0 && !items && !graph; }
};

/// Where one result goes: a slot, one slot an element of a list, or nowhere (-1).
struct Result {
  int slot = -1;
  std::optional<std::vector<int>> items;
};

enum class SymbolicOp { Add, Sub, Mul, FloorDiv, Mod, TrueDiv, Pow, Neg, Min, Max, Eq, Ne, Lt, Le, Gt, Ge, And, Or, Not, ToInt, ToFloat };

struct Node {
  std::string name;    // of its first result, for messages
  std::string target;  // as the file says it
  // What is called: an operator of the dispatcher, arithmetic on sizes, or a graph under another gradient mode.
  std::optional<c10::OperatorHandle> op;
  std::optional<SymbolicOp> symbolic;
  std::vector<Operand> operands;  // one an argument of the schema, in its order
  std::vector<Result> results;
  std::vector<int> last_uses;     // slots that are empty afterwards
};

struct Graph {
  std::vector<int> inputs;  // slots
  std::vector<Node> nodes;
  std::vector<Operand> outputs;
  int slots = 0;
  Mode mode = Mode::Either;
  std::string mode_node;  // "dropout_3 (dropout)": what told the mode
};

/// Reads the graph of a serialized program (the object with "nodes", "inputs" and "outputs").
/// Throws:   BadInput(file) naming the node and the operator that is unknown, lacking or refused.
std::shared_ptr<const Graph> read_graph(const nlohmann::json& graph, const std::string& file);

/// Requires: one value an input. Returns the values of graph.outputs.
std::vector<c10::IValue> run_graph(const Graph& graph, std::vector<c10::IValue> inputs);

/// `value` as an argument of this type takes it: numbers become tensors or floats, one number a list of `length`.
c10::IValue convert(c10::IValue value, const c10::TypePtr& type, std::optional<int> length);

}  // namespace memfit::model::detail
