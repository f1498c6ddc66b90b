// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023): the sign of interpolated momentum, decoupled decay.
// Not here: groups, state, steps in backward (optimizer.h). Threads: one.
// Cost: a few elementwise kernels in pieces; one state tensor a parameter; temporaries within CommonOptions::temporaries.
#pragma once

#include "memfit/optim/optimizer.h"

namespace memfit::optim {

struct LionOptions {
  double learning_rate = 1e-4;
  double beta1 = 0.9, beta2 = 0.99;
  double weight_decay = 0;
  CommonOptions common{};
};

class Lion : public Optimizer {
 public:
  /// Throws:   UsageError for betas outside [0, 1).
  Lion(std::vector<ParameterGroup> groups, const LionOptions& options);
  Lion(const torch::nn::Module& module, const LionOptions& options);

 private:
  void update(Chunk& chunk) override;
  LionOptions options_;
};

}  // namespace memfit::optim
