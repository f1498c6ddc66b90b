// TorchScript: PyTorch's own reader and interpreter, with its traps taken out: tied weights are tied again, no optimization
// changes the arithmetic, and a mode that was baked in at tracing is told.
#include <c10/util/Exception.h>
#include <fmt/ranges.h>
#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/script.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "memfit/core/error.h"
#include "memfit/model/detail/exported_model.h"

namespace memfit::model::detail {
namespace {

std::string first_line(std::string_view text) { return std::string(text.substr(0, text.find('\n'))); }

torch::jit::Module load_module(const Archive& archive) {
  try {
    return torch::jit::load(archive.path(), c10::kCPU);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    std::string what = first_line(error.what());
    if (const std::size_t at = std::string_view(error.what()).find("Unknown builtin op"); at != std::string_view::npos) {
      what = first_line(std::string_view(error.what()).substr(at)) + " (it comes from an extension or a newer PyTorch: export without it)";
    }
    archive.fail(fmt::format("TorchScript that this PyTorch ({}) cannot read: {}", TORCH_VERSION, what));
  }
}

/// Saving gives each name of a shared parameter a tensor of its own on the shared bytes: gradients would go separate ways.
void tie_again(const torch::jit::Module& root) {
  using Place = std::tuple<const void*, std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t, c10::ScalarType>;
  std::map<Place, at::Tensor> first;
  for (const torch::jit::Module& module : root.modules()) {
    for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
      if (!attribute.value.isTensor() || !attribute.value.toTensor().defined() || attribute.value.toTensor().numel() == 0) continue;
      const at::Tensor tensor = attribute.value.toTensor();
      const Place place(tensor.storage().unsafeGetStorageImpl(), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset(), tensor.scalar_type());
      const auto [known, is_new] = first.try_emplace(place, tensor);
      if (!is_new && !known->second.is_same(tensor)) torch::jit::Module(module).setattr(attribute.name, known->second);
    }
  }
}

/// What dropout and batch norm nodes say about a mode; `baked` where it is a constant.
struct Modes {
  bool train = false, eval = false, switchable = false;
  std::string node;
};

void notice(Modes& modes, const torch::jit::Node& node) {
  const c10::FunctionSchema* schema = node.maybeSchema();
  if (schema == nullptr) return;
  const std::string& name = schema->name();
  const bool drops = name.find("dropout") != std::string::npos, norm = name.find("batch_norm") != std::string::npos;
  const bool recurrent = schema->argumentIndexWithName("num_layers").has_value();
  if (!drops && !norm && !recurrent) return;
  const auto constant = [&](const char* argument) -> std::optional<c10::IValue> {
    const auto index = schema->argumentIndexWithName(argument);
    return index ? torch::jit::toIValue(node.input(static_cast<std::size_t>(*index))) : std::nullopt;
  };
  if (const auto share = constant(drops ? "p" : "dropout"); !norm && share && share->isDouble() && share->toDouble() == 0) return;
  if (!schema->argumentIndexWithName(norm ? "training" : "train")) return;
  const auto on = constant(norm ? "training" : "train");
  if (!on) {
    modes.switchable = true;
    return;
  }
  (on->toBool() ? modes.train : modes.eval) = true;
  if (modes.node.empty() || on->toBool()) modes.node = name;
}

void notice_block(Modes& modes, const torch::jit::Block& block) {
  for (const torch::jit::Node* node : block.nodes()) {
    notice(modes, *node);
    for (const torch::jit::Block* inner : node->blocks()) notice_block(modes, *inner);
  }
}

Modes find_modes(const torch::jit::Module& module) {
  const auto graph = module.get_method("forward").graph()->copy();
  torch::jit::Inline(*graph);
  Modes modes;
  notice_block(modes, *graph->block());
  return modes;
}

void flatten(const c10::IValue& value, std::vector<at::Tensor>& tensors) {
  if (value.isTensor()) {
    tensors.push_back(value.toTensor());
  } else if (value.isTuple()) {
    for (const c10::IValue& item : value.toTupleRef().elements()) flatten(item, tensors);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) flatten(item, tensors);
  } else if (value.isGenericDict()) {
    for (const auto& item : value.toGenericDict()) flatten(item.value(), tensors);
  }
}

class TorchScriptModel : public Model {
 public:
  TorchScriptModel(std::string file, torch::jit::Module module, std::optional<torch::jit::Module> eval)
      : file_(std::move(file)), module_(std::move(module)), eval_(std::move(eval)), modes_(find_modes(module_)) {
    if (eval_) {
      eval_modes_ = find_modes(*eval_);
      share_weights();
    }
    note(module_.named_parameters(), parameters_);
    note(module_.named_buffers(), buffers_);
    read_inputs();
    training_ = mode_of(true) != Mode::Eval;
    module_.train(training_);
  }

  Format format() const override { return Format::TorchScript; }
  const std::vector<NamedTensor>& parameters() const override { return parameters_; }
  const std::vector<NamedTensor>& buffers() const override { return buffers_; }
  const std::vector<Input>& inputs() const override { return inputs_; }
  bool is_training() const override { return training_; }

