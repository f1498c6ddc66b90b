#include "memfit/optim/adafactor.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "memfit/core/error.h"

namespace memfit::optim {
namespace {

enum Slot : std::size_t { kRow, kColumn, kVariance };

double machine_epsilon(at::ScalarType type) {
  switch (type) {
    case at::kDouble: return std::numeric_limits<double>::epsilon();
    case at::kHalf: return std::ldexp(1.0, -10);
    case at::kBFloat16: return std::ldexp(1.0, -7);
    default: return std::numeric_limits<float>::epsilon();
  }
}

}  // namespace

Adafactor::Adafactor(std::vector<ParameterGroup> groups, const AdafactorOptions& o)
    : Optimizer({"Adafactor", {"row_var", "col_var", "variance"}, false, false}, std::move(groups), o.learning_rate, o.weight_decay, o.common),
      options_(o) {
  if (o.common.state != StatePrecision::Full) {
    throw UsageError("Adafactor: its state is a row and a column a parameter and is kept in full; use StatePrecision::Full.");
  }
  if (!(o.beta2_decay <= 0)) throw UsageError(fmt::format("Adafactor: a beta2_decay of {} is above 0.", o.beta2_decay));
  if (!(o.clip_threshold >= 1)) throw UsageError(fmt::format("Adafactor: a clip_threshold of {} is below 1.", o.clip_threshold));
  if (!(o.epsilon1.value_or(0) >= 0) || !(o.epsilon2 >= 0)) throw UsageError("Adafactor: epsilons may not be negative.");
}

Adafactor::Adafactor(const torch::nn::Module& module, const AdafactorOptions& o) : Adafactor({{"all", named_parameters(module)}}, o) {}

at::Tensor Adafactor::make_slot(std::size_t slot, const at::Tensor& parameter) const {
  const bool matrix = parameter.dim() > 1;
  if (matrix == (slot == kVariance)) return {};
  if (!matrix) return at::zeros_like(parameter);
  std::vector<std::int64_t> shape = parameter.sizes().vec();
  shape[shape.size() - (slot == kRow ? 1 : 2)] = 1;
  return at::zeros(shape, parameter.options().requires_grad(false));
}

at::Tensor Adafactor::variance_estimate(Chunk& c, std::size_t i, double share, double epsilon) const {
  const at::Tensor& gradient = c.gradients[i];
  if (gradient.dim() <= 1) {
    c.slots[kVariance][i].lerp_(gradient * gradient, share);
    return c.slots[kVariance][i].clone();
  }
  // Squared norms divided by the count are mean squares without a tensor of squares.
  const at::Tensor& row = c.slots[kRow][i];
  const at::Tensor& column = c.slots[kColumn][i];
  row.lerp_(at::norm(gradient, 2, {-1}, true).square_().div_(gradient.size(-1)), share);
  column.lerp_(at::norm(gradient, 2, {-2}, true).square_().div_(gradient.size(-2)), share);
  return at::matmul(row, column).div_(row.mean({-2}, true).clamp_min_(epsilon));
}

void Adafactor::update(Chunk& c) {
  for (std::size_t i = 0; i < c.parameters.size(); ++i) {
    const at::Tensor& parameter = c.parameters[i];
    const double elements = static_cast<double>(parameter.numel());
    const double epsilon = options_.epsilon1.value_or(machine_epsilon(parameter.scalar_type()));
    const double step = static_cast<double>(c.step);
    const double rho = std::min(c.learning_rate, 1 / std::sqrt(step));
    const double alpha = std::max(options_.epsilon2, parameter.norm(2).item<double>() / std::sqrt(elements)) * rho;
    if (c.weight_decay != 0) parameter.mul_(1 - c.learning_rate * c.weight_decay);
    at::Tensor update = variance_estimate(c, i, std::pow(step, options_.beta2_decay), epsilon);
    update.clamp_min_(epsilon * epsilon).rsqrt_().mul_(c.gradients[i]);
    const double over = std::max(1.0, update.norm(2).item<double>() / (std::sqrt(elements) * options_.clip_threshold));
    parameter.add_(update, -alpha / over);
  }
}

}  // namespace memfit::optim
