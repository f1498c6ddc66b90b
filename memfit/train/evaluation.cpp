#include "memfit/train/evaluation.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include "memfit/optim/autocast.h"

namespace memfit::train {

EvaluationScope::EvaluationScope(const Model& model) {
  for (const NamedTensor& b : model.buffers) buffers_.emplace_back(b.tensor, b.tensor.clone());
  generator_ = at::detail::getDefaultCPUGenerator().get_state();
  if (model.set_training) modes_back_ = model.set_training(false);
  for (const NamedTensor& p : model.parameters) {
    if (!p.tensor.requires_grad()) continue;
    trained_.push_back(p.tensor);
    p.tensor.set_requires_grad(false);
  }
}

EvaluationScope::~EvaluationScope() {
  optim::Autocast::forget_weights();  // casts made here know of no gradient
  for (const at::Tensor& p : trained_) p.set_requires_grad(true);
  if (modes_back_) modes_back_();
  for (const auto& [buffer, value] : buffers_) buffer.variable_data().copy_(value);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(generator_);
}

}  // namespace memfit::train
