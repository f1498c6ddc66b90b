// A DataLoader of files as the trainer's source, and a model of a file as the trainer's model.
// Not here: which field is which input (train_cli/), what a row is (data/). Threads: one. Cost: none beside theirs.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "memfit/data/data_loader.h"
#include "memfit/model/model.h"
#include "memfit/train/batch.h"

namespace memfit::train {

class LoaderSource : public BatchSource {
 public:
  /// `inputs`, `targets`: fields of the dataset, in the model's order.
  LoaderSource(std::unique_ptr<data::DataLoader> loader, std::vector<std::size_t> inputs, std::vector<std::size_t> targets)
      : loader_(std::move(loader)), inputs_(std::move(inputs)), targets_(std::move(targets)) {}

  std::optional<Batch> next() override;
  void reset(std::int64_t epoch) override { loader_->start(epoch); }
  nlohmann::json state() const override;
  void load_state(const nlohmann::json& state) override { loader_->load_state(state); }
  data::DataLoader& loader() { return *loader_; }

 private:
  std::unique_ptr<data::DataLoader> loader_;
  std::vector<std::size_t> inputs_, targets_;
};

/// `output`: which of the model's outputs the loss takes.
/// Throws in forward: UsageError where there is no such output.
Model model_of(const std::shared_ptr<model::Model>& model, std::size_t output = 0);

}  // namespace memfit::train
