#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "memfit/core/error.h"
#include "memfit/model/detail/graph.h"
#include "memfit/model/detail/schema_numbers.h"

namespace memfit::model::detail {
namespace {

using Json = nlohmann::json;
using c10::IValue;

constexpr std::string_view kOperators = "torch.ops.";
constexpr std::string_view kGradMode = "torch.ops.higher_order.wrap_with_set_grad_enabled";

constexpr std::array<std::pair<std::string_view, SymbolicOp>, 22> kSymbolic{{{"_operator.add", SymbolicOp::Add}, {"_operator.sub", SymbolicOp::Sub},
    {"_operator.mul", SymbolicOp::Mul}, {"_operator.floordiv", SymbolicOp::FloorDiv}, {"_operator.mod", SymbolicOp::Mod},
    {"_operator.truediv", SymbolicOp::TrueDiv}, {"_operator.pow", SymbolicOp::Pow}, {"_operator.neg", SymbolicOp::Neg},
    {"_operator.eq", SymbolicOp::Eq}, {"_operator.ne", SymbolicOp::Ne}, {"_operator.lt", SymbolicOp::Lt}, {"_operator.le", SymbolicOp::Le},
    {"_operator.gt", SymbolicOp::Gt}, {"_operator.ge", SymbolicOp::Ge}, {"_operator.and_", SymbolicOp::And}, {"_operator.or_", SymbolicOp::Or},
    {"torch.sym_not", SymbolicOp::Not}, {"torch.sym_int", SymbolicOp::ToInt}, {"math.trunc", SymbolicOp::ToInt}, {"torch.sym_float", SymbolicOp::ToFloat},
    {"torch.sym_max", SymbolicOp::Max}, {"torch.sym_min", SymbolicOp::Min}}};

/// {"as_int": 3} -> "as_int", 3
std::pair<std::string, const Json&> only_member(const Json& json) {
  if (!json.is_object() || json.size() != 1) throw std::invalid_argument("expected an object of one member");
  return {json.begin().key(), json.begin().value()};
}

double read_float(const Json& json) {
  if (!json.is_string()) return json.get<double>();
  const auto& word = json.get_ref<const std::string&>();  // JSON has no numbers for these
  if (word == "Infinity") return std::numeric_limits<double>::infinity();
  if (word == "-Infinity") return -std::numeric_limits<double>::infinity();
  if (word == "NaN") return std::numeric_limits<double>::quiet_NaN();
  throw std::invalid_argument("a float that is \"" + word + "\"");
}

class GraphReader {
 public:
  GraphReader(const Json& json, const std::string& file) : json_(json), file_(file) {}

  std::shared_ptr<const Graph> read() {
    for (const Json& input : json_.at("inputs")) {
      // A constant input makes no value; its place is kept.
      const std::string name = value_name(input);
      graph_->inputs.push_back(define(name.empty() ? fmt::format("constant input {}", graph_->inputs.size()) : name));
    }
    for (const Json& node : json_.at("nodes")) {
      try {
        read_node(node);
      } catch (const Json::exception& error) {
        fail(node, fmt::format("malformed ({})", error.what()));
      } catch (const std::invalid_argument& error) {
        fail(node, error.what());
      }
    }
    for (const Json& output : json_.at("outputs")) graph_->outputs.push_back(read_operand(output));
    graph_->slots = static_cast<int>(slots_.size());
    mark_last_uses();
    return graph_;
  }

 private:
  [[noreturn]] void fail(const Json& node, const std::string& reason) const {
    const std::string name = node.is_object() && node.contains("target") && node["target"].is_string() ? node["target"].get<std::string>() : "?";
    throw BadInput(file_, 0, fmt::format("node {} ({}): {}", graph_->nodes.size(), name, reason));
  }

  int define(const std::string& name) {
    const auto [place, is_new] = slots_.try_emplace(name, static_cast<int>(slots_.size()));
    if (!is_new) throw std::invalid_argument(fmt::format("value {} is made twice", name));
    return place->second;
  }

  int find(const std::string& name) const {
    const auto place = slots_.find(name);
    if (place == slots_.end()) throw std::invalid_argument(fmt::format("value {} is used before it is made", name));
    return place->second;
  }

