// Evaluation that leaves no trace: no gradients on any thread, and modes, buffers and the generator as they were.
// Not here: the loop over a validation set (trainer.h). Threads: one scope at a time; forward may run on many threads within it.
// Cost: a copy of the buffers.
#pragma once

#include <torch/types.h>

#include <functional>
#include <utility>
#include <vector>

#include "memfit/train/batch.h"

namespace memfit::train {

class EvaluationScope {
 public:
  /// A no-grad mode reaches only its own thread; the parameters themselves are told here that they need no gradient.
  explicit EvaluationScope(const Model& model);
  ~EvaluationScope();
  EvaluationScope(const EvaluationScope&) = delete;
  EvaluationScope& operator=(const EvaluationScope&) = delete;

 private:
  at::NoGradGuard no_grad_;
  std::vector<at::Tensor> trained_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;
  at::Tensor generator_;
  std::function<void()> modes_back_;
};

}  // namespace memfit::train
