// A model that Python exported, as something to train: TorchScript files (traced, scripted) and torch.export programs (.pt2).
//   const auto model = memfit::model::load("net.pt2");
//   at::Tensor loss = torch::mse_loss(model->forward({x}).at(0), y);
//   loss.backward();  ... any optimizer over model->parameters() ...
// Not here: optimizers, the loop (train/); models written in C++ need none of this.
// Threads: one object, one thread. Cost: loading reads the weights once; a step costs what the operators cost and about 1 us each.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::model {

struct NamedTensor {
  std::string name;  // as in Python's state_dict
  at::Tensor tensor;
};

/// A dimension of an input: a fixed size, or a symbol that several inputs may share.
struct Dimension {
  std::optional<std::int64_t> size;
  std::string symbol;  // "s77", or an expression of symbols; empty where the size is fixed
};

struct Input {
  std::string name;
  std::optional<at::ScalarType> type;            // unknown for TorchScript
  std::optional<std::vector<Dimension>> shape;   // unknown for TorchScript
};

enum class Format { TorchScript, Exported };
std::string_view format_name(Format format);  // "torchscript", "torch.export"

/// What the model does where training and evaluation differ (dropout, batch norm).
enum class Mode { Train, Eval, Either };

class Model {
 public:
  virtual ~Model() = default;

  virtual Format format() const = 0;
  /// Each once, however many names it has; in Python's order. They require gradients as they did in Python.
  virtual const std::vector<NamedTensor>& parameters() const = 0;
  virtual const std::vector<NamedTensor>& buffers() const = 0;
  /// Every persistent name with its tensor, shared ones several times: what Python's load_state_dict takes.
  virtual std::vector<NamedTensor> state() const = 0;
  virtual const std::vector<Input>& inputs() const = 0;

  /// One tensor an input; the outputs, flattened. Buffers are changed as the model changes them.
  /// Throws:   UsageError naming the input when a shape or type is not the model's; what the operators throw.
  virtual std::vector<at::Tensor> forward(at::ArrayRef<at::Tensor> inputs) = 0;

  /// What forward() does after train() and after eval(). Either: makes no difference.
  virtual Mode mode_of(bool training) const = 0;
  /// Throws:   UsageError when only the other mode was exported, naming what to export.
  virtual void train(bool on = true) = 0;
  void eval() { train(false); }
  virtual bool is_training() const = 0;

  /// Why it cannot be trained, or nothing.
  virtual std::optional<std::string> why_not_trainable() const = 0;
};

struct LoadOptions {
  /// The same model exported in eval mode, for eval(); its weights are those of the first file. Default none: TorchScript
  /// scripted models switch by themselves, the others do only what they were exported for.
  std::string eval_path{};
};

/// Throws:   BadInput naming the file and what it is instead: a state file, a program of a newer PyTorch, an operator
///           that this build lacks, control flow that depends on data.
std::unique_ptr<Model> load(const std::string& path, const LoadOptions& options = {});

/// Runs the model on `sample` (a few rows of each input) and on one row less, without gradients and leaving buffers and
/// random numbers as they were. Returns what shows that the number of rows is baked into the model, or nothing.
/// Requires: at least two rows. Throws: what forward() throws on the whole sample.
std::optional<std::string> find_baked_batch(Model& model, const std::vector<at::Tensor>& sample);

/// Bytes of the tensors, shared ones once.
Bytes total_bytes(const std::vector<NamedTensor>& tensors);

}  // namespace memfit::model