  /// The name of a graph's input; "" for a constant, which makes no value.
  static std::string value_name(const Json& argument) {
    const auto [kind, json] = only_member(argument);
    if (kind == "as_tensor" || kind == "as_custom_obj") return json.at("name").get<std::string>();
    if (json.is_object() && json.contains("as_name")) return json.at("as_name").get<std::string>();
    if (kind == "as_graph") return json.at("name").get<std::string>();
    if (kind == "as_none" || kind == "as_int" || kind == "as_float" || kind == "as_bool" || kind == "as_string") return "";
    throw std::invalid_argument(fmt::format("an input of kind {}", kind));
  }

  Operand slot_operand(const std::string& name) const {
    Operand operand;
    operand.slot = find(name);
    return operand;
  }
  static Operand constant(IValue value) {
    Operand operand;
    operand.constant = std::move(value);
    return operand;
  }

  Operand list_operand(const Json& json, const auto& read_item) const {
    std::vector<Operand> items;
    for (const Json& item : json) items.push_back(read_item(item));
    Operand operand;
    if (std::ranges::all_of(items, &Operand::is_constant)) {
      c10::impl::GenericList list(c10::AnyType::get());
      for (Operand& item : items) list.push_back(std::move(item.constant));
      operand.constant = std::move(list);
    } else {
      operand.items = std::move(items);
    }
    return operand;
  }

  /// A size, a truth value or a float that is a number or the name of a value.
  Operand read_symbolic(const Json& argument) const {
    const auto [kind, json] = only_member(argument);
    if (kind == "as_name") return slot_operand(json.get<std::string>());
    if (kind == "as_int") return constant(json.get<std::int64_t>());
    if (kind == "as_float") return constant(read_float(json));
    if (kind == "as_bool") return constant(json.get<bool>());
    throw std::invalid_argument(fmt::format("an argument of kind {}", kind));
  }

  Operand read_operand(const Json& argument) const {
    const auto [kind, json] = only_member(argument);
    const auto tensor = [this](const Json& item) { return slot_operand(item.at("name").get<std::string>()); };
    const auto optional_tensor = [&](const Json& item) {
      const auto [is, inner] = only_member(item);
      return is == "as_none" ? constant(IValue()) : tensor(inner);
    };
    const auto symbolic = [this](const Json& item) { return read_symbolic(item); };
    if (kind == "as_none") return constant(IValue());
    if (kind == "as_tensor") return tensor(json);
    if (kind == "as_tensors") return list_operand(json, tensor);
    if (kind == "as_optional_tensor") return optional_tensor(json);
    if (kind == "as_optional_tensors") return list_operand(json, optional_tensor);
    if (kind == "as_int") return constant(json.get<std::int64_t>());
    if (kind == "as_ints") return list_operand(json, [](const Json& item) { return constant(item.get<std::int64_t>()); });
    if (kind == "as_float") return constant(read_float(json));
    if (kind == "as_floats") return list_operand(json, [](const Json& item) { return constant(read_float(item)); });
    if (kind == "as_bool") return constant(json.get<bool>());
    if (kind == "as_bools") return list_operand(json, [](const Json& item) { return constant(item.get<bool>()); });
    if (kind == "as_string") return constant(json.get<std::string>());
    if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") return read_symbolic(json);
    if (kind == "as_sym_ints" || kind == "as_sym_floats" || kind == "as_sym_bools") return list_operand(json, symbolic);
    if (kind == "as_scalar_type") return constant(static_cast<std::int64_t>(scalar_type_of(json.get<int>())));
    if (kind == "as_memory_format") return constant(static_cast<std::int64_t>(memory_format_of(json.get<int>())));
    if (kind == "as_layout") return constant(static_cast<std::int64_t>(layout_of(json.get<int>())));
    if (kind == "as_device") return constant(device_of(json));
    if (kind == "as_graph") {
      Operand operand;
      operand.graph = read_graph(json.at("graph"), file_);
      return operand;
    }
    throw std::invalid_argument(fmt::format("an argument of kind {} is not supported", kind));
  }

