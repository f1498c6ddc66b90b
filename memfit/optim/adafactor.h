// Adafactor (Shazeer and Stern, 2018) as torch.optim.Adafactor(foreach=False) computes it, bit for bit.
// Not here: groups, state, steps in backward (optimizer.h). Threads: one.
// Cost: a row and a column of state for each matrix; temporaries of one and a half to two times a parameter, one parameter at a
//       time where they are large: a parameter's update needs its norm, so parameters do not go in pieces.
#pragma once

#include "memfit/optim/optimizer.h"

namespace memfit::optim {

struct AdafactorOptions {
  double learning_rate = 1e-2;
  double beta2_decay = -0.8;
  /// Least variance; default the type's machine epsilon.
  std::optional<double> epsilon1{};
  /// Least scale of a parameter.
  double epsilon2 = 1e-3;
  /// Updates of a larger root mean square are clipped to it.
  double clip_threshold = 1.0;
  double weight_decay = 0;
  CommonOptions common{};
};

class Adafactor : public Optimizer {
 public:
  /// Throws:   UsageError for options out of range, and for state in low precision: a row and a column gain nothing by it.
  Adafactor(std::vector<ParameterGroup> groups, const AdafactorOptions& options);
  Adafactor(const torch::nn::Module& module, const AdafactorOptions& options);

 private:
  void update(Chunk& chunk) override;
  at::Tensor make_slot(std::size_t slot, const at::Tensor& parameter) const override;
  at::Tensor variance_estimate(Chunk& chunk, std::size_t i, double share, double epsilon) const;
  AdafactorOptions options_;
};

}  // namespace memfit::optim