  std::vector<NamedTensor> state() const override {
    std::vector<NamedTensor> all;
    for (const auto& parameter : module_.named_parameters()) all.push_back({parameter.name, parameter.value});
    for (const auto& buffer : module_.named_buffers()) all.push_back({buffer.name, buffer.value});
    return all;
  }

  Mode mode_of(bool training) const override {
    const Modes& modes = !training && eval_ ? eval_modes_ : modes_;
    if (modes.train) return Mode::Train;
    if (modes.eval && !(modes.switchable && training)) return Mode::Eval;
    return modes.switchable ? (training ? Mode::Train : Mode::Eval) : Mode::Either;
  }

  void train(bool on) override {
    if (on && mode_of(true) == Mode::Eval) throw UsageError(*why_not_trainable());
    if (!on && mode_of(false) == Mode::Train) {
      throw UsageError(fmt::format("{} was traced in training mode ({} is fixed in it) and cannot evaluate. Use torch.jit.script, or trace it once more after "
                                   "model.eval() and give that file too.", file_, modes_.node));
    }
    training_ = on;
    module_.train(on);
  }

  std::optional<std::string> why_not_trainable() const override {
    if (parameters_.empty()) {
      return fmt::format("{} has no parameters: it was frozen (torch.jit.freeze or optimize_for_inference) or never had any. Save it before freezing.", file_);
    }
    if (mode_of(true) == Mode::Eval) return fmt::format("{} was traced in eval mode ({} is fixed in it). Call model.train() before torch.jit.trace.", file_, modes_.node);
    if (std::ranges::none_of(parameters_, [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); })) {
      return fmt::format("No parameter of {} requires gradients.", file_);
    }
    return std::nullopt;
  }

  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) override {
    if (inputs.size() != inputs_.size()) {
      std::vector<std::string> names;
      for (const Input& input : inputs_) names.push_back(input.name);
      throw UsageError(fmt::format("{} takes {} inputs ({}) and got {}.", file_, inputs_.size(), fmt::join(names, ", "), inputs.size()));
    }
    // The optimizing executors fuse and differentiate by rules of their own: other bits, other memory.
    const torch::jit::GraphOptimizerEnabledGuard as_written(false);
    torch::jit::Module& module = !training_ && eval_ ? *eval_ : module_;
    std::vector<at::Tensor> outputs;
    flatten(module.forward(std::vector<c10::IValue>(inputs.begin(), inputs.end())), outputs);
    return outputs;
  }

 private:
  static void note(const auto& named, std::vector<NamedTensor>& once) {
    std::set<const void*> seen;
    for (const auto& one : named) {
      if (seen.insert(one.value.unsafeGetTensorImpl()).second) once.push_back({one.name, one.value});
    }
  }

  void share_weights() {
    std::map<std::string, at::Tensor> ours;
    for (const auto& attribute : module_.named_attributes()) {
      if (attribute.value.isTensor()) ours[attribute.name] = attribute.value.toTensor();
    }
    for (const auto& owner : eval_->named_modules()) {
      for (const auto& attribute : owner.value.named_attributes(/*recurse=*/false)) {
        if (!attribute.value.isTensor()) continue;
        const std::string name = owner.name.empty() ? attribute.name : owner.name + "." + attribute.name;
        if (!ours.contains(name)) throw BadInput(file_, 0, fmt::format("has no {}, which the eval export uses: they are not one model", name));
        torch::jit::Module(owner.value).setattr(attribute.name, ours.at(name));
      }
    }
  }

  void read_inputs() {
    for (const c10::Argument& argument : module_.get_method("forward").function().getSchema().arguments()) {
      if (argument.name() == "self" || argument.default_value()) continue;
      if (argument.type()->kind() != c10::TypeKind::TensorType) {
        throw BadInput(file_, 0, fmt::format("forward() takes {} as {}; only tensors are given. Wrap the model in one whose forward() takes tensors.",
                                             argument.name(), argument.type()->str()));
      }
      inputs_.push_back({argument.name(), std::nullopt, std::nullopt});
    }
  }

  std::string file_;
  torch::jit::Module module_;
  std::optional<torch::jit::Module> eval_;
  Modes modes_, eval_modes_;
  std::vector<NamedTensor> parameters_, buffers_;
  std::vector<Input> inputs_;
  bool training_ = true;
};

}  // namespace

std::unique_ptr<Model> load_torchscript(Archive& archive, Archive* eval) {
  torch::jit::Module module = load_module(archive);
  if (!module.find_method("forward")) archive.fail("TorchScript without a method forward()");
  tie_again(module);
  std::optional<torch::jit::Module> eval_module;
  if (eval != nullptr) {
    eval_module = load_module(*eval);
    eval_module->eval();
    if (!eval_module->find_method("forward")) eval->fail("TorchScript without a method forward()");
  }
  return std::make_unique<TorchScriptModel>(archive.path(), std::move(module), std::move(eval_module));
}

}  // namespace memfit::model::detail