  Result read_result(const Json& argument) {
    const auto [kind, json] = only_member(argument);
    Result result;
    if (kind == "as_tensor") {
      result.slot = define(json.at("name").get<std::string>());
    } else if (kind == "as_tensors") {
      result.items.emplace();
      for (const Json& item : json) result.items->push_back(define(item.at("name").get<std::string>()));
    } else if (kind == "as_optional_tensor") {
      if (json.contains("as_tensor")) result.slot = define(json.at("as_tensor").at("name").get<std::string>());
    } else if (kind == "as_sym_int" || kind == "as_sym_float" || kind == "as_sym_bool") {
      result.slot = define(json.at("as_name").get<std::string>());
    } else if (kind != "as_none") {
      throw std::invalid_argument(fmt::format("a result of kind {} is not supported", kind));
    }
    return result;
  }

  void read_node(const Json& json) {
    Node node;
    node.target = json.at("target").get<std::string>();
    const Json& inputs = json.at("inputs");
    const auto symbolic = std::ranges::find(kSymbolic, std::string_view(node.target), &std::pair<std::string_view, SymbolicOp>::first);
    if (symbolic != kSymbolic.end()) {
      node.symbolic = symbolic->second;
      for (const Json& input : inputs) node.operands.push_back(read_operand(input.at("arg")));
      const bool unary = node.symbolic == SymbolicOp::Neg || node.symbolic == SymbolicOp::Not || node.symbolic == SymbolicOp::ToInt ||
                         node.symbolic == SymbolicOp::ToFloat;
      if (node.operands.size() != (unary ? 1 : 2)) throw std::invalid_argument("wrong number of arguments");
    } else if (node.target == kGradMode) {
      for (const Json& input : inputs) node.operands.push_back(read_operand(input.at("arg")));
      if (node.operands.size() < 2 || !node.operands[0].constant.isBool() || !node.operands[1].graph ||
          node.operands[1].graph->inputs.size() != node.operands.size() - 2) {
        throw std::invalid_argument("its arguments are not a mode, a graph and the graph's inputs");
      }
    } else {
      read_operator(node, inputs);
    }
    for (const Json& output : json.at("outputs")) node.results.push_back(read_result(output));
    node.name = json.contains("name") && json["name"].is_string() ? json["name"].get<std::string>() : fmt::format("node {}", graph_->nodes.size());
    notice_mode(node);
    graph_->nodes.push_back(std::move(node));
  }

  /// "torch.ops.aten.add.Tensor" is aten::add, overload Tensor.
  void read_operator(Node& node, const Json& inputs) const {
    if (node.target.starts_with("torch.ops.higher_order.")) {
      throw std::invalid_argument(
          "control flow that depends on data, or another operator that takes functions, is not run; export a model without it (torch.where instead of "
          "torch.cond), or train it in Python under `memfit run`");
    }
    if (!node.target.starts_with(kOperators)) throw std::invalid_argument("not an operator of PyTorch");
    const std::string path = node.target.substr(kOperators.size());
    const std::size_t first = path.find('.'), last = path.rfind('.');
    if (first == std::string::npos || first == last) throw std::invalid_argument("not the name of an operator");
    const std::string overload = path.substr(last + 1);
    node.op = c10::Dispatcher::singleton().findSchema({path.substr(0, first) + "::" + path.substr(first + 1, last - first - 1), overload == "default" ? "" : overload});
    if (!node.op) {
      throw std::invalid_argument("this build of PyTorch has no such operator; it comes from an extension or a newer PyTorch. Export with "
                                  "run_decompositions() or without the extension's layer");
    }
    read_arguments(node, inputs);
  }

