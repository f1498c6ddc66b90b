// How the trainer finds out what a step takes, and how many rows go through the model at a time.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "memfit/memory/cpu_allocator.h"
#include "memfit/train/detail/trainer_run.h"
#include "memfit/train/per_batch.h"
#include "memfit/train/trainer.h"

namespace memfit::train {
namespace {

Bytes bytes_of(const std::vector<NamedTensor>& tensors) {
  Bytes sum;
  for (const NamedTensor& t : tensors) sum += Bytes(t.tensor.nbytes());
  return sum;
}

Bytes bytes_of(const std::vector<at::Tensor>& tensors) {
  Bytes sum;
  for (const at::Tensor& t : tensors) sum += Bytes(t.nbytes());
  return sum;
}

}  // namespace

void Trainer::start_counting() {
  if (!options_.count) return;
  memory::CpuAllocator::instance().install();
}

/// The peak that a forward and backward pass over the first `rows` rows would have without a limit. Leaves no trace.
std::uint64_t Trainer::probe(const Batch& batch, std::int64_t rows, const Loss& loss, std::string* per_batch) {
  const Snapshot before(model_);
  const std::int64_t micro_batch = std::exchange(micro_batch_, 0);
  auto& allocator = memory::CpuAllocator::instance();
  if (counts()) allocator.reset_peaks();
  auto leave = [&] {
    micro_batch_ = micro_batch;
    optimizer_->zero_grad();
    scaler_.abandon();
    before.put_back();
  };
  try {
    PerBatchWatch watch;
    compute_gradients({batch.narrow(0, rows)}, loss);
    *per_batch = watch.found();
  } catch (...) {
    leave();
    throw;
  }
  leave();
  return counts() ? allocator.ledger().peak_program : 0;
}

/// From two small probes: bytes grow with the rows as a line does. Nothing is found out by failing.
void Trainer::choose_micro_batch(const std::vector<Batch>& window, const Loss& loss, Run& run) {
  micro_batch_chosen_ = true;
  may_split_ = !loss.needs_whole_batch();
  const Batch& batch = *std::max_element(window.begin(), window.end(), [](const Batch& a, const Batch& b) { return a.rows < b.rows; });
  const bool asked = options_.micro_batch > 0 || options_.batch > 0;
  if (!may_split_ || batch.rows < 2 || ((!session_ || !options_.split) && !asked)) return;
  persist([&] { optimizer_->make_state(); }, "making the optimizer's state", run);
  const std::int64_t few = std::max<std::int64_t>(2, batch.rows / 16), more = std::min(batch.rows, 2 * few);
  std::string per_batch;
  double small = 0, large = 0;
  persist([&] { small = static_cast<double>(probe(batch, few, loss, &per_batch)); }, "the first probe", run);
  watched_ = true;
  if (!per_batch.empty()) {
    may_split_ = false;
    if (asked && (options_.micro_batch > 0 || window.size() > 1)) {
      throw UsageError(fmt::format("Trainer: the model has {}, whose result depends on the whole batch; splitting it would train another model. "
                                   "Leave batch and micro_batch at 0{}.",
                                   per_batch, session_ ? ": the limit is then kept by recomputing" : ""));
    }
    run.progress.say(fmt::format("not split: the model has {}; the limit is kept by recomputing", per_batch));
    return;
  }
  if (options_.micro_batch > 0 || !session_ || !options_.split || more == few) return;
  persist([&] { large = static_cast<double>(probe(batch, more, loss, &per_batch)); }, "the second probe", run);
  const double per_row = std::max(0.0, (large - small) / static_cast<double>(more - few));
  const double fixed = large - per_row * static_cast<double>(more);
  const double room = 0.97 * static_cast<double>(options_.memory.count()) - fixed;  // sizes are rounded up to pages
  if (per_row * static_cast<double>(batch.rows) <= room) return;
  const auto fits = std::max<std::int64_t>(1, static_cast<std::int64_t>(std::floor(room / per_row)));
  const std::int64_t parts = (batch.rows + fits - 1) / fits;
  micro_batch_ = (batch.rows + parts - 1) / parts;
  run.progress.say(fmt::format("{} rows at a time: {} a row beside {} would take {} at once", micro_batch_,
                               format_bytes(Bytes(static_cast<std::uint64_t>(per_row))), format_bytes(Bytes(static_cast<std::uint64_t>(std::max(0.0, fixed)))),
                               format_bytes(Bytes(static_cast<std::uint64_t>(std::max(0.0, fixed + per_row * static_cast<double>(batch.rows)))))));
}

MemoryNeeds Trainer::needs(const Batch& batch, const Loss& loss, bool fixed) {
  check(loss);
  if (!counts()) throw UsageError("Trainer: bytes are counted under a limit or with count only.");
  if (batch.rows < 1) throw UsageError("Trainer: a batch without rows takes nothing.");
  optimizer_->make_state();
  MemoryNeeds out;
  out.parameters = bytes_of(model_.parameters);
  out.buffers = bytes_of(model_.buffers);
  for (const NamedTensor& p : model_.parameters) {
    if (p.tensor.requires_grad()) out.gradients += Bytes(p.tensor.nbytes());
  }
  out.optimizer_state = optimizer_->state_bytes();
  out.inputs = bytes_of(batch.inputs) + bytes_of(batch.targets);
  std::function<void()> modes_back;
  if (model_.set_training) modes_back = model_.set_training(true);
  const auto held = static_cast<double>(memory::CpuAllocator::instance().ledger().program);
  const std::int64_t few = std::max<std::int64_t>(2, batch.rows / 16), more = 2 * few;
  std::string per_batch;
  double peak = 0;
  if (fixed || more >= batch.rows) {
    peak = static_cast<double>(probe(batch, batch.rows, loss, &per_batch)) - held;
  } else {
    const auto small = static_cast<double>(probe(batch, few, loss, &per_batch)), large = static_cast<double>(probe(batch, more, loss, &per_batch));
    peak = large - held + std::max(0.0, large - small) / static_cast<double>(more - few) * static_cast<double>(batch.rows - more);
  }
  if (modes_back) modes_back();
  out.activations = Bytes(static_cast<std::uint64_t>(std::max(0.0, peak)));
  const Bytes base = out.parameters + out.buffers + out.optimizer_state + out.inputs;
  out.peak = base + std::max(out.activations, out.gradients);
  return out;
}

}  // namespace memfit::train
