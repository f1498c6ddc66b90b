#include "memfit/optim/grad_scaler.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/optim/autocast.h"

namespace memfit::optim {
namespace {

std::vector<at::Tensor> gradients_of(Optimizer& optimizer) {
  if (optimizer.steps_in_backward()) {
    throw UsageError("GradScaler: the optimizer steps in backward, before all gradients are known to be finite. Use one or the other.");
  }
  return optimizer.gradients();
}

std::vector<at::Tensor> gradients_of(torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> out;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& p : group.params()) {
      if (p.grad().defined()) out.push_back(p.grad());
    }
  }
  return out;
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& o) : options_(o) {
  if (!(o.growth_factor > 1)) throw UsageError(fmt::format("GradScaler: a growth_factor of {}; it must be above 1.", o.growth_factor));
  if (!(o.backoff_factor < 1)) throw UsageError(fmt::format("GradScaler: a backoff_factor of {}; it must be below 1.", o.backoff_factor));
  if (o.growth_interval < 1) throw UsageError(fmt::format("GradScaler: a growth_interval of {}; it must be at least 1.", o.growth_interval));
}

at::Tensor GradScaler::scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  if (!scale_.defined()) {
    const at::Tensor scale = at::full({}, options_.scale, at::device(loss.device()).dtype(at::kFloat));
    tracker_ = at::full({}, initial_tracker_, at::device(loss.device()).dtype(at::kInt));
    scale_ = scale;
  }
  return loss * scale_.to(loss.device());
}

void GradScaler::unscale(const void* optimizer, const std::vector<at::Tensor>& gradients) {
  if (!scale_.defined()) throw UsageError("GradScaler: nothing was scaled yet; call scale(loss) before backward.");
  if (const auto found = seen_.find(optimizer); found != seen_.end()) {
    throw UsageError(found->second.stage == Stage::Unscaled
                         ? "GradScaler: unscale() was called twice on one optimizer; call update() in between."
                         : "GradScaler: unscale() was called after step(); call it before.");
  }
  at::NoGradGuard no_grad;
  std::map<std::pair<std::string, at::ScalarType>, std::vector<at::Tensor>> alike;
  for (const at::Tensor& g : gradients) {
    if (g.scalar_type() == at::kHalf) throw UsageError("GradScaler: a gradient is float16; keep parameters in float32 and cast with Autocast.");
    if (g.layout() != at::kStrided) throw UsageError("GradScaler: a gradient is sparse; sparse gradients are not supported.");
    alike[{g.device().str(), g.scalar_type()}].push_back(g);
  }
  at::Tensor found_inf = at::zeros({}, scale_.options());
  // The reciprocal in double, as PyTorch takes it.
  const at::Tensor inverse = scale_.to(at::kDouble).reciprocal().to(at::kFloat);
  for (auto& [kind, list] : alike) {
    at::Tensor found = at::zeros({}, found_inf.options().device(list[0].device()));
    at::_amp_foreach_non_finite_check_and_unscale_(list, found, inverse.to(list[0].device()));
    found_inf.add_(found.to(found_inf.device()));
  }
  if (gradients.empty()) throw UsageError("GradScaler: no parameter of the optimizer has a gradient; call backward first.");
  seen_[optimizer] = {Stage::Unscaled, found_inf};
}

void GradScaler::unscale(Optimizer& optimizer) {
  if (options_.enabled) unscale(&optimizer, gradients_of(optimizer));
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (options_.enabled) unscale(&optimizer, gradients_of(optimizer));
}

template <class AnyOptimizer>
bool GradScaler::step_any(AnyOptimizer& optimizer) {
  if (options_.enabled) {
    const auto found = seen_.find(&optimizer);
    if (found == seen_.end()) unscale(&optimizer, gradients_of(optimizer));
    else if (found->second.stage == Stage::Stepped) throw UsageError("GradScaler: step() was called twice; call update() in between.");
    Seen& seen = seen_.at(&optimizer);
    if (seen.found_inf.item<float>() != 0) {
      seen.stage = Stage::Stepped;
      ++skipped_;
      return false;
    }
    optimizer.step();  // may throw: step() can then be called again
    seen.stage = Stage::Stepped;
  } else {
    optimizer.step();
  }
  Autocast::forget_weights();
  return true;
}

bool GradScaler::step(Optimizer& optimizer) { return step_any(optimizer); }
bool GradScaler::step(torch::optim::Optimizer& optimizer) { return step_any(optimizer); }

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  if (!scale_.defined()) throw UsageError("GradScaler: update() before anything was scaled; call scale(loss) before backward.");
  if (new_scale) {
    scale_.fill_(*new_scale);
  } else {
    if (seen_.empty()) throw UsageError("GradScaler: update() without step(); call step(optimizer) first.");
    at::Tensor found_inf = at::zeros({}, scale_.options());
    for (const auto& [optimizer, seen] : seen_) found_inf.add_(seen.found_inf);
    at::_amp_update_scale_(scale_, tracker_, found_inf, options_.growth_factor, options_.backoff_factor, options_.growth_interval);
  }
  seen_.clear();
}

double GradScaler::scale_factor() const {
  if (!options_.enabled) return 1;
  return scale_.defined() ? scale_.item<double>() : options_.scale;
}

std::int64_t GradScaler::growth_tracker() const { return tracker_.defined() ? tracker_.item<std::int64_t>() : initial_tracker_; }

nlohmann::json GradScaler::state() const {
  if (!options_.enabled) return nlohmann::json::object();
  return {{"scale", scale_factor()}, {"growth_factor", options_.growth_factor}, {"backoff_factor", options_.backoff_factor},
          {"growth_interval", options_.growth_interval}, {"_growth_tracker", growth_tracker()}};
}

void GradScaler::load_state(const nlohmann::json& state) {
  if (!options_.enabled) return;
  if (state.empty()) throw UsageError("GradScaler: the saved scaler was not enabled and has no state; make this one with enabled = false.");
  GradScalerOptions loaded = options_;
  loaded.scale = state.at("scale");
  loaded.growth_factor = state.at("growth_factor");
  loaded.backoff_factor = state.at("backoff_factor");
  loaded.growth_interval = state.at("growth_interval");
  initial_tracker_ = state.at("_growth_tracker");
  options_ = loaded;
  scale_.reset();
  tracker_.reset();
  seen_.clear();
}

}  // namespace memfit::optim
