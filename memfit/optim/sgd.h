// Stochastic gradient descent with momentum: the kernel of torch.optim.SGD(fused=True), bit for bit.
// Not here: groups, state, steps in backward (optimizer.h). Threads: one.
// Cost: one kernel call; no temporaries; with momentum one state tensor a parameter.
#pragma once

#include "memfit/optim/optimizer.h"

namespace memfit::optim {

struct SgdOptions {
  double learning_rate = 1e-3;
  double momentum = 0;
  double dampening = 0;
  double weight_decay = 0;
  bool nesterov = false;
  CommonOptions common{};
};

class Sgd : public Optimizer {
 public:
  /// Throws:   UsageError for options out of range, and for nesterov without momentum or with dampening.
  Sgd(std::vector<ParameterGroup> groups, const SgdOptions& options);
  Sgd(const torch::nn::Module& module, const SgdOptions& options);

 private:
  void update(Chunk& chunk) override;
  SgdOptions options_;
};

}  // namespace memfit::optim
