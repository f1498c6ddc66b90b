#include "memfit/engine/recorder.h"

#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <mutex>

#include "memfit/engine/detail/tensors.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"

namespace memfit::engine {

using c10::DispatchKey;
using c10::DispatchKeySet;
using detail::StepLog;
using memory::Block;
using memory::CpuAllocator;
using trace::Replay;

namespace {

// The engine copies arguments that a raw pointer is out to up to this size, so that their readers can be run again.
constexpr std::uint64_t kSnapshotBytes = 4096;
// What no op made is a value from this size on.
constexpr std::uint64_t kMinValueBytes = 128;
constexpr std::uint64_t kSure = 3;  // whole steps
// Below this a short form is not worth its bookkeeping.
constexpr std::uint64_t kLeastPacked = 16 << 10;

thread_local Recorder::Running* mine = nullptr;  // the op that this thread runs

/// Calls `visit` for what a sparse tensor is made of.
template <class Visit>
void for_each_part(const at::Tensor& tensor, Visit visit) {
  if (tensor.is_sparse()) {
    auto* impl = at::sparse::get_sparse_impl(tensor);
    visit(impl->indices());
    visit(impl->values());
  } else if (tensor.layout() != c10::kStrided && tensor.layout() != c10::kJagged && tensor.layout() != c10::kMkldnn) {
    const auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(tensor);
    visit(compressed);
    visit(plain);
    visit(tensor.values());
  }
}

/// Calls `visit(tensor, written, hidden)` for each tensor among the arguments.
template <class Visit>
void for_each_argument(const OpRule& rule, const torch::jit::Stack& stack, Visit visit) {
  const std::size_t first = stack.size() - rule.args;
  const bool moves =
      !rule.hidden_writes.empty() && (rule.training_arg < 0 || stack[first + rule.training_arg].toBool());
  for (std::uint32_t i = 0; i < rule.args; ++i) {
    if (rule.kinds[i] != ArgKind::Tensor && rule.kinds[i] != ArgKind::TensorList) continue;
    const c10::IValue& v = stack[first + i];
    const bool written = rule.writes_arg(i);
    const bool hidden =
        moves && std::find(rule.hidden_writes.begin(), rule.hidden_writes.end(), i) != rule.hidden_writes.end();
    if (v.isTensor()) {
      visit(v.toTensor(), written, hidden);
    } else if (v.isList()) {
      for (const c10::IValue& e : v.toListRef()) {
        if (e.isTensor()) visit(e.toTensor(), written, hidden);
      }
    }
  }
}

Block* block_of(c10::StorageImpl* storage) {
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (data.get_deleter() != &CpuAllocator::delete_block || data.get_context() == nullptr) return nullptr;
  return Block::of(data.get_context());
}

c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

bool covers_storage(const at::Tensor& t, std::uint64_t bytes) {
  return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() && t.nbytes() == bytes;
}

std::uint64_t mixed(std::uint64_t hash, std::uint64_t word) { return (hash ^ word) * 0x100000001b3ull; }

void on_raw_access(c10::StorageImpl* storage) {
  if (detail::thread_state.in_op > 0) return;  // a kernel, about its own arguments
  Engine::instance().raw_access(storage);
}

Replay reason_of(const OpRule& rule) {
  switch (rule.reason) {
    case KeepReason::Nondeterministic:
      return Replay::Nondeterministic;
    case KeepReason::CustomOp:
    case KeepReason::Opaque:
      return Replay::CustomOp;
    case KeepReason::ReadsOutside:
      return Replay::ReadsForeignMemory;
    case KeepReason::Communication:
      return Replay::Communication;
    case KeepReason::SideEffect:
    case KeepReason::None:
      break;
  }
  return Replay::SideEffect;
}

trace::SequenceDetector::Options detector_options() {
  trace::SequenceDetector::Options options;
  options.longest_period = Recorder::kMostOps / 2;
  return options;
}

}  // namespace

Recorder::Recorder(memory::CpuAllocator& allocator)
    : allocator_(allocator), lock_(allocator.lock()), detector_(detector_options()) {
  std::lock_guard lock(lock_);
  detail::ticks_to_ns(1);  // measures the clock, which takes milliseconds
  allocator_.set_observer(this);
}

Recorder::~Recorder() { stop(); }

void Recorder::stop() noexcept {
  std::lock_guard lock(lock_);
  if (!on_) return;
  on_ = false;
  allocator_.set_observer(nullptr);
}

std::uint64_t Recorder::spent_ns() const {
  std::lock_guard lock(lock_);
  return detail::ticks_to_ns(spent_);
}

std::optional<Recorder::Recording> Recorder::recording() const {
  std::lock_guard lock(lock_);
  Recording out;
  out.steps = steps_;
  if (whole_.end != 0) {
    out.step = cut_whole();
    out.other = other_;
    return out;
  }
  const std::vector<std::uint32_t> ends = log_.update_ends();
  if (ends.size() >= 2) {
    out.kind = Recording::Kind::Updates;
    out.steps = ends.size() - 1;
    std::size_t highest = 1;
    for (std::size_t k = 2; k < ends.size(); ++k) {
      if (log_.peak(ends[k - 1], ends[k]) >= log_.peak(ends[highest - 1], ends[highest])) highest = k;
    }
    const std::uint32_t end = ends[highest];
    const bool last = end == log_.size();
    out.step = log_.cut(ends[highest - 1], end, last ? detail::ticks() : log_.ops[end].began,
                        last ? spent_ : log_.ops[end].recorder);
    return out;
  }
  if (!from_start_ || log_.size() == 0) return std::nullopt;
  out.kind = Recording::Kind::WholeRun;
  out.steps = 1;
  out.step = log_.cut(0, log_.size(), detail::ticks(), spent_);
  return out;
}

// ---- what blocks hold

Recorder::Entry& Recorder::entry_of(Block* block) {
  auto [at, fresh] = entries_.emplace(block, Entry());
  if (fresh) at->second.birth = block->birth;
  return at->second;
}

Recorder::Entry* Recorder::find(Block* block, std::uint64_t birth) {
  const auto at = entries_.find(block);
  return at == entries_.end() || at->second.birth != birth ? nullptr : &at->second;
}

/// The value in `block` as the log knows it; a source when it was there before the log began.
std::uint32_t Recorder::value_of(std::uint64_t bytes, Entry& entry) {
  if (entry.epoch == epoch_) return entry.value;
  entry.epoch = epoch_;
  entry.storage = next_storage_++;
  entry.value = static_cast<std::uint32_t>(log_.values.size());
  StepLog::Value value;
  value.bytes = bytes;
  value.storage = entry.storage;
  value.flags = entry.flags | StepLog::kKept;
  log_.values.push_back(value);
  return entry.value;
}

std::uint32_t Recorder::new_output(Block* block, std::uint32_t op, std::uint8_t flags) {
  Entry& entry = entry_of(block);
  entry.epoch = epoch_;
  entry.storage = next_storage_++;
  entry.value = static_cast<std::uint32_t>(log_.values.size());
  entry.flags = flags & StepLog::kPinned;
  StepLog::Value value;
  value.bytes = block->requested;
  value.producer = op;
  value.storage = entry.storage;
  value.flags = flags;
  log_.values.push_back(value);
  log_.operands.push_back(entry.value);
  ++log_.ops[op].output_count;
  return entry.value;
}

void Recorder::mark(Entry& entry, std::uint8_t flags) {
  entry.flags |= flags;
  if (entry.epoch == epoch_) log_.values[entry.value].flags |= flags;
}

void Recorder::shape_value(std::uint32_t value, const at::Tensor& tensor) {
  StepLog::Value& v = log_.values[value];
  if (v.shape != StepLog::kNone) return;
  v.shape = static_cast<std::uint32_t>(log_.shapes.size());
  log_.shapes.push_back(tensor.dim());
  for (const std::int64_t size : tensor.sizes()) log_.shapes.push_back(size);
}

void Recorder::taken(Block* block) noexcept {
  Running* run = mine;
  if (run == nullptr && replaying_) return;
  // A kernel's own workers take memory too.
  if (run == nullptr && running_ != nullptr && running_->next_ == nullptr) run = running_;
  if (run == nullptr) return unseen_block(block);
  run->taken_.push_back(block);
  run->own_ += block->requested;
  run->own_peak_ = std::max(run->own_peak_, run->own_);
}

void Recorder::given(Block* block) noexcept {
  // Another thread may have used meanwhile what it took during an op of this one, so both are looked at.
  for (Running* run = running_; run != nullptr; run = run->next_) {
    for (std::size_t i = run->taken_.size(); i-- > 0;) {
      if (run->taken_[i] != block) continue;
      run->taken_[i] = run->taken_.back();
      run->taken_.pop_back();
      run->own_ -= block->requested;
      break;
    }
  }
  const auto at = entries_.find(block);
  if (at == entries_.end()) return;
  note_death(at->second, block->requested);
  entries_.erase(at);
}

void Recorder::note_death(Entry& entry, std::uint64_t bytes) {
  if (entry.flags & StepLog::kConstant) return;
  if (entry.epoch != epoch_ && whole_.epoch != 0 && entry.epoch == whole_.epoch)
    whole_.log.values[entry.value].flags |= StepLog::kUnread;
  if (log_.size() == 0) return;
  StepLog::Value& value = log_.values[value_of(bytes, entry)];
  if (value.death == StepLog::kNone) value.death = log_.size() - 1;
}

// ---- under a limit

void Recorder::evicted(Block* block, const void* value) noexcept {
  const auto at = entries_.find(block);
  if (at == entries_.end()) return;
  const Entry entry = at->second;
  entries_.erase(at);
  entries_.emplace(value, entry);
}

void Recorder::restored(const void* value, Block* block) noexcept {
  const auto at = entries_.find(value);
  if (at == entries_.end()) return;
  Entry entry = at->second;
  entry.birth = block->birth;
  entries_.erase(at);
  entries_.emplace(block, entry);
}

void Recorder::dropped_while_evicted(const void* value, std::uint64_t bytes) noexcept {
  const auto at = entries_.find(value);
  if (at == entries_.end()) return;
  note_death(at->second, bytes);
  entries_.erase(at);
}

void Recorder::lost(Block* block) noexcept {
  const Entry* entry = find(block, block->birth);
  if (entry == nullptr || entry->epoch != epoch_) return;
  const std::uint32_t producer = log_.values[entry->value].producer;
  if (producer != StepLog::kNone && log_.ops[producer].replay == Replay::Yes)
    log_.ops[producer].replay = Replay::WritesSource;
}

std::uint64_t Recorder::overhead() const { return spent_ + detail::thread_engine_ticks(); }

void Recorder::add_op_ticks(std::vector<std::uint64_t>& ticks) const {
  if (whole_.end - whole_.begin != ticks.size()) return;
  for (std::uint32_t i = whole_.begin; i < whole_.end; ++i) ticks[i - whole_.begin] += whole_.log.ops[i].ticks;
}

std::uint32_t Recorder::next_position() const {
  if (at_boundary_) return 0;
  return step_begin_ == StepLog::kNone ? StepLog::kNone : log_.size() - step_begin_;
}

// Memory that came without an op: in the step it needs one.
void Recorder::unseen_block(Block* block) {
  if (block->requested < kMinValueBytes) {
    entry_of(block).flags = StepLog::kConstant;
    return;
  }
  StepLog::Op op;
  op.name = "memfit::allocation";
  op.began = detail::ticks();
  op.recorder = overhead();
  op.live = allocator_.ledger().program - block->requested;
  op.inputs = op.outputs = static_cast<std::uint32_t>(log_.operands.size());
  op.replay = Replay::ReadsForeignMemory;
  op.flags = StepLog::kUnseen;
  log_.ops.push_back(op);
  new_output(block, log_.size() - 1, StepLog::kKept);
}

void Recorder::raw_access(c10::StorageImpl* storage) {
  std::lock_guard lock(lock_);
  Block* block = on_ ? block_of(storage) : nullptr;
  if (block == nullptr) return;
  Entry& entry = entry_of(block);
  if (entry.flags & (StepLog::kPinned | StepLog::kConstant)) return;
  StepLog::Op op;
  op.name = "memfit::raw_pointer";
  op.began = detail::ticks();
  op.recorder = overhead();
  op.live = allocator_.ledger().program;
  op.inputs = static_cast<std::uint32_t>(log_.operands.size());
  op.replay = Replay::ReadsForeignMemory;
  op.flags = StepLog::kUnseen;
  const std::uint32_t number = log_.size();
  log_.ops.push_back(op);
  const std::uint32_t old = value_of(block->requested, entry);
  log_.operands.push_back(old);
  log_.ops[number].input_count = 1;
  log_.ops[number].outputs = static_cast<std::uint32_t>(log_.operands.size());
  entry.flags |= StepLog::kPinned;
  StepLog::Value value = log_.values[old];
  log_.values[old].death = number;
  value.producer = number;
  value.overwrites = old;
  value.flags = entry.flags | StepLog::kKept;
  entry.value = static_cast<std::uint32_t>(log_.values.size());
  log_.values.push_back(value);
  log_.operands.push_back(entry.value);
  log_.ops[number].output_count = 1;
}

// Raw pointers taken outside ops are noticed while the hook is on; a kernel's own are not ours to notice.
void Recorder::arm(c10::StorageImpl* storage) {
  if (!storage->has_materializer()) storage->set_materializer(&on_raw_access);
}

// ---- ops

Recorder::Running::Running(Recorder& recorder, const OpRule& rule, DispatchKeySet keys, const torch::jit::Stack& stack,
                           bool watched)
    : recorder_(recorder), rule_(rule), watched_(watched) {
  const std::uint64_t start = detail::ticks();
  std::lock_guard lock(recorder.lock_);
  if (!recorder.on_) return;
  StepLog::Op op;
  op.name = rule.name.c_str();
  op.began = start;
  op.recorder = recorder.overhead();
  recorder.log_.ops.push_back(op);
  recorder.begin(*this, keys, stack);
  kernel_ = detail::ticks();
  recorder.spent_ += kernel_ - start;
}

Recorder::Running::~Running() {
  if (!linked_) return;
  std::lock_guard lock(recorder_.lock_);
  recorder_.end(*this, nullptr, detail::ticks() - kernel_);
}

void Recorder::Running::finish(const torch::jit::Stack& stack) {
  const std::uint64_t stopped = detail::ticks();
  if (!linked_) return;
  bool tell = false;
  {
    std::lock_guard lock(recorder_.lock_);
    recorder_.end(*this, &stack, stopped - kernel_);
    recorder_.spent_ += detail::ticks() - stopped;
    tell = recorder_.sure_ && !recorder_.told_;
    recorder_.told_ = recorder_.told_ || tell;
  }
  if (tell && recorder_.when_sure_) recorder_.when_sure_();
}

void Recorder::Running::finish(const torch::jit::Stack& stack, std::uint64_t kernel_ticks, bool replayable) {
  const std::uint64_t start = detail::ticks();
  if (!linked_) return;
  std::lock_guard lock(recorder_.lock_);
  if (epoch_ == recorder_.epoch_) {
    Replay& replay = recorder_.log_.ops[op_].replay;
    if (replayable) replay = Replay::Yes;
    else if (replay == Replay::Yes) replay = Replay::SideEffect;
  }
  recorder_.end(*this, &stack, kernel_ticks);
  recorder_.spent_ += detail::ticks() - start;
}

void Recorder::begin(Running& run, DispatchKeySet keys, const torch::jit::Stack& stack) {
  const std::uint32_t number = log_.size() - 1;
  if (std::exchange(at_boundary_, false)) step_begin_ = number;
  run.position_ = step_begin_ == StepLog::kNone ? StepLog::kNone : number - step_begin_;
  if (whole_.end != 0 && whole_.end_ticks == 0) {
    whole_.end_ticks = log_.ops[number].began;
    whole_.end_recorder = overhead();
  }
  const std::uint64_t me = detail::thread_number();
  if (op_thread_ == 0) op_thread_ = me;
  several_op_threads_ = several_op_threads_ || op_thread_ != me;
  if (run.rule_.random && run.rule_.generator_arg < 0) {
    if (random_thread_ == 0) random_thread_ = me;
    several_random_threads_ = several_random_threads_ || random_thread_ != me;
  }
  run.op_ = number;
  run.epoch_ = epoch_;
  run.serial_ = ++serial_;
  run.opaque_ = keys.has_any(detail::kOpaqueKeys);
  run.hash_ = hash_of(run.rule_, stack);
  log_.ops[number].live = allocator_.ledger().program;
  log_.ops[number].inputs = static_cast<std::uint32_t>(log_.operands.size());
  for_each_argument(run.rule_, stack,
                    [&](const at::Tensor& t, bool written, bool hidden) { use(run, t, written, hidden); });
  StepLog::Op& op = log_.ops[number];
  op.input_count = static_cast<std::uint32_t>(log_.operands.size()) - op.inputs;
  op.kind = run.rule_.name_hash;
  op.hash = run.hash_;
  if (torch::autograd::get_current_graph_task_id() != -1) op.flags |= StepLog::kBackward;
  if (run.writes_parameter_) op.flags |= StepLog::kWritesParameter;
  op.replay = replay_of(run);
  if (!run.written_.empty() && !c10::GradMode::is_enabled() && !(op.flags & StepLog::kBackward)) {
    for (const auto& w : run.written_) {
      if (Entry* entry = find(w.block, w.birth)) mark(*entry, StepLog::kUpdated);
    }
  }
  run.outer_ = mine;
  mine = &run;
  run.next_ = running_;
  running_ = &run;
  run.linked_ = true;
}

Replay Recorder::replay_of(const Running& run) {
  if (run.rule_.op_class != OpClass::Record) return reason_of(run.rule_);
  if (run.opaque_) return Replay::CustomOp;
  if (run.foreign_ || run.pinned_input_) return Replay::ReadsForeignMemory;
  if (run.rule_.random && run.rule_.generator_arg < 0 && several_random_threads_) return Replay::RandomWithoutGenerator;
  return run.writes_kept_ ? Replay::WritesSource : Replay::Yes;
}

std::uint64_t Recorder::hash_tensor(std::uint64_t hash, const at::Tensor& tensor) {
  if (!tensor.defined()) return hash;
  if (detail::is_opaque(tensor)) {
    for_each_part(tensor, [&](const at::Tensor& part) { hash = hash_tensor(hash, part); });
    return hash;
  }
  hash = mixed(hash, static_cast<std::uint64_t>(tensor.scalar_type()) + 1);
  for (const std::int64_t size : tensor.sizes()) hash = mixed(hash, static_cast<std::uint64_t>(size));
  return hash;
}

std::uint64_t Recorder::hash_of(const OpRule& rule, const torch::jit::Stack& stack) {
  std::uint64_t hash = rule.name_hash;
  for_each_argument(rule, stack, [&](const at::Tensor& t, bool, bool) { hash = hash_tensor(hash, t); });
  return hash;
}

void Recorder::use(Running& run, const at::Tensor& tensor, bool written, bool hidden, bool opaque) {
  if (!tensor.defined()) return;
  if (detail::is_opaque(tensor)) {
    run.opaque_ = opaque = true;
    for_each_part(tensor, [&](const at::Tensor& part) { use(run, part, false, false, true); });
    if (!tensor.unsafeGetTensorImpl()->has_storage()) return;
  }
  c10::StorageImpl* storage = storage_of(tensor);
  Block* block = detail::is_ours(tensor) ? block_of(storage) : nullptr;
  if (block == nullptr) {
    run.foreign_ = true;
    return;
  }
  Entry& entry = entry_of(block);
  ++entry.locks;
  if (!run.watched_ && storage->has_materializer()) storage->clear_materializer();
  run.used_.push_back(
      {block, entry.birth,
       c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage))});
  if (opaque) mark(entry, StepLog::kPinned);
  if (!hidden) use_storage(run, tensor, block, written, opaque);
}

