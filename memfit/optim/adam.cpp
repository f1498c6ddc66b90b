#include "memfit/optim/adam.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "memfit/core/error.h"

namespace memfit::optim {
namespace {

std::vector<std::string> slots(bool amsgrad) {
  std::vector<std::string> out = {"exp_avg", "exp_avg_sq"};
  if (amsgrad) out.push_back("max_exp_avg_sq");
  return out;
}

}  // namespace

Adam::Adam(const char* kind, bool decoupled, std::vector<ParameterGroup> groups, const AdamOptions& o)
    : Optimizer({kind, slots(o.amsgrad), true, true}, std::move(groups), o.learning_rate,
                o.weight_decay.value_or(decoupled ? 0.01 : 0.0), o.common),
      options_(o), decoupled_(decoupled) {
  if (!(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1)) {
    throw UsageError(fmt::format("{}: betas of {} and {}; both must be at least 0 and below 1.", kind, o.beta1, o.beta2));
  }
  if (!(o.epsilon >= 0)) throw UsageError(fmt::format("{}: an epsilon of {} is negative.", kind, o.epsilon));
}

Adam::Adam(std::vector<ParameterGroup> groups, const AdamOptions& o) : Adam("Adam", false, std::move(groups), o) {}
Adam::Adam(const torch::nn::Module& module, const AdamOptions& o) : Adam({{"all", named_parameters(module)}}, o) {}
AdamW::AdamW(std::vector<ParameterGroup> groups, const AdamOptions& o) : Adam("AdamW", true, std::move(groups), o) {}
AdamW::AdamW(const torch::nn::Module& module, const AdamOptions& o) : AdamW({{"all", named_parameters(module)}}, o) {}

void Adam::update(Chunk& c) {
  // The kernel wants a step count a parameter, and reads it only: all of a chunk share one.
  const at::Tensor step = at::full({}, static_cast<double>(c.step), at::device(c.parameters[0].device()).dtype(at::kFloat));
  const std::vector<at::Tensor> steps(c.parameters.size(), step);
  const std::vector<at::Tensor> none;
  const std::vector<at::Tensor>& largest = options_.amsgrad ? c.slots[2] : none;
  auto run = [&](auto kernel) {
    kernel(c.parameters, c.gradients, c.slots[0], c.slots[1], largest, steps, c.learning_rate, options_.beta1, options_.beta2,
           c.weight_decay, options_.epsilon, options_.amsgrad, /*maximize=*/false, std::nullopt, std::nullopt);
  };
  if (decoupled_) run([](auto&&... arguments) { at::_fused_adamw_(arguments...); });
  else run([](auto&&... arguments) { at::_fused_adam_(arguments...); });
}

}  // namespace memfit::optim
