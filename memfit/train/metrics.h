// What a validation says beside the loss: accuracy, top-k, perplexity, mean absolute error.
// Not here: the loop over a validation set (trainer.h). Threads: any. Cost: a pass over the output.
#pragma once

#include <functional>
#include <string>

#include "memfit/train/batch.h"
#include "memfit/train/losses.h"

namespace memfit::train {

struct Metric {
  std::string name;
  /// Summed over the set; the metric is `finish` of sum / weight.
  std::function<WeightedSum(const at::Tensor& output, const Batch& batch)> add;
  std::function<double(double mean)> finish;
};

/// "accuracy", "topk,k=5", "perplexity", "mae". Classes lie where `loss` finds them, and what it ignores does not count.
/// Throws:   UsageError with the nearest name, or where the loss has no classes (all but mae).
Metric make_metric(const std::string& text, const NamedLoss& loss);

}  // namespace memfit::train
