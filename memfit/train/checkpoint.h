// Activation checkpointing by hand: run a part of a model without keeping what it computes, and run it again in backward.
// Not here: what memfit does by itself under a limit (engine/session.h), files (checkpoint_folder.h).
// Threads: backward may run on another thread than forward. Cost: the part's forward once more; its inputs are kept.
// The second run sees the generators, the autocast mode and the buffers of the first, and leaves them as it finds them.
// Gradients go to whatever parameters `function` uses, whether inputs need a gradient or not; parts may nest and share weights.
// Only backward() reaches those parameters: torch::autograd::grad with respect to them does not.
#pragma once

#include <torch/nn/modules/container/sequential.h>
#include <torch/types.h>

#include <concepts>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

namespace memfit::train {

struct CheckpointOptions {
  /// Tensors that `function` changes in place (running statistics): changed once, not twice.
  std::vector<at::Tensor> buffers{};
  /// Generators that `function` draws from, besides PyTorch's default CPU generator.
  std::vector<at::Generator> generators{};
};

using TensorFunction = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;

/// Throws:   UsageError when `function` gives no tensor, or other shapes in the second run than in the first.
std::vector<at::Tensor> checkpoint_function(TensorFunction function, const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {});

/// The same for whatever makes a TensorFunction. A module is none, and only asking whether it is one would not compile.
template <class Function>
  requires(!std::is_base_of_v<torch::detail::ModuleHolderIndicator, Function> && std::constructible_from<TensorFunction, Function>)
std::vector<at::Tensor> checkpoint(Function function, const std::vector<at::Tensor>& inputs, const CheckpointOptions& options = {}) {
  return checkpoint_function(TensorFunction(std::move(function)), inputs, options);
}

/// checkpoint(f, a, b): for functions of tensors that give one tensor. Other arguments go into the lambda.
template <class Function, class... Tensors>
  requires(!std::is_base_of_v<torch::detail::ModuleHolderIndicator, Function> && std::invocable<Function, const at::Tensor&, const Tensors&...>)
at::Tensor checkpoint(Function function, const at::Tensor& first, const Tensors&... others) {
  TensorFunction wrapped = [function = std::move(function)](const std::vector<at::Tensor>& in) -> std::vector<at::Tensor> {
    return [&]<std::size_t... I>(std::index_sequence<I...>) { return std::vector<at::Tensor>{function(in[I]...)}; }(
               std::make_index_sequence<1 + sizeof...(Tensors)>());
  };
  return checkpoint(std::move(wrapped), std::vector<at::Tensor>{first, others...})[0];
}

/// A module's forward, with its buffers changed once.
template <class Impl>
at::Tensor checkpoint(const torch::nn::ModuleHolder<Impl>& module, const at::Tensor& input) {
  auto impl = module.ptr();
  return checkpoint([impl](const std::vector<at::Tensor>& in) { return std::vector<at::Tensor>{impl->forward(in[0])}; }, {input},
                    {.buffers = impl->buffers()})[0];
}

/// A Sequential in `parts` parts of about equal length, each but the last checkpointed.
/// Throws:   UsageError when there are fewer modules than parts.
at::Tensor checkpoint_sequential(const torch::nn::Sequential& modules, std::int64_t parts, const at::Tensor& input);

}  // namespace memfit::train
