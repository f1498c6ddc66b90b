// The training loop: batches split to fit a limit, mixed precision, steps that survive a failed allocation, checkpoints from which
// a run goes on bit for bit.
//   memfit::train::Trainer trainer(model, optimizer, {.memory = 2_GiB, .precision = Precision::BF16});
//   trainer.fit(loader, loss, {.epochs = 3, .validate = &held_out, .checkpoint_dir = "ckpt"});
// Not here: its parts, which serve alone (gradients.h, checkpoint.h, evaluation.h, checkpoint_folder.h, optim/).
// Threads: one. Cost beside the steps themselves: a copy of the model's buffers a step; under a limit, two short probes before
// the first step and what the engine takes (engine/session.h).
#pragma once

#include <functional>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/engine/session.h"
#include "memfit/optim/grad_scaler.h"
#include "memfit/optim/optimizer.h"
#include "memfit/train/batch.h"
#include "memfit/train/checkpoint_folder.h"
#include "memfit/train/gradients.h"
#include "memfit/train/metrics.h"
#include "memfit/train/progress.h"
#include "memfit/train/schedule.h"

namespace memfit::train {

enum class Precision { FP32, BF16, FP16 };

struct TrainerOptions {
  /// Limit on all CPU tensors. Default: none, and nothing is watched.
  Bytes memory{};
  /// Folder on a disk that tensors may be moved to under the limit. Default: none.
  std::string offload{};
  /// Count tensor bytes and set the peak anew each step, also without a limit. For a process of one trainer. Default off.
  bool count = false;
  /// BF16 and FP16 run forward under autocast; FP16 also scales the loss. Default FP32.
  Precision precision = Precision::FP32;
  /// Rows of one effective step, gathered from whole batches of the source. Default 0: each of its batches is a step.
  std::int64_t batch = 0;
  /// Rows that go through the model at a time. Default 0: all, or under a limit what two small probes say will fit.
  std::int64_t micro_batch = 0;
  /// Whether a limit may be kept by splitting batches, which changes rounding. Default yes. Off: only by what keeps every bit.
  bool split = true;
  std::optional<double> clip_norm{};
  /// Report the gradients' norm also without clipping. Default off; costs a pass over the gradients.
  bool gradient_norm = false;
  Schedule schedule{};
  std::optional<double> ema_decay{};
  /// How often a step is tried before the run stops. Default 4.
  int tries = 4;
  optim::GradScalerOptions scaler{};
};

struct FitOptions {
  std::int64_t epochs = 1;
  /// Ends the run after so many effective steps in all, also in the middle of an epoch.
  std::optional<std::int64_t> steps{};
  /// Read once an epoch.
  BatchSource* validate = nullptr;
  std::vector<Metric> metrics{};
  /// Default: no checkpoints. A folder that holds some is gone on from.
  std::string checkpoint_dir{};
  /// Steps between checkpoints; 0 (default) for one an epoch.
  std::int64_t checkpoint_every = 0;
  int keep = 2;
  ProgressStyle progress = ProgressStyle::Auto;
  std::ostream* out = &std::cerr;
  std::function<void(const StepReport&)> on_step{};
  /// Asked after each step; where it says yes the run is saved and ends.
  std::function<bool()> stop{};
  /// What the run depends on, as an object: kept in checkpoints; a run that is gone on from must have said the same.
  nlohmann::json description = nullptr;
};

struct Evaluation {
  double loss = 0;
  std::vector<std::pair<std::string, double>> metrics;
  std::int64_t rows = 0;
};

struct FitResult {
  std::int64_t steps = 0;  // in all, also before a resumption
  std::optional<std::int64_t> resumed_at;
  std::vector<Evaluation> validation;  // an epoch each, of this call
  bool interrupted = false;            // by FitOptions::stop
  std::int64_t skipped = 0, retries = 0;
};

/// The run stopped at a place it can go on from. what() names the reason and the checkpoint.
class TrainingStopped : public Error {
 public:
  TrainingStopped(const std::string& text, std::string checkpoint) : Error(ExitStatus::DoesNotFit, text), checkpoint_(std::move(checkpoint)) {}
  /// "" where there is none.
  const std::string& checkpoint() const { return checkpoint_; }