void Recorder::use_storage(Running& run, const at::Tensor& tensor, Block* block, bool written, bool opaque) {
  Entry& entry = *find(block, block->birth);
  if (entry.flags & StepLog::kConstant) {
    run.writes_kept_ = run.writes_kept_ || written;
    return;
  }
  note_leaf(tensor, entry, written);
  const bool again = entry.seen_by == run.serial_;
  auto listed = std::find_if(run.written_.begin(), again ? run.written_.end() : run.written_.begin(),
                             [&](const Running::Written& w) { return w.block == block; });
  const bool is_listed = again && listed != run.written_.end();
  const bool blank = written && !again && !opaque && run.rule_.overwrites && covers_storage(tensor, block->requested);
  // An argument that is filled and also read is read.
  const bool was_blank = is_listed && listed->blank;
  if (was_blank) listed->blank = false;
  if ((entry.flags & StepLog::kPinned) && !written && !again && block->requested <= kSnapshotBytes) return;
  entry.seen_by = run.serial_;
  if ((!again && !blank) || was_blank) {
    const std::uint32_t value = value_of(block->requested, entry);
    log_.operands.push_back(value);
    run.inputs_.push_back({value, block, {}});
    if (!opaque && log_.values[value].shape == StepLog::kNone && tensor.nbytes() == block->requested)
      shape_value(value, tensor);
  }
  if (written && !is_listed) run.written_.push_back({block, block->birth, blank, tensor.dtype()});
  if (written && !blank && entry.epoch == epoch_ &&
      (log_.values[entry.value].flags & (StepLog::kKept | StepLog::kParameter))) {
    run.writes_kept_ = true;
  }
  // Initialising a parameter is no update: those have gradients.
  if (written && (entry.flags & StepLog::kParameter) &&
      (several_op_threads_ || !tensor.is_leaf() || tensor.grad().defined())) {
    run.writes_parameter_ = true;
  }
  if ((entry.flags & StepLog::kPinned) && !blank && (written || block->requested > kSnapshotBytes))
    run.pinned_input_ = true;
}

