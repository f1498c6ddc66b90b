// A scope in which matrix products and the like run in bfloat16 or float16: torch.autocast for C++.
// Not here: loss scaling (grad_scaler.h). Threads: the one that makes the scope; backward needs none.
// Cost: a 16-bit copy of each weight that is used, kept until the outermost scope ends or an optimizer of memfit steps
//       (a step changes the weights, so that the copies would be old). With other optimizers end the scope before the step,
//       or call forget_weights().
#pragma once

#include <torch/types.h>

namespace memfit::optim {

class Autocast {
 public:
  /// Throws:   UsageError when `type` is not 16 bits wide. `on` = false makes a scope without casts within another one.
  explicit Autocast(at::ScalarType type = at::kBFloat16, c10::DeviceType device = c10::DeviceType::CPU, bool on = true);
  ~Autocast();
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;

  /// Drop the 16-bit copies of weights.
  static void forget_weights();

 private:
  c10::DeviceType device_;
  bool enabled_before_;
  at::ScalarType type_before_;
};

}  // namespace memfit::optim
