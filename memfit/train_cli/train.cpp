// memfit train: a model of a file, trained on arrays of files, without a line of code.
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <fmt/ranges.h>
#include <torch/types.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>

#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/data/array_dataset.h"
#include "memfit/data/checked_dataset.h"
#include "memfit/model/model.h"
#include "memfit/train/loader_source.h"
#include "memfit/train/losses.h"
#include "memfit/train/metrics.h"
#include "memfit/train/optimizers.h"
#include "memfit/train/trainer.h"
#include "memfit/train_cli/key_matching.h"
#include "memfit/train_cli/verbs.h"

namespace memfit::train_cli {
namespace {

volatile std::sig_atomic_t interrupts = 0;

void on_interrupt(int) {
  interrupts = interrupts + 1;
  if (interrupts > 1) std::signal(SIGINT, SIG_DFL);  // a third ends it at once
}

struct Options {
  std::string model, eval_model, data, validate, loss, optimizer = "adamw", schedule = "constant", precision = "fp32", memory, offload, checkpoints, log, config;
  std::vector<std::string> metrics, inputs, targets;
  std::int64_t batch = 32, micro_batch = 0, epochs = 1, checkpoint_every = 0;
  std::optional<std::int64_t> steps;
  std::optional<double> clip_norm, ema;
  std::uint64_t seed = 0;
  int keep = 2, threads = 2;
  bool split = false, no_shuffle = false, drop_last = false, dry_run = false, force = false;
};

train::Precision precision_of(const std::string& text) {
  if (text == "bf16") return train::Precision::BF16;
  return text == "fp16" ? train::Precision::FP16 : train::Precision::FP32;
}

std::vector<at::Tensor> pick(const data::Batch& batch, const std::vector<std::size_t>& fields) {
  std::vector<at::Tensor> out;
  for (const std::size_t f : fields) out.push_back(batch.fields.at(f));
  return out;
}

class Training {
 public:
  explicit Training(const Options& o) : o_(o), loss_(train::make_loss(o.loss)), limit_(o.memory.empty() ? Bytes() : parse_size(o.memory, "--memory")) {
    if (o_.batch < 1 || o_.epochs < 1 || o_.threads < 0) throw UsageError("--batch and --epochs are at least 1, --threads 0 or more.");
    for (const std::string& text : o_.metrics) metrics_.push_back(train::make_metric(text, loss_));
    if (!metrics_.empty() && o_.validate.empty()) throw UsageError("--metric: metrics are of a validation set; give --validate FILE.");
    if (!o_.log.empty() && o_.checkpoints.empty()) check_output_file(o_.log, "--log", o_.force ? Replace::Yes : Replace::No);
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    generator.set_current_seed(o_.seed);
    load();
  }