/// A leaf that requires grad is a parameter, unless it shares its storage (then a checkpoint may have detached it).
void Recorder::note_leaf(const at::Tensor& tensor, Entry& entry, bool written) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  if (!(entry.flags & StepLog::kParameter) && (written || tensor.storage().use_count() == 1))
    mark(entry, StepLog::kParameter);
  if (several_op_threads_) return;  // another one may be setting the gradient
  const at::Tensor& gradient = tensor.grad();
  if (!gradient.defined() || detail::is_opaque(gradient) || !detail::is_ours(gradient)) return;
  Block* block = block_of(storage_of(gradient));
  if (block == nullptr) return;
  Entry* of_gradient = find(block, block->birth);
  if (of_gradient != nullptr && !(of_gradient->flags & StepLog::kGradient)) mark(*of_gradient, StepLog::kGradient);
}

void Recorder::unlink(Running& run) {
  Running** at = &running_;
  while (*at != &run) at = &(*at)->next_;
  *at = run.next_;
  mine = run.outer_;
  run.linked_ = false;
}

void Recorder::end(Running& run, const torch::jit::Stack* stack, std::uint64_t ticks) {
  unlink(run);
  if (!on_) return;
  if (run.epoch_ != epoch_) {  // its stretch has been closed by another thread
    for (Block* block : run.taken_) unseen_block(block);
    release(run);
    return;
  }
  StepLog::Op& op = log_.ops[run.op_];
  op.ticks = ticks;
  op.outputs = static_cast<std::uint32_t>(log_.operands.size());
  const auto first_output = static_cast<std::uint32_t>(log_.values.size());
  // Whatever no result leads to is out of sight, so it is pinned until one does.
  for (Block* block : run.taken_) run.outputs_.push_back({new_output(block, run.op_, StepLog::kPinned), block, {}});
  op.workspace = run.own_peak_ - std::min(run.own_peak_, run.own_);
  if (stack != nullptr) end_results(run, *stack, first_output);
  if (!run.rule_.resizes) end_writes(run);
  if (stack != nullptr) sample(run);
  release(run);
  feed(run.op_);
}

