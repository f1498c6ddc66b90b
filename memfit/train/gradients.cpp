#include "memfit/train/gradients.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include "memfit/core/error.h"

namespace memfit::train {

Accumulator::Accumulator(std::vector<NamedTensor> parameters, optim::GradScaler* scaler)
    : parameters_(std::move(parameters)), scaler_(scaler) {
  if (parameters_.empty()) throw UsageError("Accumulator: there are no parameters.");
}

void Accumulator::begin(std::int64_t parts, std::optional<double> weight) {
  if (parts < 1) throw UsageError(fmt::format("Accumulator: a batch of {} parts; it has at least 1.", parts));
  for (const NamedTensor& p : parameters_) p.tensor.mutable_grad().reset();
  parts_ = parts;
  expected_ = weight;
  weight_ = 0;
  sums_.clear();
}

void Accumulator::add(const WeightedSum& part, bool is_mean) {
  if (parts_ == 0) throw UsageError("Accumulator: add() before begin().");
  if (!(part.weight >= 0)) throw UsageError(fmt::format("Accumulator: a part has the weight {}; weights are at least 0.", part.weight));
  if (part.weight == 0) return;
  if (part.sum.numel() != 1) throw UsageError("Accumulator: a loss is not a single number; sum it, and give its weight.");
  if (!expected_ || *expected_ == 0) expected_ = part.weight * static_cast<double>(parts_);
  at::Tensor loss = part.sum;
  // Nothing is multiplied where the part is the whole: an unsplit batch keeps its bits.
  if (is_mean && part.weight != *expected_) loss = loss * (part.weight / *expected_);
  if (!is_mean && *expected_ != 1) loss = loss / *expected_;
  (scaler_ != nullptr ? scaler_->scale(loss) : loss).backward();
  weight_ += part.weight;
  sums_.emplace_back(loss.detach(), *expected_);
}

std::optional<double> Accumulator::finish() {
  if (parts_ == 0) throw UsageError("Accumulator: finish() before begin().");
  parts_ = 0;
  if (weight_ == 0) return std::nullopt;
  at::NoGradGuard no_grad;
  if (*expected_ != weight_) {
    for (const NamedTensor& p : parameters_) {
      if (p.tensor.grad().defined()) p.tensor.mutable_grad().mul_(*expected_ / weight_);
    }
  }
  double loss = 0;
  for (const auto& [value, expected] : sums_) loss += value.item<double>() * (expected / weight_);
  sums_.clear();
  return loss;
}

namespace {

at::Tensor common_norm(const std::vector<at::Tensor>& gradients) {
  std::vector<at::Tensor> norms;
  for (const at::Tensor& g : gradients) norms.push_back(at::linalg_vector_norm(g, 2));
  return at::linalg_vector_norm(at::stack(norms), 2);
}

void check_norm_is_known(const char* name, const optim::Optimizer& optimizer) {
  if (!optimizer.steps_in_backward()) return;
  throw UsageError(fmt::format("{}: {} steps in backward, before the norm of all gradients is known. Use one or the other.", name, optimizer.kind()));
}

}  // namespace

double gradient_norm(const optim::Optimizer& optimizer) {
  check_norm_is_known("gradient_norm", optimizer);
  at::NoGradGuard no_grad;
  const std::vector<at::Tensor> gradients = optimizer.gradients();
  return gradients.empty() ? 0 : common_norm(gradients).item<double>();
}

double clip_gradient_norm(const optim::Optimizer& optimizer, double max_norm) {
  if (!(max_norm > 0)) throw UsageError(fmt::format("clip_gradient_norm: a max_norm of {}; it must be above 0.", max_norm));
  check_norm_is_known("clip_gradient_norm", optimizer);
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients = optimizer.gradients();
  if (gradients.empty()) return 0;
  const at::Tensor norm = common_norm(gradients);
  const at::Tensor share = at::clamp(max_norm / (norm + 1e-6), std::nullopt, 1.0);
  for (at::Tensor& g : gradients) g.mul_(share);
  return norm.item<double>();
}

Ema::Ema(std::vector<NamedTensor> parameters, double decay) : parameters_(std::move(parameters)), decay_(decay) {
  if (!(decay >= 0 && decay < 1)) throw UsageError(fmt::format("Ema: a decay of {}; it must be at least 0 and below 1.", decay));
  at::NoGradGuard no_grad;
  for (const NamedTensor& p : parameters_) averages_.push_back({p.name, p.tensor.detach().clone()});
}

void Ema::update() {
  at::NoGradGuard no_grad;
  for (; done_ < averages_.size(); ++done_) averages_[done_].tensor.lerp_(parameters_[done_].tensor, 1 - decay_);
  done_ = 0;
}

void Ema::swap() {
  at::NoGradGuard no_grad;
  for (std::size_t i = 0; i < averages_.size(); ++i) {
    const at::Tensor kept = averages_[i].tensor.clone();
    averages_[i].tensor.copy_(parameters_[i].tensor);
    parameters_[i].tensor.copy_(kept);
  }
}

}  // namespace memfit::train
