#include "memfit/train/schedule.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

#include "memfit/core/error.h"

namespace memfit::train {
namespace {

void check_steps(const char* name, std::int64_t steps) {
  if (steps < 1) throw UsageError(fmt::format("{}: {} steps; there must be at least 1.", name, steps));
}

}  // namespace

Schedule linear_warmup(std::int64_t steps, Schedule then) {
  check_steps("linear_warmup", steps);
  if (!then) throw UsageError("linear_warmup: no schedule follows; pass constant().");
  return [=](std::int64_t step) { return step < steps ? static_cast<double>(step + 1) / static_cast<double>(steps) : then(step - steps); };
}

Schedule cosine(std::int64_t steps, double floor) {
  check_steps("cosine", steps);
  return [=](std::int64_t step) {
    if (step >= steps) return floor;
    return floor + (1 - floor) * 0.5 * (1 + std::cos(std::numbers::pi * static_cast<double>(step) / static_cast<double>(steps)));
  };
}

Schedule linear(std::int64_t steps, double floor) {
  check_steps("linear", steps);
  return [=](std::int64_t step) { return step >= steps ? floor : 1 - (1 - floor) * static_cast<double>(step) / static_cast<double>(steps); };
}

Schedule staircase(std::int64_t steps, double factor) {
  check_steps("staircase", steps);
  return [=](std::int64_t step) { return std::pow(factor, static_cast<double>(step / steps)); };
}

Schedule constant() {
  return [](std::int64_t) { return 1.0; };
}

}  // namespace memfit::train