void Recorder::end_results(Running& run, const torch::jit::Stack& stack, std::uint32_t first_output) {
  auto take = [&](const at::Tensor& tensor) {
    if (!tensor.defined() || detail::is_opaque(tensor) || !detail::is_ours(tensor)) return;
    c10::StorageImpl* storage = storage_of(tensor);
    Block* block = block_of(storage);
    if (block == nullptr) return;
    Entry& entry = entry_of(block);
    if (entry.epoch == epoch_ && entry.value >= first_output) {
      entry.flags &= static_cast<std::uint8_t>(~StepLog::kPinned);
      log_.values[entry.value].flags &= static_cast<std::uint8_t>(~StepLog::kPinned);
      shape_value(entry.value, tensor);
      for (Running::Operand& output : run.outputs_) {
        if (output.block == block) output.dtype = tensor.dtype();
      }
    }
    if (!run.watched_ && entry.locks == 0 && !(entry.flags & StepLog::kPinned)) arm(storage);
  };
  const std::size_t returns = run.rule_.op.schema().returns().size();
  for (std::size_t i = stack.size() - returns; i < stack.size(); ++i) {
    const c10::IValue& v = stack[i];
    if (v.isTensor()) {
      take(v.toTensor());
    } else if (v.isTensorList()) {
      for (const c10::IValue& e : v.toListRef()) take(e.toTensor());
    }
  }
}

