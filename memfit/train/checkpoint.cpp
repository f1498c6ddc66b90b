#include "memfit/train/checkpoint.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <map>
#include <mutex>

#include "memfit/core/error.h"
#include "memfit/optim/autocast.h"

namespace memfit::train {
namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// What the first run found, to be found again by the second.
struct Surroundings {
  std::vector<at::Generator> generators;
  std::vector<Tensor> generator_states;
  std::vector<Tensor> buffers, buffer_values;
  std::map<c10::DeviceType, std::pair<bool, at::ScalarType>> autocast;

  static Surroundings now(const CheckpointOptions& options) {
    Surroundings s;
    s.generators = options.generators;
    s.generators.push_back(at::detail::getDefaultCPUGenerator());
    for (const auto& g : s.generators) s.generator_states.push_back(state_of(g));
    s.buffers = options.buffers;
    // variable_data(): a copy into it does not count as a change that autograd must refuse.
    for (const Tensor& b : s.buffers) s.buffer_values.push_back(b.variable_data().clone());
    for (const auto device : {c10::DeviceType::CPU, c10::DeviceType::CUDA}) {
      s.autocast[device] = {at::autocast::is_autocast_enabled(device), at::autocast::get_autocast_dtype(device)};
    }
    return s;
  }

  void enter() const {
    at::NoGradGuard no_grad;
    optim::Autocast::forget_weights();
    for (std::size_t i = 0; i < generators.size(); ++i) {
      at::Generator g = generators[i];
      std::lock_guard<std::mutex> lock(g.mutex());
      g.set_state(generator_states[i]);
    }
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].variable_data().copy_(buffer_values[i]);
    for (const auto& [device, mode] : autocast) {
      at::autocast::set_autocast_enabled(device, mode.first);
      at::autocast::set_autocast_dtype(device, mode.second);
    }
  }

  static Tensor state_of(at::Generator g) {
    std::lock_guard<std::mutex> lock(g.mutex());
    return g.get_state();
  }
};

struct Part : torch::CustomClassHolder {
  TensorFunction function;
  CheckpointOptions options;
  Surroundings first;
};

/// Puts the surroundings of backward back however the second run ends.
struct Visit {
  explicit Visit(const Part& part) : outside(Surroundings::now(part.options)) { part.first.enter(); }
  ~Visit() { outside.enter(); }
  Surroundings outside;
};

struct Recompute : torch::autograd::Function<Recompute> {
  static variable_list forward(AutogradContext* context, c10::intrusive_ptr<Part> part, const Tensor& anchor, at::TensorList inputs) {
    context->saved_data["part"] = c10::IValue::make_capsule(part);
    std::vector<Tensor> outputs = part->function(inputs.vec());  // without a graph: custom functions run forward so
    // Its casts of weights know of no gradient; whoever uses the weight next must not get them.
    optim::Autocast::forget_weights();
    if (outputs.empty()) throw UsageError("checkpoint: the function gave no tensor.");
    std::vector<Tensor> plain;
    for (Tensor& o : outputs) {
      // An input that is handed through must not be taken for a result computed here.
      for (const Tensor& in : inputs) {
        if (o.is_same(in)) o = o.view_as(o);
      }
      if (!at::isFloatingType(o.scalar_type()) && !at::isComplexType(o.scalar_type())) plain.push_back(o);
    }
    context->mark_non_differentiable(plain);
    context->set_materialize_grads(false);
    context->save_for_backward(inputs.vec());
    return outputs;
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto capsule = context->saved_data["part"].toCapsule();
    const auto* part = static_cast<const Part*>(capsule.get());
    variable_list inputs;
    for (const Tensor& in : context->get_saved_variables()) {
      inputs.push_back(in.defined() ? in.detach().set_requires_grad(in.requires_grad()) : in);
    }
    std::vector<Tensor> outputs;
    {
      Visit visit(*part);
      at::AutoGradMode with_grad(true);
      outputs = part->function(inputs);
    }
    if (outputs.size() != gradients.size()) {
      throw UsageError(fmt::format("checkpoint: the function gave {} tensors in forward and {} in backward.", gradients.size(), outputs.size()));
    }
    variable_list roots, seeds;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!gradients[i].defined() || !outputs[i].requires_grad()) continue;
      if (outputs[i].sizes() != gradients[i].sizes()) {
        throw UsageError("checkpoint: the function gave other shapes in backward than in forward; it must do the same twice.");
      }
      roots.push_back(outputs[i]);
      seeds.push_back(gradients[i]);
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
    variable_list out = {Tensor(), Tensor()};  // of the part and the anchor
    for (const Tensor& in : inputs) out.push_back(in.defined() && in.requires_grad() ? in.grad() : Tensor());
    return out;
  }
};

}  // namespace

std::vector<Tensor> checkpoint_function(TensorFunction function, const std::vector<Tensor>& inputs, const CheckpointOptions& options) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  auto part = c10::make_intrusive<Part>();
  part->function = std::move(function);
  part->options = options;
  part->first = Surroundings::now(options);
  // Parameters inside `function` are unknown here: a tensor of no elements makes sure that backward comes by.
  const Tensor anchor = at::empty({0}).set_requires_grad(true);
  return Recompute::apply(part, anchor, at::TensorList(inputs));
}

Tensor checkpoint_sequential(const torch::nn::Sequential& modules, std::int64_t parts, const Tensor& input) {
  const auto size = static_cast<std::int64_t>(modules->size());
  if (parts < 1 || parts > size) {
    throw UsageError(fmt::format("checkpoint_sequential: {} parts of {} modules; give 1 to {}.", parts, size, size));
  }
  Tensor x = input;
  for (std::int64_t p = 0; p < parts; ++p) {
    std::vector<torch::nn::AnyModule> some(modules->begin() + p * size / parts, modules->begin() + (p + 1) * size / parts);
    std::vector<Tensor> buffers;
    for (const auto& m : some) {
      for (const Tensor& b : m.ptr()->buffers()) buffers.push_back(b);
    }
    auto run = [some](const std::vector<Tensor>& in) mutable {
      Tensor y = in[0];
      for (auto& m : some) y = m.forward(y);
      return std::vector<Tensor>{y};
    };
    x = p + 1 == parts ? run({x})[0] : checkpoint(run, {x}, {.buffers = buffers})[0];
  }
  return x;
}

}  // namespace memfit::train
