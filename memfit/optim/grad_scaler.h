// Loss scaling for float16: torch.amp.GradScaler for C++, with its semantics, its decisions and its state.
//   scaler.scale(loss).backward();  scaler.unscale(optimizer);  /* clip */  scaler.step(optimizer);  scaler.update();
// Not here: casts (autocast.h). Threads: one. Cost: one fused pass over the gradients that both divides and looks for inf and NaN.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "memfit/optim/optimizer.h"

namespace torch::optim {
class Optimizer;
}

namespace memfit::optim {

struct GradScalerOptions {
  double scale = 65536;
  /// The scale grows by this after `growth_interval` steps in a row without inf or NaN. Above 1.
  double growth_factor = 2;
  /// The scale shrinks by this after a step with inf or NaN. Below 1.
  double backoff_factor = 0.5;
  std::int64_t growth_interval = 2000;
  /// Off: scale() gives its argument back, step() steps.
  bool enabled = true;
};

class GradScaler {
 public:
  /// Throws:   UsageError for factors on the wrong side of 1 or an interval below 1.
  explicit GradScaler(const GradScalerOptions& options = {});

  at::Tensor scale(const at::Tensor& loss);
  /// Divide the gradients, to look at or clip them before step(). Once for each optimizer and update().
  /// Throws:   UsageError when called twice, after step(), before scale(), for float16 gradients or an optimizer that steps in backward.
  void unscale(Optimizer& optimizer);
  void unscale(torch::optim::Optimizer& optimizer);
  /// Step unless a gradient is inf or NaN. Returns whether it stepped. Unscales first where unscale() did not.
  bool step(Optimizer& optimizer);
  bool step(torch::optim::Optimizer& optimizer);
  /// Adjust the scale after all optimizers' step(), or set it.
  void update(std::optional<double> new_scale = std::nullopt);

  /// Forget what was unscaled since the last update(): the step is given up and its gradients are dropped.
  void abandon() { seen_.clear(); }

  double scale_factor() const;
  /// Steps in a row without inf or NaN.
  std::int64_t growth_tracker() const;
  /// Steps that step() left out so far.
  std::int64_t skipped_steps() const { return skipped_; }
  bool enabled() const { return options_.enabled; }

  /// As GradScaler.state_dict() of PyTorch; empty when not enabled. Call after update().
  nlohmann::json state() const;
  /// Throws:   UsageError when the state is of a scaler that was not enabled.
  void load_state(const nlohmann::json& state);

 private:
  enum class Stage { Unscaled, Stepped };
  struct Seen {
    Stage stage;
    at::Tensor found_inf;
  };
  void unscale(const void* optimizer, const std::vector<at::Tensor>& gradients);
  template <class AnyOptimizer>
  bool step_any(AnyOptimizer& optimizer);

  GradScalerOptions options_;
  at::Tensor scale_, tracker_;  // float32 and int32 scalars, undefined before the first scale()
  std::int64_t initial_tracker_ = 0;
  std::int64_t skipped_ = 0;
  std::map<const void*, Seen> seen_;  // since the last update()
};

}  // namespace memfit::optim