/// Which outputs are of little information, and could be kept in a short form.
void Recorder::sample(const Running& run) {
  for (const Running::Operand& output : run.outputs_) {
    const std::uint64_t bytes = output.block->requested;
    if (bytes < kLeastPacked || output.dtype == caffe2::TypeMeta()) continue;
    const c10::ScalarType type = c10::typeMetaToScalarType(output.dtype);
    const std::size_t width = output.dtype.itemsize();
    if (width > 8 || (width & (width - 1)) != 0) continue;
    StepLog::Value& value = log_.values[output.logged];
    value.pack = memory::guess_form(output.block->data(), bytes, static_cast<std::uint8_t>(width),
                                    c10::isIntegralType(type, false), &value.packed)
                     .kind;
  }
}

/// The written storages go on with new values, unless they have a new block.
void Recorder::end_writes(Running& run) {
  for (const Running::Written& w : run.written_) {
    Entry* entry = find(w.block, w.birth);
    if (entry == nullptr) continue;
    StepLog::Value value;
    if (!w.blank) {
      const std::uint32_t old = value_of(w.block->requested, *entry);
      value = log_.values[old];
      log_.values[old].death = run.op_;
      value.overwrites = old;
      const bool kept = (value.flags & (StepLog::kKept | StepLog::kParameter)) != 0;
      value.flags = entry->flags | (kept ? StepLog::kKept : 0);
    } else {
      if (entry->epoch != epoch_ && whole_.epoch != 0 && entry->epoch == whole_.epoch)
        whole_.log.values[entry->value].flags |= StepLog::kUnread;
      if (run.op_ != 0) log_.values[value_of(w.block->requested, *entry)].death = run.op_ - 1;
      if (entry->epoch != epoch_) {
        entry->epoch = epoch_;
        entry->storage = next_storage_++;
      }
      value.bytes = w.block->requested;
      value.storage = entry->storage;
      value.flags = entry->flags | StepLog::kFilled;
    }
    value.producer = run.op_;
    value.death = StepLog::kNone;
    entry->value = static_cast<std::uint32_t>(log_.values.size());
    log_.values.push_back(value);
    log_.operands.push_back(entry->value);
    run.outputs_.push_back({entry->value, w.block, w.dtype});
    ++log_.ops[run.op_].output_count;
  }
}

