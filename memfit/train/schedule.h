// Learning-rate schedules: a factor for each effective step. A schedule has no state, so a resumed run is on it at once.
// Not here: who sets the rate (trainer.h). Threads: any. Cost: none.
#pragma once

#include <cstdint>
#include <functional>

namespace memfit::train {

/// What the learning rate of step `step` (0 is the first) is multiplied by.
using Schedule = std::function<double(std::int64_t step)>;

/// From 1/steps up to 1 in `steps` steps, then `then`, which counts from 0 where the warmup ends.
Schedule linear_warmup(std::int64_t steps, Schedule then);
/// From 1 down to `floor` along a half cosine in `steps` steps, `floor` afterwards.
Schedule cosine(std::int64_t steps, double floor = 0);
/// From 1 down to `floor` along a straight line in `steps` steps, `floor` afterwards.
Schedule linear(std::int64_t steps, double floor = 0);
/// 1, and times `factor` after every `steps` steps.
Schedule staircase(std::int64_t steps, double factor);
Schedule constant();

}  // namespace memfit::train
