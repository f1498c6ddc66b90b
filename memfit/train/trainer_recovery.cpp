// How the trainer takes a failed step back, and saves and resumes runs.
#include <fmt/ranges.h>

#include <cmath>

#include "memfit/memory/cpu_allocator.h"
#include "memfit/train/detail/trainer_run.h"
#include "memfit/train/per_batch.h"
#include "memfit/train/trainer.h"

namespace memfit::train {
namespace {

constexpr const char* kGenerator = "generator/cpu";
constexpr const char* kOptimizer = "optimizer/";

}  // namespace

bool Trainer::halve_micro_batch(const std::vector<Batch>& window, const Loss& loss) {
  std::int64_t rows = micro_batch_;
  for (const Batch& b : window) rows = std::max(rows, micro_batch_ > 0 ? rows : b.rows);
  if (!options_.split || !may_split_ || !watched_ || loss.needs_whole_batch() || rows < 2) return false;
  micro_batch_ = (rows + 1) / 2;
  return true;
}

std::optional<double> Trainer::try_gradients(const std::vector<Batch>& window, const Loss& loss, Run& run, std::optional<double>* norm) {
  std::optional<Snapshot> before;
  persist([&] { before.emplace(model_); }, "copying buffers", run);
  for (int attempt = 1;; ++attempt) {
    try {
      std::optional<PerBatchWatch> watch;
      if (!watched_) watch.emplace();
      const std::optional<double> value = compute_gradients(window, loss);
      if (watch) {
        may_split_ = may_split_ && watch->found().empty();
        watched_ = true;
      }
      if (value && !scaler_.enabled() && !std::isfinite(*value)) {
        before->put_back();
        optimizer_->zero_grad();
        stop(fmt::format("step {}: the loss is {}", step_ + 1, *value), run);
      }
      if (value) {
        scaler_.unscale(*optimizer_);
        if (options_.clip_norm) {
          *norm = clip_gradient_norm(*optimizer_, *options_.clip_norm);
        } else if (options_.gradient_norm) {
          *norm = gradient_norm(*optimizer_);
        }
      }
      return value;
    } catch (...) {
      const bool refused = out_of_memory();
      optimizer_->zero_grad();
      scaler_.abandon();
      before->put_back();
      if (!refused) throw;
    }
    ++run.result.retries;
    if (session_) memory::CpuAllocator::instance().trim(0);
    // Once as it was, which gives the same bits; then in finer parts.
    const bool again = attempt < options_.tries && (attempt == 1 || halve_micro_batch(window, loss));
    if (!again) stop(fmt::format("step {} did not fit into memory in {} tries", step_ + 1, attempt), run);
    run.progress.say(fmt::format("step {}: an allocation was refused; taken back and tried again{}", step_ + 1,
                                 attempt == 1 ? "" : fmt::format(" with {} rows at a time", micro_batch_)));
  }
}

/// Do what can be called again after a failed allocation, a bounded number of times.
void Trainer::persist(const std::function<void()>& what, const char* name, Run& run) {
  for (int attempt = 1;; ++attempt) {
    try {
      return what();
    } catch (...) {
      if (!out_of_memory()) throw;
    }
    ++run.result.retries;
    if (session_) memory::CpuAllocator::instance().trim(0);
    if (attempt == options_.tries) {
      stop(fmt::format("step {}: {} did not fit into memory in {} tries", step_ + 1, name, attempt), run);
    }
  }
}

void Trainer::stop(const std::string& why, Run& run) {
  std::string where = run.newest_checkpoint;
  const bool state_is_whole = run.generator_before.defined();
  if (run.folder && state_is_whole) where = save(run.source_before, run.generator_before, run);
  throw TrainingStopped(where.empty() ? why + ". There is no checkpoint; set checkpoint_dir to have one."
                                      : fmt::format("{}. {} holds the run as it was{}; fit() with the same checkpoint_dir goes on there.", why, where,
                                                    state_is_whole ? " before this step" : " when it was last saved"),
                        where);
}

at::Tensor Trainer::generator_state() const { return at::detail::getDefaultCPUGenerator().get_state(); }

std::vector<NamedTensor> Trainer::tensors_of_run() const {
  std::vector<NamedTensor> out;
  for (const NamedTensor& p : model_.parameters) out.push_back({"model/" + p.name, p.tensor});
  for (const NamedTensor& b : model_.buffers) out.push_back({"buffer/" + b.name, b.tensor});
  if (ema_) {
    for (const NamedTensor& a : ema_->averages()) out.push_back({"average/" + a.name, a.tensor});
  }
  return out;
}

std::string Trainer::save(const nlohmann::json& source_state, const at::Tensor& generator, Run& run) const {
  std::vector<NamedTensor> tensors = tensors_of_run();
  for (const NamedTensor& t : optimizer_->state_tensors()) tensors.push_back({kOptimizer + t.name, t.tensor});
  tensors.push_back({kGenerator, generator});
  nlohmann::json state = {{"step", step_}, {"epoch", epoch_}, {"micro_batch", micro_batch_}, {"may_split", may_split_}, {"source", source_state},
                                {"optimizer", optimizer_->state()}, {"scaler", scaler_.state()}};
  if (!run.options.description.is_null()) state["description"] = run.options.description;
  for (const auto& [name, stored] : model_.state_names) state["names"][name] = stored;
  run.newest_checkpoint = run.folder->save(step_, tensors, state);
  return run.newest_checkpoint;
}

/// A run gone on from with other settings would be neither the old one nor the new one.
void Trainer::check_description(const nlohmann::json& saved, const nlohmann::json& now, const std::string& path) {
  if (saved.is_null() || now.is_null()) return;
  std::vector<std::string> differences;
  for (const auto& [key, value] : now.items()) {
    const nlohmann::json before = saved.value(key, nlohmann::json());
    if (before != value) differences.push_back(fmt::format("{} was {} and is {}", key, before.dump(), value.dump()));
  }
  for (const auto& [key, value] : saved.items()) {
    if (!now.contains(key)) differences.push_back(fmt::format("{} was {} and is not set", key, value.dump()));
  }
  if (differences.empty()) return;
  throw UsageError(fmt::format("{} is of a run with other settings: {}. Give the same, or name another folder to begin anew.", path, fmt::join(differences, "; ")));
}

void Trainer::resume(BatchSource& source, Run& run) {
  std::optional<SavedRun> saved = run.folder->latest();
  if (!saved) return;
  for (const std::string& line : saved->passed_over) run.progress.say("not used: " + line);
  check_description(saved->state.value("description", nlohmann::json()), run.options.description, saved->path);
  const TensorFile& file = *saved->tensors;
  std::vector<NamedTensor> into = tensors_of_run();
  at::Tensor generator = generator_state();
  into.push_back({kGenerator, generator});
  load_tensors(file, into, kOptimizer);
  optimizer_->load_state(saved->state.at("optimizer"), [&](const std::string& name) { return file.load(kOptimizer + name); });
  if (scaler_.enabled()) scaler_.load_state(saved->state.at("scaler"));
  at::Generator g = at::detail::getDefaultCPUGenerator();
  g.set_state(generator);
  step_ = saved->state.at("step");
  epoch_ = saved->state.at("epoch");
  micro_batch_ = saved->state.at("micro_batch");  // another split would round otherwise
  may_split_ = saved->state.at("may_split");
  micro_batch_chosen_ = watched_ = true;
  source.load_state(saved->state.at("source"));
  run.newest_checkpoint = saved->path;
  run.result.resumed_at = step_;
  run.progress.say(fmt::format("going on at step {} from {}", step_, saved->path));
}

}  // namespace memfit::train
