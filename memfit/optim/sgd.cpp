#include "memfit/optim/sgd.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "memfit/core/error.h"

namespace memfit::optim {

Sgd::Sgd(std::vector<ParameterGroup> groups, const SgdOptions& o)
    : Optimizer({"SGD", o.momentum == 0 ? std::vector<std::string>{} : std::vector<std::string>{"momentum_buffer"}, true, true},
                std::move(groups), o.learning_rate, o.weight_decay, o.common),
      options_(o) {
  if (!(o.momentum >= 0)) throw UsageError(fmt::format("SGD: a momentum of {} is negative.", o.momentum));
  if (o.nesterov && (o.momentum == 0 || o.dampening != 0)) {
    throw UsageError("SGD: nesterov needs a momentum above 0 and a dampening of 0.");
  }
}

Sgd::Sgd(const torch::nn::Module& module, const SgdOptions& o) : Sgd({{"all", named_parameters(module)}}, o) {}

void Sgd::update(Chunk& c) {
  const std::vector<at::Tensor> none;
  at::_fused_sgd_(c.parameters, c.gradients, c.slots.empty() ? none : c.slots[0], c.weight_decay, options_.momentum,
                  c.learning_rate, options_.dampening, options_.nesterov, /*maximize=*/false,
                  /*is_first_step=*/c.step == 1 && options_.momentum != 0, {}, {});
}

}  // namespace memfit::optim