void Recorder::release(Running& run) {
  for (Running::Used& used : run.used_) {
    Entry* entry = find(used.block, used.birth);
    if (entry == nullptr || --entry->locks != 0 || (entry->flags & StepLog::kPinned)) continue;
    if (run.watched_) continue;
    if (auto storage = used.storage.lock()) arm(storage.get());
  }
}

void Recorder::custom_op(const OpRule& rule, const torch::jit::Stack& stack) {
  if (std::find(rule.kinds.begin(), rule.kinds.end(), ArgKind::Tensor) == rule.kinds.end() &&
      std::find(rule.kinds.begin(), rule.kinds.end(), ArgKind::TensorList) == rule.kinds.end()) {
    return;  // marks for profilers and the like
  }
  std::lock_guard lock(lock_);
  if (!on_) return;
  StepLog::Op op;
  op.name = rule.name.c_str();
  op.began = detail::ticks();
  op.recorder = overhead();
  op.live = allocator_.ledger().program;
  op.inputs = static_cast<std::uint32_t>(log_.operands.size());
  op.replay = reason_of(rule);
  op.flags = StepLog::kUnseen;
  const std::uint32_t number = log_.size();
  log_.ops.push_back(op);
  ++serial_;
  for_each_argument(rule, stack, [&](const at::Tensor& tensor, bool, bool) {
    if (!tensor.defined() || detail::is_opaque(tensor) || !detail::is_ours(tensor)) return;
    Block* block = block_of(storage_of(tensor));
    if (block == nullptr) return;
    Entry& entry = entry_of(block);
    if (entry.seen_by == serial_ || (entry.flags & StepLog::kConstant)) return;
    entry.seen_by = serial_;
    log_.operands.push_back(value_of(block->requested, entry));
  });
  log_.ops[number].input_count = static_cast<std::uint32_t>(log_.operands.size()) - op.inputs;
  log_.ops[number].outputs = static_cast<std::uint32_t>(log_.operands.size());
}

