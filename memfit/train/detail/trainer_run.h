// What one call of Trainer::fit carries along, and what a step is rolled back to.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memfit/train/trainer.h"

namespace memfit::train {

struct Trainer::Run {
  const FitOptions& options;
  Progress& progress;
  FitResult& result;
  std::optional<CheckpointFolder> folder;
  nlohmann::json source_before;  // where the source stood before the window that is trained on
  at::Tensor generator_before;    // and the generator, taken in advance: defined while the whole run is as it was then
  std::string newest_checkpoint;
};

/// Buffers and generator at the start of a step. Parameters and optimizer change only after all that can need them.
struct Trainer::Snapshot {
  explicit Snapshot(const Model& model) {
    for (const NamedTensor& b : model.buffers) buffers.emplace_back(b.tensor, b.tensor.detach().clone());
    generator = at::detail::getDefaultCPUGenerator().get_state();
  }
  void put_back() const {
    at::NoGradGuard no_grad;
    for (const auto& [buffer, value] : buffers) buffer.variable_data().copy_(value);
    at::Generator g = at::detail::getDefaultCPUGenerator();
    g.set_state(generator);
  }
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers;
  at::Tensor generator;
};

/// Whether the exception that is being handled says that memory was refused.
inline bool out_of_memory() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const std::bad_alloc&) {
    return true;
  } catch (const c10::Error& e) {  // PyTorch's own CPU allocator throws no error of its own type
    return std::string_view(e.what()).find("can't allocate memory") != std::string_view::npos;
  } catch (...) {
    return false;
  }
}

}  // namespace memfit::train
