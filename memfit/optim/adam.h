// Adam and AdamW: the kernels of torch.optim.Adam(fused=True) and AdamW(fused=True), bit for bit.
// Not here: groups, state, steps in backward (optimizer.h). Threads: one.
// Cost: one kernel call; no temporaries beside one number; two state tensors a parameter, three with amsgrad.
#pragma once

#include "memfit/optim/optimizer.h"

namespace memfit::optim {

struct AdamOptions {
  double learning_rate = 1e-3;
  double beta1 = 0.9, beta2 = 0.999;
  double epsilon = 1e-8;
  /// Adam adds it to the gradient (default 0 there, as in PyTorch); AdamW shrinks the weights by it (default 0.01).
  std::optional<double> weight_decay{};
  bool amsgrad = false;
  CommonOptions common{};
};

class Adam : public Optimizer {
 public:
  /// Throws:   UsageError for betas outside [0, 1) or a negative epsilon.
  Adam(std::vector<ParameterGroup> groups, const AdamOptions& options);
  Adam(const torch::nn::Module& module, const AdamOptions& options);

 protected:
  Adam(const char* kind, bool decoupled, std::vector<ParameterGroup> groups, const AdamOptions& options);

 private:
  void update(Chunk& chunk) override;
  bool never_negative(std::size_t slot) const override { return slot > 0; }
  AdamOptions options_;
  bool decoupled_;
};

class AdamW : public Adam {
 public:
  AdamW(std::vector<ParameterGroup> groups, const AdamOptions& options);
  AdamW(const torch::nn::Module& module, const AdamOptions& options);
};

}  // namespace memfit::optim
