// Where a training run is saved: a folder a checkpoint, whole or not there at all, with sums; the last good ones are kept.
//   DIR/step-000000120/tensors.safetensors   DIR/step-000000120/state.json
// Not here: what goes in (trainer.h). Threads: one process writes a folder. Cost: that of the bytes, and four fsyncs a checkpoint.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memfit/train/tensor_file.h"

namespace memfit::train {

struct SavedRun {
  std::int64_t step = 0;
  std::string path;
  nlohmann::json state;
  std::unique_ptr<TensorFile> tensors;
  /// One line for each newer checkpoint that could not be used, and why.
  std::vector<std::string> passed_over;
};

class CheckpointFolder {
 public:
  /// Makes the folder where there is none. `keep`: how many checkpoints stay; at least 2, so that one is always whole.
  /// Throws:   UsageError when it cannot be a folder or `keep` is below 2.
  explicit CheckpointFolder(const std::string& path, int keep = 2);

  /// Returns its path. A checkpoint of the same step is replaced.
  std::string save(std::int64_t step, const std::vector<NamedTensor>& tensors, const nlohmann::json& state) const;
  /// The newest whose sums are right; nothing where there is none at all.
  /// Throws:   Error naming each when there are some and none can be used.
  std::optional<SavedRun> latest() const;

 private:
  std::vector<std::int64_t> steps() const;
  std::string path_of(std::int64_t step) const;

  std::string path_;
  int keep_;
};

}  // namespace memfit::train
