#include "memfit/train/batch.h"

#include <ATen/ATen.h>

#include <set>

namespace memfit::train {

Batch Batch::narrow(std::int64_t begin, std::int64_t count) const {
  if (begin == 0 && count == rows) return *this;
  Batch out;
  out.rows = count;
  for (const at::Tensor& t : inputs) out.inputs.push_back(t.narrow(0, begin, count));
  for (const at::Tensor& t : targets) out.targets.push_back(t.narrow(0, begin, count));
  return out;
}

Model model_of(std::shared_ptr<torch::nn::Module> module, std::function<at::Tensor(const std::vector<at::Tensor>&)> forward) {
  Model out;
  out.forward = std::move(forward);
  out.parameters = optim::named_parameters(*module);
  std::set<const void*> seen;
  for (const auto& item : module->named_buffers()) {
    if (item.value().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second) out.buffers.push_back({item.key(), item.value()});
  }
  out.set_training = [module](bool on) -> std::function<void()> {
    // Modules may stand in different modes (frozen parts): each gets its own back.
    std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> before;
    for (const auto& m : module->modules()) before.emplace_back(m, m->is_training());
    module->train(on);
    return [before] {
      for (const auto& [m, was] : before) {
        if (m->is_training() == was) continue;
        const auto children = m->modules(false);
        std::vector<bool> modes;
        for (const auto& c : children) modes.push_back(c->is_training());
        m->train(was);
        for (std::size_t i = 0; i < children.size(); ++i) {
          if (children[i]->is_training() != modes[i]) children[i]->train(modes[i]);
        }
      }
    };
  };
  return out;
}

Loss Loss::mean_over_rows(Function function) {
  Loss out;
  out.mean_ = std::move(function);
  return out;
}

Loss Loss::sum_and_weight(SumFunction function) {
  Loss out;
  out.sum_ = std::move(function);
  return out;
}

Loss Loss::whole_batch(Function function) {
  Loss out = mean_over_rows(std::move(function));
  out.whole_ = true;
  return out;
}

std::optional<double> Loss::weight_of(const Batch& batch) const {
  if (!mean_) return std::nullopt;
  return static_cast<double>(batch.rows);
}

WeightedSum Loss::operator()(const at::Tensor& output, const Batch& batch) const {
  if (mean_) return {mean_(output, batch), static_cast<double>(batch.rows)};
  return sum_(output, batch);
}

}  // namespace memfit::train