// ---- steps

trace::SequenceDetector::Observation Recorder::observation(const StepLog::Op& op) const {
  return {op.hash, op.kind, Bytes(op.live), (op.flags & StepLog::kWritesParameter) != 0};
}

// A training step runs backward, and updates parameters if the program ever does. What repeats without (the layers that
// are being made, the batches that are summed up before an update) is no step.
void Recorder::feed(std::uint32_t op) {
  ++fed_;
  const std::uint8_t flags = log_.ops[op].flags;
  began_backward_ = began_backward_ || (flags & StepLog::kBackward);
  if ((flags & StepLog::kWritesParameter) && !updates_) {
    updates_ = true;
    if (detector_.learned()) forget();
  }
  if (began_backward_) {
    const bool learned = detector_.learned();
    const auto verdict = detector_.feed(observation(log_.ops[op]));
    if (!learned && detector_.learned()) {
      look_back();
    } else if (verdict.step_ended) {
      end_step(verdict);
    }
  }
  if (log_.size() >= kMostOps) start_log();
}

/// What was taken for a step is none; it stays until there is a better one.
void Recorder::forget() {
  detector_.forget_everything();
  whole_.seen = 0;
  steps_ = 0;
}

bool Recorder::trains(std::uint32_t begin, std::uint32_t end) const {
  std::uint8_t flags = 0;
  for (std::uint32_t i = begin; i < end; ++i) flags |= log_.ops[i].flags;
  return (flags & StepLog::kBackward) && (!updates_ || (flags & StepLog::kWritesParameter));
}

