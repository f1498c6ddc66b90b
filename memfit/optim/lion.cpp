#include "memfit/optim/lion.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "memfit/core/error.h"

namespace memfit::optim {

Lion::Lion(std::vector<ParameterGroup> groups, const LionOptions& o)
    : Optimizer({"Lion", {"momentum"}, false, true}, std::move(groups), o.learning_rate, o.weight_decay, o.common), options_(o) {
  if (!(o.beta1 >= 0 && o.beta1 < 1 && o.beta2 >= 0 && o.beta2 < 1)) {
    throw UsageError(fmt::format("Lion: betas of {} and {}; both must be at least 0 and below 1.", o.beta1, o.beta2));
  }
}

Lion::Lion(const torch::nn::Module& module, const LionOptions& o) : Lion({{"all", named_parameters(module)}}, o) {}

void Lion::update(Chunk& c) {
  std::vector<at::Tensor> direction = at::_foreach_lerp(c.slots[0], c.gradients, 1 - options_.beta1);
  at::_foreach_sign_(direction);
  if (c.weight_decay != 0) at::_foreach_mul_(c.parameters, 1 - c.learning_rate * c.weight_decay);
  for (std::size_t i = 0; i < c.parameters.size(); ++i) c.parameters[i].add_(direction[i], -c.learning_rate);
  at::_foreach_lerp_(c.slots[0], c.gradients, 1 - options_.beta2);
}

}  // namespace memfit::optim
