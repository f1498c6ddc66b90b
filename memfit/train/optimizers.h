// Optimizers and schedules by name, for those who choose on a command line.
// Not here: the optimizers themselves (optim/), schedules as functions (schedule.h). Threads: any. Cost: none.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "memfit/optim/optimizer.h"
#include "memfit/train/schedule.h"

namespace memfit::train {

/// "sgd", "adam", "adamw", "adafactor" or "lion", with settings as in PyTorch:
///   lr, weight_decay; sgd: momentum, dampening, nesterov; adam, adamw: beta1, beta2, eps, amsgrad; lion: beta1, beta2;
///   adafactor: beta2_decay, d. All: state=full|bf16|int8 (bf16 and int8 change results).
/// Throws:   UsageError with the nearest name.
std::shared_ptr<optim::Optimizer> make_optimizer(const std::string& text, std::vector<optim::NamedTensor> parameters);

/// "constant", "linear", "cosine" or "staircase", each with warmup=STEPS; cosine and linear: floor=SHARE, steps=N (default `steps`, less the
/// warmup); staircase: every=STEPS, factor=SHARE. Throws: UsageError with the nearest name.
Schedule make_schedule(const std::string& text, std::int64_t steps);

}  // namespace memfit::train