// The detector has just learned where steps end, after two of them and more: the log still has them.
void Recorder::look_back() {
  trace::SequenceDetector again = detector_;
  again.leave_step();   // the log may begin in mid-step
  std::uint32_t begin = StepLog::kNone, end = 0, seen = 0;
  std::optional<std::uint32_t> sequence;
  std::uint64_t steps = 0;
  bool last_trains = true;
  for (std::uint32_t i = 0; i < log_.size(); ++i) {
    if (log_.ops[i].flags & StepLog::kUnseen) continue;
    const auto verdict = again.feed(observation(log_.ops[i]));
    if (!verdict.step_ended) continue;
    const std::uint32_t first = begin_of_last(verdict.length, i + 1);
    if (first == StepLog::kNone) continue;
    last_trains = trains(first, i + 1);
    if (!last_trains) continue;
    begin = first;
    end = i + 1;
    seen = verdict.seen;
    sequence = verdict.ended;
    ++steps;
  }
  if (!last_trains) return forget();
  detector_ = std::move(again);
  if (begin == StepLog::kNone) return;
  steps_ += steps;
  whole_.log = log_;
  whole_.epoch = 0;
  whole_.begin = begin;
  whole_.end = end;
  whole_.seen = seen;
  const bool ended = end < log_.size();
  whole_.end_ticks = ended ? log_.ops[end].began : 0;
  whole_.end_recorder = ended ? log_.ops[end].recorder : 0;
  if (ended || !sequence) return;
  step_end_ = StepEnd{*sequence, seen, true};
  whole_.epoch = epoch_;
  start_log();
  at_boundary_ = true;
}

/// Where the latest `fed` ops before op `end` begin; kNone when the log is shorter.
std::uint32_t Recorder::begin_of_last(std::uint32_t fed, std::uint32_t end) const {
  for (std::uint32_t i = end; i-- > 0;) {
    if ((log_.ops[i].flags & StepLog::kUnseen) == 0 && --fed == 0) return i;
  }
  return StepLog::kNone;
}

void Recorder::end_step(const trace::SequenceDetector::Verdict& verdict) {
  const std::uint32_t begin = begin_of_last(verdict.length, log_.size());
  if (verdict.ended) step_end_ = StepEnd{*verdict.ended, verdict.seen, false};
  if (begin != StepLog::kNone && !trains(begin, log_.size())) {
    if (whole_.seen < 2) forget();
  } else if (begin != StepLog::kNone) {
    ++steps_;
    const bool other = keep_other_ && other_batch(begin);
    // A step of a kind that comes again rather than one with an evaluation or a last, smaller batch in it.
    if (whole_.end == 0 || verdict.seen >= 2 || whole_.seen < 2) {
      if (other) other_ = cut_whole();
      std::swap(whole_.log, log_);
      whole_.epoch = epoch_;
      whole_.begin = begin;
      whole_.end = whole_.log.size();
      whole_.end_ticks = 0;
      whole_.seen = verdict.seen;
      if (step_end_) step_end_->whole = true;
    } else if (other) {
      const StepLog::Op& last = log_.ops[log_.size() - 1];
      other_ = log_.cut(begin, log_.size(), last.began + last.ticks, last.recorder);
    }
    sure_ = steps_ >= kSure;
  }
  start_log();
  at_boundary_ = detector_.learned();
}

trace::Step Recorder::cut_whole() const {
  const bool ended = whole_.end_ticks != 0;   // otherwise nothing came after it: it ends with its last op
  const StepLog::Op& last = whole_.log.ops[whole_.end - 1];
  return whole_.log.cut(whole_.begin, whole_.end, ended ? whole_.end_ticks : last.began + last.ticks, ended ? whole_.end_recorder : last.recorder);
}

/// Whether the ops from `begin` on are those of the latest whole step, on tensors of other sizes.
bool Recorder::other_batch(std::uint32_t begin) const {
  if (whole_.end == 0 || log_.size() - begin != whole_.end - whole_.begin) return false;
  bool same = true;
  for (std::uint32_t i = begin; i < log_.size(); ++i) {
    const StepLog::Op &now = log_.ops[i], &then = whole_.log.ops[whole_.begin + i - begin];
    if (now.kind != then.kind) return false;
    same = same && now.hash == then.hash;
  }
  return !same;
}

void Recorder::start_log() {
  log_.clear();
  ++epoch_;
  next_storage_ = 0;
  from_start_ = false;
  step_begin_ = StepLog::kNone;
  at_boundary_ = false;
}

}  // namespace memfit::engine
