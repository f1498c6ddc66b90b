#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <cmath>

#include "memfit/model/detail/graph.h"

namespace memfit::model::detail {
namespace {

using c10::IValue;

class Run {
 public:
  explicit Run(const Graph& graph) : graph_(graph), values_(static_cast<std::size_t>(graph.slots)) {}

  IValue value(const Operand& operand) const {
    if (operand.slot >= 0) return values_[static_cast<std::size_t>(operand.slot)];
    if (!operand.items) return operand.constant;
    c10::impl::GenericList list(c10::AnyType::get());
    for (const Operand& item : *operand.items) list.push_back(value(item));
    return list;
  }

  void put(int slot, IValue value) {
    if (slot < 0) return;
    if (value.isSymInt()) value = value.toSymInt().guard_int(__FILE__, __LINE__);
    values_[static_cast<std::size_t>(slot)] = std::move(value);
  }

  void execute(const Node& node) {
    std::vector<IValue> returned = node.op ? call(node) : node.symbolic ? std::vector<IValue>{arithmetic(node)} : call_graph(node);
    TORCH_CHECK(returned.size() >= node.results.size(), "node ", node.name, " has ", node.results.size(), " results and ", node.target, " gave ",
                returned.size());
    for (std::size_t i = 0; i < node.results.size(); ++i) {
      const Result& result = node.results[i];
      if (!result.items) {
        put(result.slot, std::move(returned[i]));
        continue;
      }
      const auto items = returned[i].toListRef();
      TORCH_CHECK(items.size() == result.items->size(), "node ", node.name, " (", node.target, ") gave ", items.size(), " tensors where the program has ",
                  result.items->size(), ": a size is baked into it");
      for (std::size_t k = 0; k < items.size(); ++k) put((*result.items)[k], items[k]);
    }
    returned.clear();
    for (const int slot : node.last_uses) values_[static_cast<std::size_t>(slot)] = IValue();
  }

 private:
  std::vector<IValue> call(const Node& node) const {
    const auto& arguments = node.op->schema().arguments();
    torch::jit::Stack stack;
    stack.reserve(arguments.size());
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      const Operand& operand = node.operands[i];
      if (operand.is_constant()) {
        stack.push_back(operand.constant);
      } else {
        stack.push_back(convert(value(operand), arguments[i].type(), arguments[i].N()));
      }
    }
    node.op->callBoxed(stack);
    return stack;
  }

  /// wrap_with_set_grad_enabled(on, graph, values...)
  std::vector<IValue> call_graph(const Node& node) const {
    const at::AutoGradMode mode(node.operands[0].constant.toBool());
    std::vector<IValue> inputs;
    for (std::size_t i = 2; i < node.operands.size(); ++i) inputs.push_back(value(node.operands[i]));
    std::vector<IValue> returned = run_graph(*node.operands[1].graph, std::move(inputs));
    if (node.results.size() != 1 || !node.results[0].items) return returned;
    c10::impl::GenericList list(c10::AnyType::get());
    for (IValue& one : returned) list.push_back(std::move(one));
    return {list};
  }

  IValue arithmetic(const Node& node) const {
    const IValue a = value(node.operands[0]);
    const IValue b = node.operands.size() > 1 ? value(node.operands[1]) : IValue();
    switch (*node.symbolic) {
      case SymbolicOp::Not: return !a.toBool();
      case SymbolicOp::And: return a.toBool() && b.toBool();
      case SymbolicOp::Or: return a.toBool() || b.toBool();
      case SymbolicOp::ToFloat: return a.toScalar().toDouble();
      case SymbolicOp::ToInt: return a.toScalar().toLong();
      case SymbolicOp::TrueDiv: return a.toScalar().toDouble() / b.toScalar().toDouble();
      default: break;
    }
    if (a.isDouble() || b.isDouble()) return on_numbers(*node.symbolic, a.toScalar().toDouble(), b.isNone() ? 0.0 : b.toScalar().toDouble());
    return on_numbers(*node.symbolic, a.toInt(), b.isNone() ? std::int64_t{0} : b.toInt());
  }

  static double floor_divide(double a, double b) { return std::floor(a / b); }
  static std::int64_t floor_divide(std::int64_t a, std::int64_t b) {
    TORCH_CHECK(b != 0, "a size is divided by zero");
    const std::int64_t quotient = a / b;
    return a % b != 0 && (a < 0) != (b < 0) ? quotient - 1 : quotient;
  }
  static double power(double a, double b) { return std::pow(a, b); }
  static std::int64_t power(std::int64_t a, std::int64_t b) {
    std::int64_t result = 1;
    for (std::int64_t i = 0; i < b; ++i) {
      TORCH_CHECK(!__builtin_mul_overflow(result, a, &result), "a size overflows 63 bits");
    }
    return result;
  }

  template <typename T>
  static IValue on_numbers(SymbolicOp op, T a, T b) {
    switch (op) {
      case SymbolicOp::Add: return a + b;
      case SymbolicOp::Sub: return a - b;
      case SymbolicOp::Mul: return a * b;
      case SymbolicOp::FloorDiv: return floor_divide(a, b);
      case SymbolicOp::Mod: return a - floor_divide(a, b) * b;
      case SymbolicOp::Pow: return power(a, b);
      case SymbolicOp::Neg: return -a;
      case SymbolicOp::Min: return std::min(a, b);
      case SymbolicOp::Max: return std::max(a, b);
      case SymbolicOp::Eq: return a == b;
      case SymbolicOp::Ne: return a != b;
      case SymbolicOp::Lt: return a < b;
      case SymbolicOp::Le: return a <= b;
      case SymbolicOp::Gt: return a > b;
      case SymbolicOp::Ge: return a >= b;
      default: TORCH_INTERNAL_ASSERT(false, "not on numbers");
    }
  }

  const Graph& graph_;
  std::vector<IValue> values_;
};

}  // namespace

std::vector<IValue> run_graph(const Graph& graph, std::vector<IValue> inputs) {
  TORCH_INTERNAL_ASSERT(inputs.size() == graph.inputs.size());
  Run run(graph);
  for (std::size_t i = 0; i < inputs.size(); ++i) run.put(graph.inputs[i], std::move(inputs[i]));
  inputs.clear();
  for (const Node& node : graph.nodes) run.execute(node);
  std::vector<IValue> outputs;
  for (const Operand& output : graph.outputs) outputs.push_back(run.value(output));
  return outputs;
}

}  // namespace memfit::model::detail