  void run() {
    train::TrainerOptions t{.memory = limit_, .offload = o_.offload, .count = true, .precision = precision_of(o_.precision), .micro_batch = o_.micro_batch,
                            .split = o_.split, .clip_norm = o_.clip_norm, .gradient_norm = true, .ema_decay = o_.ema};
    const train::Model trained = train::model_of(model_);
    const std::int64_t per_epoch = batches(*data_, o_.drop_last), steps = o_.steps.value_or(per_epoch * o_.epochs);
    t.schedule = train::make_schedule(o_.schedule, steps);
    train::Trainer trainer(trained, train::make_optimizer(o_.optimizer, trained.parameters), t);
    check_batches();
    auto source = open(data_, match_, !o_.no_shuffle, o_.drop_last);
    std::unique_ptr<train::LoaderSource> held_out;
    if (validation_) held_out = open(validation_, validation_match_, false, false);
    print_needs(trainer, *source);
    if (o_.dry_run) return;
    train::FitOptions fit{.epochs = o_.steps ? std::numeric_limits<std::int64_t>::max() : o_.epochs, .steps = o_.steps, .validate = held_out.get(), .metrics = metrics_,
                          .checkpoint_dir = o_.checkpoints, .checkpoint_every = o_.checkpoint_every, .keep = o_.keep};
    fit.on_step = [this](const train::StepReport& r) { write_log(r); };
    fit.stop = [] { return interrupts > 0; };
    fit.description = {{"loss", o_.loss}, {"optimizer", o_.optimizer}, {"schedule", o_.schedule}, {"batch", o_.batch}, {"micro_batch", o_.micro_batch},
                       {"precision", o_.precision}, {"seed", o_.seed}, {"shuffle", !o_.no_shuffle}, {"drop_last", o_.drop_last}};
    if (o_.schedule != "constant") fit.description["schedule_steps"] = steps;
    if (o_.clip_norm) fit.description["clip_norm"] = *o_.clip_norm;
    if (o_.ema) fit.description["ema"] = *o_.ema;
    if (o_.checkpoints.empty()) fmt::print(stderr, "No --checkpoints: the trained weights are gone when this ends.\n");
    std::signal(SIGINT, on_interrupt);
    train::FitResult result = trainer.fit(*source, loss_.loss, fit);
    // --steps may end inside an epoch, which is then not validated.
    if (held_out && !result.interrupted && o_.steps) result.validation.push_back(trainer.evaluate(*held_out, loss_.loss, metrics_));
    fmt::print("{} steps{}\n", result.steps, result.interrupted ? ", interrupted" : "");
    if (!result.validation.empty()) {
      fmt::print("validation loss {:.6g}\n", result.validation.back().loss);
      for (const auto& [name, value] : result.validation.back().metrics) fmt::print("{} {:.6g}\n", name, value);
    }
    if (result.interrupted) throw Interrupted(o_.checkpoints.empty() ? "interrupted; nothing was saved." : "interrupted and saved; the same command goes on.");
    if (!o_.checkpoints.empty()) fmt::print(stderr, "Next: memfit export {} -o tuned.safetensors\n", o_.checkpoints);
  }

 private:
  void load() {
    model_ = std::shared_ptr<model::Model>(model::load(o_.model, {.eval_path = o_.eval_model}));
    if (const auto reason = model_->why_not_trainable()) throw Error(ExitStatus::BadInput, *reason);
    if (!o_.validate.empty() && model_->mode_of(false) == model::Mode::Train) {
      throw UsageError(fmt::format("--validate: {} does only what it was exported for, which is training. Give --eval-model, the same model exported after model.eval().", o_.model));
    }
    KeyOptions keys{.targets = o_.targets, .fewest_targets = loss_.fewest_targets, .most_targets = loss_.most_targets};
    for (const std::string& pair : o_.inputs) {
      const std::size_t equal = pair.find('=');
      if (equal == std::string::npos) throw UsageError(fmt::format("--input {}: it is written NAME=KEY, the model's input and the data's array.", pair));
      keys.inputs[pair.substr(0, equal)] = pair.substr(equal + 1);
    }
    data_ = std::make_shared<data::ArrayDataset>(o_.data);
    match_ = match_keys(model_->inputs(), data_->fields(), o_.data, keys);
    if (o_.validate.empty()) return;
    validation_ = std::make_shared<data::ArrayDataset>(o_.validate);
    validation_match_ = match_keys(model_->inputs(), validation_->fields(), o_.validate, keys);
  }

  std::int64_t batches(const data::Dataset& rows, bool drop_last) const { return drop_last ? rows.size() / o_.batch : (rows.size() + o_.batch - 1) / o_.batch; }