  void read_arguments(Node& node, const Json& inputs) const {
    const auto& arguments = node.op->schema().arguments();
    std::vector<bool> used(inputs.size());
    for (const c10::Argument& argument : arguments) {
      std::size_t at = 0;
      while (at < inputs.size() && inputs[at].at("name") != argument.name()) ++at;
      if (at == inputs.size()) {
        if (!argument.default_value()) throw std::invalid_argument(fmt::format("argument {} is missing", argument.name()));
        node.operands.push_back(constant(*argument.default_value()));
        continue;
      }
      used[at] = true;
      Operand operand = read_operand(inputs[at].at("arg"));
      if (operand.is_constant()) operand.constant = convert(std::move(operand.constant), argument.type(), argument.N());
      if (operand.is_constant() && !operand.constant.isNone() && !operand.constant.type()->isSubtypeOf(*argument.type()) && !operand.constant.isScalar()) {
        throw std::invalid_argument(fmt::format("argument {} is a {} and the operator takes a {}", argument.name(), operand.constant.type()->str(), argument.type()->str()));
      }
      node.operands.push_back(std::move(operand));
    }
    const auto unknown = std::ranges::find(used, false);
    if (unknown != used.end()) {
      const Json& input = inputs[static_cast<std::size_t>(unknown - used.begin())];
      throw std::invalid_argument(fmt::format("argument {} is unknown to this build's operator {}", input.at("name").dump(), c10::toString(node.op->schema())));
    }
  }

  std::optional<IValue> constant_argument(const Node& node, std::string_view name) const {
    const auto& arguments = node.op->schema().arguments();
    for (std::size_t i = 0; i < arguments.size(); ++i) {
      if (arguments[i].name() == name && node.operands[i].is_constant()) return node.operands[i].constant;
    }
    return std::nullopt;
  }

  /// Dropout, batch norm and the like carry the mode they were exported in. One that is on says Train: parts of a model may
  /// be kept in eval mode while the rest is trained.
  void notice_mode(const Node& node) {
    const auto found = [&](Mode mode) {
      if (graph_->mode == Mode::Train || graph_->mode == mode) return;
      graph_->mode = mode;
      graph_->mode_node = fmt::format("{} ({})", node.name, node.target);
    };
    for (const Operand& operand : node.operands) {
      if (operand.graph && operand.graph->mode != Mode::Either) found(operand.graph->mode);
    }
    if (!node.op) return;
    const auto chance = constant_argument(node, "dropout_p");
    if (chance && chance->isDouble() && chance->toDouble() > 0) return found(Mode::Train);
    const std::string& name = node.op->schema().name();
    const bool drops = name.find("dropout") != std::string::npos, norm = name.find("batch_norm") != std::string::npos;
    const bool recurrent = constant_argument(node, "num_layers").has_value();
    if (!drops && !norm && !recurrent) return;
    const auto share = constant_argument(node, drops ? "p" : "dropout");
    if (!norm && share && share->isDouble() && share->toDouble() == 0) return;
    const auto on = constant_argument(node, norm ? "training" : "train");
    if (on && on->isBool()) found(on->toBool() ? Mode::Train : Mode::Eval);
  }

  void mark_last_uses() {
    std::vector<bool> seen(slots_.size());
    const auto see = [&](const Operand& operand, auto& self, std::vector<int>* last) -> void {
      if (operand.slot >= 0 && !seen[static_cast<std::size_t>(operand.slot)]) {
        seen[static_cast<std::size_t>(operand.slot)] = true;
        if (last != nullptr) last->push_back(operand.slot);
      }
      if (operand.items) {
        for (const Operand& item : *operand.items) self(item, self, last);
      }
    };
    for (const Operand& output : graph_->outputs) see(output, see, nullptr);
    for (auto node = graph_->nodes.rbegin(); node != graph_->nodes.rend(); ++node) {
      // What a node makes and nobody takes is dropped at once.
      for (const Result& result : node->results) {
        Operand made;
        made.slot = result.slot;
        see(made, see, &node->last_uses);
        for (const int slot : result.items.value_or(std::vector<int>{})) {
          made.slot = slot;
          see(made, see, &node->last_uses);
        }
      }
      for (const Operand& operand : node->operands) see(operand, see, &node->last_uses);
    }
  }

  const Json& json_;
  const std::string& file_;
  std::shared_ptr<Graph> graph_ = std::make_shared<Graph>();
  std::map<std::string, int> slots_;
};

}  // namespace

std::shared_ptr<const Graph> read_graph(const Json& graph, const std::string& file) {
  try {
    return GraphReader(graph, file).read();
  } catch (const Json::exception& error) {
    throw BadInput(file, 0, fmt::format("the program's graph is malformed ({})", error.what()));
  } catch (const std::invalid_argument& error) {
    throw BadInput(file, 0, fmt::format("the program's graph is malformed: {}", error.what()));
  }
}

}  // namespace memfit::model::detail
