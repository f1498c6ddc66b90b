// What the trainer takes from whoever feeds it, what it trains, and how a loss says what it is a mean of.
// Not here: loaders (data/), the loop (trainer.h). Threads: as each object says. Cost: none.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memfit/optim/optimizer.h"

namespace memfit::train {

using optim::NamedTensor;

/// Every tensor has the rows as its first dimension.
struct Batch {
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> targets;
  std::int64_t rows = 0;

  /// Rows [begin, begin + count), as views.
  Batch narrow(std::int64_t begin, std::int64_t count) const;
};

class BatchSource {
 public:
  virtual ~BatchSource() = default;
  /// The next batch, nothing at the end of the epoch.
  virtual std::optional<Batch> next() = 0;
  /// Begin `epoch`. The same epoch gives the same batches every time.
  virtual void reset(std::int64_t epoch) = 0;
  /// Where next() stands, and going on there: after load_state(state()) the same batches come.
  virtual nlohmann::json state() const = 0;
  virtual void load_state(const nlohmann::json& state) = 0;
};

/// Anything that can be trained. Tensors are the model's own.
struct Model {
  std::function<at::Tensor(const std::vector<at::Tensor>&)> forward;
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  /// Training or evaluation mode; may be empty where the model knows none. Returns a function that puts the modes back.
  std::function<std::function<void()>(bool)> set_training;
  /// Names of Python's state_dict, each with "model/PARAMETER" or "buffer/BUFFER" of the above; shared tensors have several. Kept in
  /// checkpoints for whoever exports them. Empty: the names above.
  std::vector<std::pair<std::string, std::string>> state_names;
};

/// A module with its own names. `forward` calls it.
Model model_of(std::shared_ptr<torch::nn::Module> module, std::function<at::Tensor(const std::vector<at::Tensor>&)> forward);

/// A module of one tensor in and one out.
template <class Impl>
Model model_of(const torch::nn::ModuleHolder<Impl>& holder) {
  auto impl = holder.ptr();
  return model_of(impl, [impl](const std::vector<at::Tensor>& inputs) { return impl->forward(inputs.at(0)); });
}

/// `sum` over what was counted, and how much was counted: rows, tokens, or the sum of class weights.
struct WeightedSum {
  at::Tensor sum;
  double weight = 0;
};

/// A loss that says how it reduces, so that a split batch gives the unsplit batch's gradient.
class Loss {
 public:
  using Function = std::function<at::Tensor(const at::Tensor& output, const Batch& batch)>;
  using SumFunction = std::function<WeightedSum(const at::Tensor& output, const Batch& batch)>;

  /// Says nothing: refused before step 1.
  Loss() = default;
  /// `function` returns the mean over rows.
  static Loss mean_over_rows(Function function);
  /// `function` returns a sum and its weight; the loss is sum / weight over the whole batch.
  static Loss sum_and_weight(SumFunction function);
  /// `function` needs the whole batch at once (contrastive losses): such a batch is never split.
  static Loss whole_batch(Function function);

  bool declared() const { return mean_ || sum_; }
  bool needs_whole_batch() const { return whole_; }
  /// Weight of a batch where it is known before the forward pass.
  std::optional<double> weight_of(const Batch& batch) const;
  WeightedSum operator()(const at::Tensor& output, const Batch& batch) const;
  /// Whether operator() gives a mean in `sum`, to be weighted, not a sum to be divided.
  bool gives_mean() const { return static_cast<bool>(mean_); }

 private:
  Function mean_;
  SumFunction sum_;
  bool whole_ = false;
};

}  // namespace memfit::train