  /// Runs the model once on a batch: shapes, classes, and whether the number of rows is free. Leaves no trace.
  void check_batches() {
    if (data_->size() < 1) throw UsageError(fmt::format("{} holds no row.", o_.data));
    data::DataLoader loader(data_, {.batch = std::min(o_.batch, data_->size()), .threads = 0, .queue = Bytes(std::uint64_t{1} << 40)});
    const data::Batch sample = *loader.next();
    const std::vector<at::Tensor> inputs = pick(sample, match_.inputs);
    const auto rows = static_cast<std::int64_t>(sample.rows.size());
    const train::Batch batch{inputs, pick(sample, match_.targets), rows};
    if (rows > 1) {
      if (const auto baked = model::find_baked_batch(*model_, inputs)) {
        fixed_ = true;
        check_fixed(*baked, *data_, o_.drop_last);
        if (validation_) check_fixed(*baked, *validation_, false);
      }
    }
    std::vector<at::Tensor> buffers;
    for (const auto& b : model_->buffers()) buffers.push_back(b.tensor.clone());
    at::Generator generator = at::globalContext().defaultGenerator(at::kCPU);
    const at::Tensor random = generator.get_state();
    {
      const at::NoGradGuard no_grad;
      const at::Tensor output = model_->forward(inputs).at(0);
      if (loss_.takes_classes && !at::isFloatingType(batch.targets.at(0).scalar_type())) {
        train::Batch whole = batch;
        whole.targets[0] = at::zeros_like(batch.targets[0], at::kLong);
        classes_ = train::class_scores(output, whole.targets[0], loss_.class_dim).scores.size(1);
        loss_.loss(output, whole);
      } else {
        loss_.loss(output, batch);
      }
      for (std::size_t i = 0; i < buffers.size(); ++i) model_->buffers()[i].tensor.copy_(buffers[i]);
    }
    generator.set_state(random);
  }

  void check_fixed(const std::string& baked, const data::Dataset& rows, bool drop_last) const {
    if (o_.micro_batch == 0 && (drop_last || rows.size() % o_.batch == 0)) return;
    throw UsageError(fmt::format("The number of rows is baked into {} ({}), and {} has {} rows, which {} does not divide. Export with dynamic_shapes, or {}.", o_.model, baked,
                                 rows.name(), rows.size(), o_.batch, o_.micro_batch > 0 ? "leave --micro-batch out" : "leave the rest out with --drop-last (a validation set must divide)"));
  }

  std::unique_ptr<train::LoaderSource> open(const std::shared_ptr<data::ArrayDataset>& rows, const KeyMatch& match, bool shuffle, bool drop_last) const {
    std::vector<data::FieldCheck> checks;
    for (const std::size_t f : match.targets) checks.push_back({.field = f, .finite = true, .classes = classes_, .ignored = loss_.ignore_index});
    const auto checked = std::make_shared<data::CheckedDataset>(rows, checks);
    data::LoaderOptions options{.batch = o_.batch, .order = {.shuffle = shuffle, .seed = o_.seed}, .drop_last = drop_last, .threads = o_.threads};
    if (limit_.count() > 0) {
      Bytes row;
      for (const data::Field& f : checked->fields()) row += f.bytes() + Bytes(64);
      options.queue = std::max(row * static_cast<std::uint64_t>(2 * o_.batch), std::min(options.queue, Bytes(limit_.count() / 16)));
    }
    return std::make_unique<train::LoaderSource>(std::make_unique<data::DataLoader>(checked, options), match.inputs, match.targets);
  }

  void print_needs(train::Trainer& trainer, train::LoaderSource& source) {
    source.reset(0);
    const auto batch = source.next();
    if (!batch) throw UsageError(fmt::format("{} has fewer rows than --batch, and --drop-last leaves them out.", o_.data));
    const train::MemoryNeeds n = trainer.needs(*batch, loss_.loss, fixed_ || loss_.loss.needs_whole_batch());
    source.reset(0);
    const auto line = [](const char* name, Bytes bytes) { fmt::print(stderr, "  {:<16}{:>12}\n", name, format_bytes(bytes)); };
    fmt::print(stderr, "A step on {} rows takes, without a limit:\n", batch->rows);
    line("weights", n.parameters);
    line("buffers", n.buffers);
    line("gradients", n.gradients);
    line("optimizer", n.optimizer_state);
    line("inputs", n.inputs);
    line("activations", n.activations);
    line("predicted peak", n.peak);
    if (limit_.count() > 0) line("limit", limit_);
  }

  void write_log(const train::StepReport& report) {
    if (o_.log.empty()) return;
    if (!log_.is_open()) {
      // A run that is gone on from may have said steps that were lost since.
      std::string kept;
      std::ifstream before(o_.log);
      std::string text;
      for (std::int64_t step = 1; report.step > 1 && step < report.step && std::getline(before, text); ++step) kept += text + "\n";
      write_output_file(o_.log, kept, Replace::Yes);
      log_.open(o_.log, std::ios::app);
    }
    log_ << train::json_line(report) << '\n' << std::flush;
    if (!log_) throw Error(ExitStatus::Failed, fmt::format("--log {} cannot be written.", o_.log));
  }

