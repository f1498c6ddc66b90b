#include "memfit/train/loader_source.h"

#include <fmt/format.h>

#include <map>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"

namespace memfit::train {

std::optional<Batch> LoaderSource::next() {
  std::optional<data::Batch> read = loader_->next();
  if (!read) return std::nullopt;
  Batch batch;
  batch.rows = static_cast<std::int64_t>(read->rows.size());
  for (const std::size_t i : inputs_) batch.inputs.push_back(read->fields.at(i));
  for (const std::size_t i : targets_) batch.targets.push_back(read->fields.at(i));
  return batch;
}

nlohmann::json LoaderSource::state() const { return loader_->state(); }

Model model_of(const std::shared_ptr<model::Model>& model, std::size_t output) {
  Model out;
  out.forward = [model, output](const std::vector<at::Tensor>& inputs) {
    std::vector<at::Tensor> outputs = model->forward(inputs);
    if (output >= outputs.size()) throw UsageError(fmt::format("The model has {} outputs, and output {} is asked for (the first is 0).", outputs.size(), output));
    return outputs[output];
  };
  std::map<const void*, std::string> stored;
  for (const model::NamedTensor& p : model->parameters()) {
    out.parameters.push_back({p.name, p.tensor});
    stored[p.tensor.unsafeGetTensorImpl()] = "model/" + p.name;
  }
  for (const model::NamedTensor& b : model->buffers()) {
    out.buffers.push_back({b.name, b.tensor});
    stored[b.tensor.unsafeGetTensorImpl()] = "buffer/" + b.name;
  }
  for (const model::NamedTensor& s : model->state()) {
    if (const auto place = stored.find(s.tensor.unsafeGetTensorImpl()); place != stored.end()) out.state_names.emplace_back(s.name, place->second);
  }
  out.set_training = [model](bool on) -> std::function<void()> {
    const bool before = model->is_training();
    model->train(on);
    return [model, before] { model->train(before); };
  };
  return out;
}

}  // namespace memfit::train