 private:
  std::string checkpoint_;
};

/// Bytes of one step.
struct MemoryNeeds {
  Bytes parameters, buffers, gradients, optimizer_state, inputs;
  /// What forward and backward hold beside the above (gradients that are there by then included) where they hold most.
  Bytes activations;
  /// Predicted highest use of the step without a limit.
  Bytes peak;
};

class Trainer {
 public:
  /// Throws:   UsageError for options that contradict each other and for an optimizer with tensors that are not the model's, by name.
  Trainer(Model model, std::shared_ptr<optim::Optimizer> optimizer, const TrainerOptions& options = {});
  ~Trainer();

  /// Throws:   UsageError before step 1 for a loss that does not say how it reduces, a batch that cannot be split as asked, a
  ///           checkpoint of another model; TrainingStopped when a step does not fit or the loss is no number.
  FitResult fit(BatchSource& source, const Loss& loss, const FitOptions& options = {});
  /// The loss over all of `source`, weighted exactly; modes, buffers, generator are as before.
  Evaluation evaluate(BatchSource& source, const Loss& loss, const std::vector<Metric>& metrics = {});
  /// What a step on `batch` takes, from forward and backward passes over few of its rows that leave no trace; all of them where the
  /// rows are `fixed` in number. Makes the optimizer's state.
  /// Requires: `count` or a limit. Throws: UsageError otherwise; what the model and the loss throw.
  MemoryNeeds needs(const Batch& batch, const Loss& loss, bool fixed = false);

  /// Averages where ema_decay is set.
  Ema* averages() { return ema_ ? &*ema_ : nullptr; }
  std::int64_t step() const { return step_; }
  /// Rows that go through the model at a time; 0 for all.
  std::int64_t micro_batch() const { return micro_batch_; }

 private:
  struct Snapshot;
  struct Run;

  void check(const Loss& loss) const;
  void start_counting();
  void choose_micro_batch(const std::vector<Batch>& window, const Loss& loss, Run& run);
  std::uint64_t probe(const Batch& batch, std::int64_t rows, const Loss& loss, std::string* per_batch);
  std::vector<Batch> next_window(BatchSource& source, Run& run);
  std::optional<double> compute_gradients(const std::vector<Batch>& window, const Loss& loss);
  std::optional<double> try_gradients(const std::vector<Batch>& window, const Loss& loss, Run& run, std::optional<double>* norm);
  StepReport train_step(const std::vector<Batch>& window, const Loss& loss, Run& run);
  void update_parameters(StepReport& report, Run& run);
  void persist(const std::function<void()>& what, const char* name, Run& run);
  [[noreturn]] void stop(const std::string& why, Run& run);
  bool halve_micro_batch(const std::vector<Batch>& window, const Loss& loss);

  std::vector<NamedTensor> tensors_of_run() const;
  std::string save(const nlohmann::json& source_state, const at::Tensor& generator, Run& run) const;
  void resume(BatchSource& source, Run& run);
  static void check_description(const nlohmann::json& saved, const nlohmann::json& now, const std::string& path);
  bool counts() const { return session_ != nullptr || options_.count; }
  at::Tensor generator_state() const;

  Model model_;
  std::shared_ptr<optim::Optimizer> optimizer_;
  TrainerOptions options_;
  std::unique_ptr<engine::Session> session_;
  optim::GradScaler scaler_;
  Accumulator accumulator_;
  std::optional<Ema> ema_;
  std::int64_t step_ = 0;
  std::int64_t epoch_ = 0;
  std::int64_t micro_batch_ = 0;
  bool may_split_ = true;   // as far as is known
  bool watched_ = false;    // for layers whose result depends on the whole batch
  bool micro_batch_chosen_ = false;
};

}  // namespace memfit::train