  const Options& o_;
  train::NamedLoss loss_;
  Bytes limit_;
  std::vector<train::Metric> metrics_;
  std::shared_ptr<model::Model> model_;
  std::shared_ptr<data::ArrayDataset> data_, validation_;
  KeyMatch match_, validation_match_;
  std::optional<std::int64_t> classes_;
  bool fixed_ = false;
  std::ofstream log_;
};

}  // namespace

void add_train(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("train", "Train an exported model on arrays of files, inside a limit");
  verb->add_option("--config", o->config, "The same flags in a JSON or TOML file; the command line goes first");
  verb->add_option("--model", o->model, "torch.export program (.pt2) or TorchScript file")->required();
  verb->add_option("--eval-model", o->eval_model, "The same model exported in eval mode, for --validate");
  verb->add_option("--data", o->data, ".npz, .npy, safetensors or IDX file; rows are the first dimension")->required();
  verb->add_option("--validate", o->validate, "The same of rows that are not trained on; read once an epoch");
  verb->add_option("--input", o->inputs, "NAME=KEY: the model's input and its array")->take_all();
  verb->add_option("--target", o->targets, "KEY: the array the loss compares with")->take_all();
  verb->add_option("--loss", o->loss, "cross_entropy, mse, l1, huber, bce_with_logits, ctc or model, with ,SETTING=VALUE")->required();
  verb->add_option("--optimizer", o->optimizer, "sgd, adam, adamw, adafactor or lion, with ,lr=...")->capture_default_str();
  verb->add_option("--schedule", o->schedule, "constant, linear, cosine or staircase, with ,warmup=STEPS")->capture_default_str();
  verb->add_option("--metric", o->metrics, "accuracy, topk,k=5, perplexity or mae, of --validate")->take_all();
  verb->add_option("--batch", o->batch, "Rows of a step")->capture_default_str();
  verb->add_option("--micro-batch", o->micro_batch, "Rows through the model at a time; changes rounding");
  verb->add_flag("--split", o->split, "Let the limit be kept by splitting batches, too; changes rounding");
  verb->add_option("--epochs", o->epochs, "Times through the data")->capture_default_str();
  verb->add_option("--steps", o->steps, "End after so many steps in all");
  verb->add_option("--precision", o->precision, "fp32, bf16 or fp16")->check(CLI::IsMember({"fp32", "bf16", "fp16"}))->capture_default_str();
  verb->add_option("--memory", o->memory, "Limit on all tensors: 2GiB");
  verb->add_option("--offload", o->offload, "Folder that tensors may be moved to under the limit");
  verb->add_option("--clip-norm", o->clip_norm, "Scale gradients to this norm at most");
  verb->add_option("--ema", o->ema, "Keep averages of the weights with this decay");
  verb->add_option("--checkpoints", o->checkpoints, "Folder to save in and to go on from");
  verb->add_option("--checkpoint-every", o->checkpoint_every, "Steps between checkpoints; default one an epoch");
  verb->add_option("--keep", o->keep, "Checkpoints that stay")->capture_default_str();
  verb->add_option("--log", o->log, "FILE.jsonl: a line a step");
  verb->add_option("--seed", o->seed, "Of the order and of PyTorch's generator")->capture_default_str();
  verb->add_option("--threads", o->threads, "Threads that read ahead")->capture_default_str();
  verb->add_flag("--no-shuffle", o->no_shuffle, "Rows in the file's order");
  verb->add_flag("--drop-last", o->drop_last, "Leave a smaller last batch out");
  verb->add_flag("--dry-run", o->dry_run, "Say what a step takes and end; writes nothing");
  verb->add_flag("--force", o->force, "Replace the file of --log");
  verb->callback([o] { Training(*o).run(); });
}

}  // namespace memfit::train_cli
