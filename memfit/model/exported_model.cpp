#include "memfit/model/detail/exported_model.h"

#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/model/detail/program.h"

namespace memfit::model::detail {
namespace {

std::string rows_of(const at::Tensor& tensor) { return fmt::format("{} [{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", ")); }

std::string shape_of(const Input& input) {
  std::vector<std::string> words;
  for (const Dimension& dimension : *input.shape) words.push_back(dimension.size ? std::to_string(*dimension.size) : dimension.symbol);
  return fmt::format("{} [{}]", c10::toString(*input.type), fmt::join(words, ", "));
}

class ExportedModel : public Model {
 public:
  ExportedModel(Program program, std::optional<Program> eval, Weights weights)
      : program_(std::move(program)), eval_(std::move(eval)), weights_(std::move(weights)) {
    training_ = program_.graph->mode != Mode::Eval;
  }

  Format format() const override { return Format::Exported; }
  const std::vector<NamedTensor>& parameters() const override { return weights_.parameters; }
  const std::vector<NamedTensor>& buffers() const override { return weights_.buffers; }
  std::vector<NamedTensor> state() const override { return weights_.state; }
  const std::vector<Input>& inputs() const override { return program_.inputs; }
  bool is_training() const override { return training_; }

  Mode mode_of(bool training) const override { return !training && eval_ ? eval_->graph->mode : program_.graph->mode; }

  void train(bool on) override {
    const Mode mode = mode_of(on);
    if (on && mode == Mode::Eval) throw UsageError(*why_not_trainable());
    if (!on && mode == Mode::Train) {
      throw UsageError(fmt::format("{} was exported in training mode ({} says so) and cannot evaluate. Export it once more after model.eval() and give "
                                   "that file too.", program_.file, program_.graph->mode_node));
    }
    training_ = on;
  }

  std::optional<std::string> why_not_trainable() const override {
    if (program_.graph->mode == Mode::Eval) {
      return fmt::format("{} was exported in eval mode ({} says so). Call model.train() before torch.export.export.", program_.file, program_.graph->mode_node);
    }
    if (weights_.parameters.empty()) return fmt::format("{} has no parameters.", program_.file);
    const auto learns = [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); };
    if (std::ranges::none_of(weights_.parameters, learns)) return fmt::format("No parameter of {} requires gradients.", program_.file);
    return std::nullopt;
  }

  std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) override {
    const Program& program = !training_ && eval_ ? *eval_ : program_;
    check_inputs(program, inputs);
    std::vector<c10::IValue> values;
    for (const Source& source : program.sources) values.push_back(source.input >= 0 ? c10::IValue(inputs[static_cast<std::size_t>(source.input)]) : source.value);
    std::vector<c10::IValue> returned = run_graph(*program.graph, std::move(values));
    std::vector<at::Tensor> outputs;
    for (std::size_t i = 0; i < returned.size(); ++i) {
      if (const at::Tensor& target = program.mutated[i]; target.defined()) {
        const at::NoGradGuard no_grad;
        target.copy_(returned[i].toTensor());
      } else if (returned[i].isTensor()) {
        outputs.push_back(returned[i].toTensor());
      }
    }
    return outputs;
  }

 private:
  static void check_inputs(const Program& program, at::ArrayRef<at::Tensor> tensors) {
    if (tensors.size() != program.inputs.size()) {
      std::vector<std::string> names;
      for (const Input& input : program.inputs) names.push_back(input.name);
      throw UsageError(fmt::format("{} takes {} inputs ({}) and got {}.", program.file, names.size(), fmt::join(names, ", "), tensors.size()));
    }
    std::map<std::string, std::int64_t> symbols;
    for (std::size_t i = 0; i < tensors.size(); ++i) check_input(program, program.inputs[i], tensors[i], symbols);
  }

  static void check_input(const Program& program, const Input& input, const at::Tensor& tensor, std::map<std::string, std::int64_t>& symbols) {
    const auto fail = [&](const std::string& why) {
      throw UsageError(fmt::format("Input {} of {} takes {} and got {}{}", input.name, program.file, shape_of(input), rows_of(tensor), why));
    };
    if (tensor.scalar_type() != *input.type || tensor.dim() != static_cast<std::int64_t>(input.shape->size())) fail(".");
    for (std::int64_t d = 0; d < tensor.dim(); ++d) {
      const Dimension& dimension = (*input.shape)[static_cast<std::size_t>(d)];
      const std::int64_t size = tensor.size(d);
      if (dimension.size && *dimension.size != size) {
        fail(d == 0 ? fmt::format(": the batch of {} is baked in. Export with dynamic_shapes (torch.export.Dim), or give batches of that size.", *dimension.size) : ".");
      }
      if (dimension.size) continue;
      const auto range = program.ranges.find(dimension.symbol);
      if (range != program.ranges.end() && (size < range->second.first || size > range->second.second)) {
        fail(fmt::format(": {} must be from {} to {}. Export with another range (torch.export.Dim), or give batches inside it.", dimension.symbol,
                         range->second.first, range->second.second));
      }
      const auto [known, is_new] = symbols.try_emplace(dimension.symbol, size);
      if (!is_new && known->second != size) fail(fmt::format(": {} is {} elsewhere.", dimension.symbol, known->second));
    }
  }

  Program program_;
  std::optional<Program> eval_;
  Weights weights_;
  bool training_ = true;
};

}  // namespace

std::unique_ptr<Model> load_exported(Archive& archive, Archive* eval) {
  Weights weights;
  Program program = read_program(archive, weights, nullptr);
  std::optional<Program> eval_program;
  if (eval != nullptr) {
    Weights of_eval;
    eval_program = read_program(*eval, of_eval, &weights);
    if (eval_program->graph->mode == Mode::Train) eval->fail(fmt::format("was exported in training mode ({} says so), not after model.eval()", eval_program->graph->mode_node));
    if (program.graph->mode == Mode::Eval) archive.fail(fmt::format("was exported in eval mode ({} says so), and so was the other file", program.graph->mode_node));
  }
  return std::make_unique<ExportedModel>(std::move(program), std::move(eval_program), std::move(weights));
}

}  // namespace memfit::model::detail
