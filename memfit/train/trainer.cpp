#include "memfit/train/trainer.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <chrono>
#include <cmath>
#include <set>

#include "memfit/memory/cpu_allocator.h"
#include "memfit/optim/autocast.h"
#include "memfit/train/detail/trainer_run.h"
#include "memfit/train/evaluation.h"

namespace memfit::train {
namespace {

optim::GradScalerOptions scaler_options(const TrainerOptions& o) {
  optim::GradScalerOptions out = o.scaler;
  out.enabled = o.scaler.enabled && o.precision == Precision::FP16;
  return out;
}

}  // namespace

Trainer::Trainer(Model model, std::shared_ptr<optim::Optimizer> optimizer, const TrainerOptions& options)
    : model_(std::move(model)), optimizer_(std::move(optimizer)), options_(options), scaler_(scaler_options(options)),
      accumulator_(model_.parameters, &scaler_), micro_batch_(options.micro_batch) {
  if (!model_.forward) throw UsageError("Trainer: the model has no forward function.");
  if (!optimizer_) throw UsageError("Trainer: there is no optimizer.");
  std::set<const void*> known;
  for (const NamedTensor& p : model_.parameters) known.insert(p.tensor.unsafeGetTensorImpl());
  std::vector<std::string> strangers;
  for (const NamedTensor& p : optimizer_->parameters()) {
    if (!known.contains(p.tensor.unsafeGetTensorImpl())) strangers.push_back(p.name);
  }
  if (!strangers.empty()) {
    throw UsageError(fmt::format("Trainer: the optimizer holds tensors that are not the model's: {}. Was the model moved or loaded anew after the optimizer was made?",
                                 fmt::join(strangers, ", ")));
  }
  if (options.batch < 0 || options.micro_batch < 0) throw UsageError("Trainer: batch and micro_batch are numbers of rows, 0 or more.");
  if (options.batch > 0 && options.micro_batch > options.batch) {
    throw UsageError(fmt::format("Trainer: a micro_batch of {} rows is larger than the batch of {}.", options.micro_batch, options.batch));
  }
  if (options.tries < 1) throw UsageError(fmt::format("Trainer: tries is {}; a step is tried at least once.", options.tries));
  if (options.clip_norm && !(*options.clip_norm > 0)) throw UsageError(fmt::format("Trainer: a clip_norm of {}; it must be above 0.", *options.clip_norm));
  if (optimizer_->steps_in_backward()) {
    const char* other = options.clip_norm ? "clip_norm" : options.precision == Precision::FP16 ? "precision = FP16" : "its rollback of failed steps";
    throw UsageError(fmt::format("Trainer: an optimizer that steps in backward and {} contradict each other; switch step_in_backward off.", other));
  }
  if (options.memory.count() == 0 && !options.offload.empty()) throw UsageError("Trainer: offload without a limit; set memory.");
  start_counting();
  if (options.ema_decay) ema_.emplace(optimizer_->parameters(), *options.ema_decay);
  if (options.memory.count() > 0) {
    engine::SessionOptions session;
    session.tensor_memory = options.memory;
    session.offload = options.offload;
    session_ = std::make_unique<engine::Session>(session);
  }
}

Trainer::~Trainer() = default;

void Trainer::check(const Loss& loss) const {
  if (!loss.declared()) {
    throw UsageError("Trainer: the loss does not say how it reduces; make it with Loss::mean_over_rows, Loss::sum_and_weight or Loss::whole_batch.");
  }
  if (loss.needs_whole_batch() && (options_.micro_batch > 0 || options_.batch > 0)) {
    throw UsageError("Trainer: the loss needs the whole batch; leave batch and micro_batch at 0. A limit is then kept by recomputing.");
  }
}

std::vector<Batch> Trainer::next_window(BatchSource& source, Run& run) {
  run.source_before = source.state();
  run.generator_before.reset();
  persist([&] { run.generator_before = generator_state(); }, "copying the generator", run);
  std::vector<Batch> window;
  bool again = false;
  persist(
      [&] {
        window.clear();
        if (std::exchange(again, true)) source.load_state(run.source_before);
        std::int64_t rows = 0;
        do {
          std::optional<Batch> batch = source.next();
          if (!batch) break;
          rows += batch->rows;
          window.push_back(std::move(*batch));
        } while (rows < options_.batch);
        if (options_.batch > 0 && rows > options_.batch) {
          throw UsageError(fmt::format("Trainer: batches of {} rows do not add up to a batch of {}.", window.front().rows, options_.batch));
        }
      },
      "reading a batch", run);
  return window;
}

std::optional<double> Trainer::compute_gradients(const std::vector<Batch>& window, const Loss& loss) {
  std::optional<double> weight = 0;
  std::int64_t parts = 0;
  for (const Batch& b : window) {
    const std::optional<double> part = loss.weight_of(b);
    weight = weight && part ? std::optional(*weight + *part) : std::nullopt;
    parts += micro_batch_ > 0 ? (b.rows + micro_batch_ - 1) / micro_batch_ : 1;
  }
  accumulator_.begin(std::max<std::int64_t>(1, parts), weight);
  for (const Batch& b : window) {
    const std::int64_t rows = micro_batch_ > 0 ? micro_batch_ : std::max<std::int64_t>(1, b.rows);
    for (std::int64_t begin = 0; begin < b.rows; begin += rows) {
      const Batch part = b.narrow(begin, std::min(rows, b.rows - begin));
      WeightedSum sum;
      {
        std::optional<optim::Autocast> autocast;
        if (options_.precision != Precision::FP32) autocast.emplace(options_.precision == Precision::BF16 ? at::kBFloat16 : at::kHalf);
        sum = loss(model_.forward(part.inputs), part);
      }
      accumulator_.add(sum, loss.gives_mean());
    }
  }
  return accumulator_.finish();
}

StepReport Trainer::train_step(const std::vector<Batch>& window, const Loss& loss, Run& run) {
  const auto start = std::chrono::steady_clock::now();
  const std::int64_t retries_before = run.result.retries;
  if (options_.count) memory::CpuAllocator::instance().reset_peaks();
  StepReport report;
  report.step = step_ + 1;
  report.epoch = epoch_;
  std::int64_t parts = 0;
  const std::optional<double> value = try_gradients(window, loss, run, &report.gradient_norm);
  for (const Batch& b : window) {
    report.rows += b.rows;
    parts += micro_batch_ > 0 ? (b.rows + micro_batch_ - 1) / micro_batch_ : 1;
  }
  report.micro_batches = parts;
  report.loss = value.value_or(0);
  if (options_.schedule) optimizer_->set_learning_rate_factor(options_.schedule(step_));
  report.learning_rate = optimizer_->learning_rate() * (options_.schedule ? options_.schedule(step_) : 1);
  if (value) update_parameters(report, run);
  optimizer_->zero_grad();
  ++step_;
  if (counts()) {
    const memory::Ledger ledger = memory::CpuAllocator::instance().ledger();
    report.used = Bytes(ledger.live);
    report.peak = Bytes(ledger.peak);
  }
  if (session_) report.limit = options_.memory;
  report.retries = static_cast<int>(run.result.retries - retries_before);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

void Trainer::update_parameters(StepReport& report, Run& run) {
  run.generator_before.reset();  // from here on the state before the step is gone
  bool stepped = true;
  // A step that fails remembers how far it came: it is called again, not undone.
  persist([&] { stepped = scaler_.step(*optimizer_); }, "updating parameters", run);
  if (scaler_.enabled()) persist([&] { scaler_.update(); }, "updating the loss scale", run);
  if (stepped && ema_) persist([&] { ema_->update(); }, "averaging parameters", run);
  report.skipped = !stepped;
  run.result.skipped += report.skipped;
}

FitResult Trainer::fit(BatchSource& source, const Loss& loss, const FitOptions& options) {
  check(loss);
  if (options.epochs < 1) throw UsageError(fmt::format("Trainer: {} epochs; there is at least 1.", options.epochs));
  FitResult result;
  Progress progress(*options.out, options.progress, options.steps);
  if (!options.description.is_null() && !options.description.is_object()) throw UsageError("Trainer: the description is no JSON object.");
  Run run{options, progress, result, std::nullopt, {}, {}, ""};
  const auto begin_epoch = [&] { persist([&] { source.reset(epoch_); }, "beginning an epoch", run); };
  begin_epoch();
  if (!options.checkpoint_dir.empty()) {
    run.folder.emplace(options.checkpoint_dir, options.keep);
    resume(source, run);
  }
  const auto ended = [&] { return result.interrupted || (options.steps && step_ >= *options.steps); };
  std::function<void()> modes_back;
  if (model_.set_training) modes_back = model_.set_training(true);
  std::int64_t saved_at = step_;
  const auto checkpoint = [&] {
    if (!run.folder || saved_at == step_) return;
    at::Tensor generator;
    persist([&] { generator = generator_state(); }, "copying the generator", run);
    save(source.state(), generator, run);
    saved_at = step_;
  };
  while (epoch_ < options.epochs && !ended()) {
    while (!ended()) {
      const std::vector<Batch> window = next_window(source, run);
      if (window.empty()) break;
      if (!micro_batch_chosen_) choose_micro_batch(window, loss, run);
      const StepReport report = train_step(window, loss, run);
      run.generator_before.reset();
      progress.step(report);
      if (options.on_step) options.on_step(report);
      result.interrupted = options.stop && options.stop();
      if (options.checkpoint_every > 0 && step_ % options.checkpoint_every == 0) checkpoint();
    }
    if (ended()) break;
    ++epoch_;
    begin_epoch();
    if (options.validate != nullptr) {
      Evaluation value;
      persist([&] { value = evaluate(*options.validate, loss, options.metrics); }, "validation", run);
      std::string line = fmt::format("epoch {}: validation loss {:.6g}", epoch_ - 1, value.loss);
      for (const auto& [name, number] : value.metrics) line += fmt::format("  {} {:.6g}", name, number);
      result.validation.push_back(std::move(value));
      progress.say(line);
    }
    checkpoint();
  }
  checkpoint();
  if (modes_back) modes_back();
  result.steps = step_;
  return result;
}

Evaluation Trainer::evaluate(BatchSource& source, const Loss& loss, const std::vector<Metric>& metrics) {
  check(loss);
  EvaluationScope scope(model_);
  source.reset(0);
  Evaluation out;
  double sum = 0, weight = 0;
  std::vector<std::pair<double, double>> sums(metrics.size());
  while (const std::optional<Batch> b = source.next()) {
    const std::int64_t rows = micro_batch_ > 0 ? micro_batch_ : std::max<std::int64_t>(1, b->rows);
    out.rows += b->rows;
    for (std::int64_t begin = 0; begin < b->rows; begin += rows) {
      const Batch part = b->narrow(begin, std::min(rows, b->rows - begin));
      std::optional<optim::Autocast> autocast;
      if (options_.precision != Precision::FP32) autocast.emplace(options_.precision == Precision::BF16 ? at::kBFloat16 : at::kHalf);
      const at::Tensor output = model_.forward(part.inputs);
      const WeightedSum one = loss(output, part);
      sum += one.sum.item<double>() * (loss.gives_mean() ? one.weight : 1);
      weight += one.weight;
      for (std::size_t i = 0; i < metrics.size(); ++i) {
        const WeightedSum counted = metrics[i].add(output, part);
        sums[i].first += counted.sum.item<double>();
        sums[i].second += counted.weight;
      }
    }
  }
  if (weight == 0) throw UsageError("Trainer: the validation set is empty, or all of its weights are 0.");
  out.loss = sum / weight;
  for (std::size_t i = 0; i < metrics.size(); ++i) {
    if (sums[i].second == 0) throw UsageError(fmt::format("Trainer: nothing of the validation set counts for {}.", metrics[i].name));
    out.metrics.emplace_back(metrics[i].name, metrics[i].finish(sums[i].first / sums[i].second));
  }
  return out;
}

}  // namespace memfit::train
