// Gradients of a batch that comes in parts: exact weights, clipping, running averages of weights.
// Not here: the loop (trainer.h), scaling (optim/grad_scaler.h). Threads: one.
// Cost: backward itself; clipping a pass that reads and one that writes all gradients; Ema a copy of the parameters.
#pragma once

#include <torch/types.h>

#include <optional>
#include <vector>

#include "memfit/optim/grad_scaler.h"
#include "memfit/train/batch.h"

namespace memfit::train {

/// Sums gradients of parts to that of the whole: of (sum of sums) / (sum of weights), however unequal the parts are.
///   Accumulator a(optimizer.parameters());  a.begin(2, tokens_in_both);  a.add(first);  a.add(second);  loss = a.finish();
class Accumulator {
 public:
  /// Throws:   UsageError when there are no parameters.
  explicit Accumulator(std::vector<NamedTensor> parameters, optim::GradScaler* scaler = nullptr);

  /// A batch of `parts` parts. `weight`: of all together, where it is known; otherwise it is guessed from the first part and
  /// finish() corrects the gradients by one multiplication. Drops the gradients that are there.
  void begin(std::int64_t parts, std::optional<double> weight = std::nullopt);
  /// Runs backward. A part of weight 0 adds nothing. `is_mean`: `sum` is already divided by its weight.
  /// Throws:   UsageError before begin(), for a negative weight, or a sum that is no single number.
  void add(const WeightedSum& part, bool is_mean = false);
  /// The loss of the whole, nothing when all weights were 0 (there is then no gradient to step with).
  std::optional<double> finish();

 private:
  std::vector<NamedTensor> parameters_;
  optim::GradScaler* scaler_;
  std::int64_t parts_ = 0;
  std::optional<double> expected_;
  double weight_ = 0;
  std::vector<std::pair<at::Tensor, double>> sums_;  // scalar, and what to multiply it by
};

/// The common 2-norm of all gradients, 0 where there are none. Throws: as clip_gradient_norm.
double gradient_norm(const optim::Optimizer& optimizer);

/// Scale all gradients so that their common 2-norm is at most `max_norm`; the bits of torch.nn.utils.clip_grad_norm_.
/// Returns:  the norm before. Throws: UsageError for a limit not above 0 or when the optimizer steps in backward.
double clip_gradient_norm(const optim::Optimizer& optimizer, double max_norm);

/// Exponential moving average of parameters: average = decay * average + (1 - decay) * parameter, in place.
class Ema {
 public:
  /// Throws:   UsageError for a decay outside [0, 1).
  Ema(std::vector<NamedTensor> parameters, double decay);
  /// After an effective step. When it throws, calling it again goes on where it stopped.
  void update();
  /// Exchanges the parameters' values with the averages; a second call puts them back.
  void swap();
  const std::vector<NamedTensor>& averages() const { return averages_; }

 private:
  std::vector<NamedTensor> parameters_, averages_;
  double decay_;
  std::size_t done_ = 0;
};

}  // namespace memfit::train
