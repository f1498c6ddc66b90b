#include "memfit/engine/engine.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/util/SmallVector.h>
#include <immintrin.h>
#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <optional>

#include "memfit/device/address_space.h"
#include "memfit/device/process_memory.h"
#include "memfit/engine/detail/tensors.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/out_of_budget.h"

namespace memfit::engine {

using c10::DispatchKey;
using c10::DispatchKeySet;
using memory::Block;
using memory::CpuAllocator;

namespace {

// Longest chain of recipes: beyond it a value is kept. Bounds bookkeeping and recursion in loops that never end.
constexpr std::uint32_t kMaxDepth = 2048;
constexpr std::size_t kMaxRecipes = 4'000'000;
// Resident bytes kept free under a memory limit for what grows unannounced: small heap blocks, stacks, page tables.
constexpr std::uint64_t kMemoryMargin = std::uint64_t{12} << 20;
// Arguments that may change unseen (a raw pointer to them is out) are copied for a recipe up to this size.
constexpr std::uint64_t kSnapshotBytes = 4096;
constexpr int kPart = -2;  // instead of an index in a list argument: tensor inside a sparse one
// Results below this are cheaper kept than recorded.
constexpr std::uint64_t kMinRecordedBytes = 128;

void hook(const c10::OperatorHandle& op, DispatchKeySet keys, DispatchKeySet rest, torch::jit::Stack* stack) {
  Engine::instance().run_op(op, keys, rest, stack);
}

class OpName {
 public:
  explicit OpName(const OpRule& rule) : old_(memory::set_current_op(rule.name.c_str())) {}
  ~OpName() { memory::set_current_op(old_); }

 private:
  const char* old_;
};

bool covers_storage(const at::Tensor& t, std::uint64_t storage_bytes) {
  return t.storage_offset() == 0 && t.is_non_overlapping_and_dense() && t.nbytes() == storage_bytes;
}

}  // namespace

struct Engine::Call {
  struct Arg {
    Value* value;              // null: not ours to move (foreign memory, other device, no bytes)
    const at::Tensor* tensor;  // valid until the op runs; null: a part of a sparse argument
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // of written arguments
    std::int16_t arg;
    std::int16_t element;
    bool written;
    bool hidden;
    bool blank;
  };
  const OpRule* rule;
  c10::SmallVector<Arg, 10> args;
  Recipe* recipe = nullptr;
  std::uint64_t first_birth = 0;
  std::uint64_t input_bytes = 0;
  std::uint64_t begin_ticks = 0;  // spent in begin
  std::uint64_t end = 0;          // when the op ended
  bool opaque = false;
  bool foreign = false;  // reads memory that may change without us
  bool opaque_result = false;
};

Engine& Engine::instance() {
  static Engine* const one = new Engine();  // never destroyed: deleters of tensors come until the end
  return *one;
}

Engine::Engine() : allocator_(CpuAllocator::instance()), lock_(allocator_.lock()) {}

void Engine::start(const std::string& door, bool verify, trace::RunStatus* status) {
  std::lock_guard lock(lock_);
  if (started_) return;
  door_ = open_door(door, &hook);
  verify_ = verify;
  status_ = status;
  allocator_.set_pressure(this);
  allocator_.install();
  // Taken before the allocator's lock (the last registered is the first to prepare): see Note [Two locks].
  const int registered = pthread_atfork([] { instance().before_fork(); }, [] { instance().turn_.unlock(); },
                                        [] { instance().after_fork_in_child(); });
  TORCH_CHECK(registered == 0, "memfit: pthread_atfork failed");
  device::install_fault_handler([](void* address) { return Engine::instance().raw_fault(address); });
  started_ = true;
  // MKL's vector math sets itself up at its first call; made by two threads at once, one of them may compute in low
  // accuracy, and then the original differs from its replay. One small call first settles it.
  at::sin(at::zeros({8}));
}

std::uint64_t Engine::set_limit(std::uint64_t bytes) {
  std::lock_guard lock(lock_);
  const std::uint64_t old = tensor_limit_;
  tensor_limit_ = bytes;
  apply_limits();
  return old;
}

void Engine::set_memory_limit(std::uint64_t bytes) {
  std::lock_guard lock(lock_);
  memory_limit_ = bytes;
  other_memory_ = 0;
  apply_limits();
}

// Resident bytes that are not tensors. Tensors that were never touched make it look smaller than it is, so the highest
// reading counts.
std::uint64_t Engine::measure_other() noexcept {
  const std::uint64_t resident = device::resident_memory().count();
  const memory::Ledger& ledger = allocator_.ledger();
  const std::uint64_t tensors = ledger.live + ledger.cached;
  other_memory_ = std::max(other_memory_, resident > tensors ? resident - tensors : 0);
  return resident;
}

void Engine::apply_limits() noexcept {
  std::uint64_t limit = tensor_limit_;
  if (memory_limit_ != 0) {
    measure_other();
    const std::uint64_t taken = other_memory_ + kMemoryMargin;
    // One byte is no limit that anything fits in: the next request is refused, with the numbers.
    const std::uint64_t rest = memory_limit_ > taken ? memory_limit_ - taken : 1;
    limit = limit == 0 ? rest : std::min(limit, rest);
    if (status_ != nullptr) status_->fixed_cost_bytes = other_memory_;
  }
  if (limited_ != (limit != 0)) limit_changes(limit != 0);
  allocator_.set_limit(limit);
  const memory::Ledger& ledger = allocator_.ledger();
  if (limit != 0 && ledger.live + ledger.cached > limit) allocator_.trim(limit > ledger.live ? limit - ledger.live : 0);
}

void Engine::limit_changes(bool on) {
  limited_ = on;
  if (planning_) stop_planning();
  // A recording for a file is of what the program does without a limit.
  if (on && recorder_ != nullptr) recorder_->stop();
  planning_ = on && planning_wanted_;
}

void Engine::before_other_memory(std::uint64_t bytes) noexcept {
  std::lock_guard lock(lock_);
  // The engine's own bookkeeping: it is in the middle of something.
  if (lock_.depth() > 1) return;
  if (memory_limit_ == 0 || forked_) return;
  const std::uint64_t resident = measure_other();
  if (resident + bytes + kMemoryMargin <= memory_limit_) return;
  std::uint64_t missing = resident + bytes + kMemoryMargin - memory_limit_;
  missing -= std::min(missing,
                      allocator_.trim(allocator_.ledger().cached > missing ? allocator_.ledger().cached - missing : 0));
  if (missing == 0) return;
  try {
    make_room(missing);
  } catch (...) {
    // What could not be evicted stays; the request itself is not ours to refuse.
  }
  allocator_.trim(0);
}

void Engine::run_op(const c10::OperatorHandle& op, DispatchKeySet keys, DispatchKeySet rest, torch::jit::Stack* stack) {
  const OpRule& rule = rule_of(op);
  const bool careful =
      limited_.load(std::memory_order_relaxed) || evicted_count_ != 0;  // evicted ones outlive the limit
  if (must_pass(rule, keys)) {
    if (recording() && rule.reason == KeepReason::CustomOp && !careful) recorder_->custom_op(rule, *stack);
    if (careful && rule.reason == KeepReason::CustomOp) return run_locked(op, rule, rest, stack);
    op.redispatchBoxed(rest, stack);
    return;
  }
  const std::uint64_t count = ops_.fetch_add(1, std::memory_order_relaxed);
  if (status_ != nullptr && (count & 63) == 0) publish();
  if (memory_limit_ != 0 && (count & 15) == 0 && !forked_) {
    std::lock_guard lock(lock_);
    apply_limits();
  }
  if (!careful && recording()) return run_recorded(op, rule, keys, rest, stack);
  if (rule.op_class == OpClass::Escape && careful) return run_escaping(op, rule, rest, stack);
  c10::impl::ExcludeDispatchKeyGuard outermost(door_key());
  if (!careful || rule.op_class == OpClass::View) {
    OpName name(rule);
    op.redispatchBoxed(rest, stack);
    return;
  }
  const std::uint64_t t0 = detail::ticks();
  Call call;
  call.rule = &rule;
  call.opaque = keys.has_any(detail::kOpaqueKeys);
  begin(call, *stack);
  std::optional<Recorder::Running> running;
  if (recording()) begin_recorded(running, rule, keys, *stack);
  OpName name(rule);
  const std::uint64_t t1 = detail::ticks();
  const std::uint64_t busy = detail::thread_engine_ticks();
  {
    detail::InOp in_op;
    try {
      op.redispatchBoxed(rest, stack);
    } catch (...) {
      abandon(call);
      throw;
    }
  }
  const std::uint64_t t2 = detail::ticks();
  const std::uint64_t evicting = detail::thread_engine_ticks() - busy;
  const std::uint64_t kernel = t2 - t1 - std::min(evicting, t2 - t1);
  if (call.recipe != nullptr) call.recipe->cost_ns = detail::ticks_to_ns(kernel);
  call.begin_ticks = t1 - t0;
  call.end = t2;
  if (!running) return finish(call, *stack);
  const Turn turn(*this);
  finish(call, *stack);
  running->finish(*stack, kernel, call.recipe != nullptr);
  after_planned(*running);
}

Recorder& Engine::start_recording() {
  std::lock_guard lock(lock_);
  if (recorder_ == nullptr) recorder_ = std::make_unique<Recorder>(allocator_);
  recording_to_file_ = true;
  recorder_->keep_other_batch();
  return *recorder_;
}

// Without a limit nothing is evicted, so the op only has to be seen.
void Engine::run_recorded(const c10::OperatorHandle& op, const OpRule& rule, DispatchKeySet keys, DispatchKeySet rest,
                          torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard outermost(door_key());
  OpName name(rule);
  if (rule.op_class == OpClass::View) {
    op.redispatchBoxed(rest, stack);
    return;
  }
  Recorder::Running running(*recorder_, rule, keys, *stack);
  {
    detail::InOp in_op;
    op.redispatchBoxed(rest, stack);
  }
  running.finish(*stack);
}

// A custom op may hold raw pointers to its arguments while the ops it is made of come by: they stay put meanwhile.
void Engine::run_locked(const c10::OperatorHandle& op, const OpRule& rule, DispatchKeySet rest,
                        torch::jit::Stack* stack) {
  Call call;
  call.rule = &rule;
  {
    const Turn turn(*this);
    ++sequence_;
    ++clock_;
    try {
      collect(call, *stack);
      std::vector<Value*> missing;
      for (const auto& a : call.args) {
        if (a.value != nullptr && !a.value->resident) missing.push_back(a.value);
      }
      if (!missing.empty()) restore(missing);
      prepare_writes(call);
      if (recording()) recorder_->custom_op(rule, *stack);
    } catch (...) {
      unlock_all(call);
      throw;
    }
  }
  try {
    op.redispatchBoxed(rest, stack);
  } catch (...) {
    abandon(call);
    throw;
  }
  const Turn turn(*this);
  finish_writes(call);
  unlock_all(call);
}

// Collectives read and write their tensors on threads of their own, until some later wait.
void Engine::run_escaping(const c10::OperatorHandle& op, const OpRule& rule, DispatchKeySet rest,
                          torch::jit::Stack* stack) {
  Call call;
  call.rule = &rule;
  {
    const Turn turn(*this);
    ++sequence_;
    ++clock_;
    try {
      collect(call, *stack);
      for (const auto& a : call.args) {
        if (a.value == nullptr || a.value->escaped) continue;
        if (auto storage = a.value->binding.lock()) raw_access(storage.get());
      }
    } catch (...) {
      unlock_all(call);
      throw;
    }
    unlock_all(call);
  }
  std::optional<Recorder::Running> running;
  if (recording()) begin_recorded(running, rule, DispatchKeySet(), *stack);
  op.redispatchBoxed(rest, stack);
  if (!running) return;
  const Turn turn(*this);
  running->finish(*stack, 0, false);
  after_planned(*running);
}

void Engine::collect_tensor(Call& call, const at::Tensor& tensor, std::uint32_t arg, int element, bool written,
                            bool hidden) {
  if (!tensor.defined()) return;
  if (detail::is_opaque(tensor)) {
    call.opaque = true;
    if (tensor.is_sparse()) {
      auto* impl = at::sparse::get_sparse_impl(tensor);
      const at::Tensor inner[] = {impl->indices(), impl->values()};
      for (const at::Tensor& t : inner) {
        if (t.defined() && t.has_storage()) collect_tensor(call, t, arg, kPart, false, false);
      }
      return;
    }
    if (tensor.layout() != c10::kStrided && tensor.layout() != c10::kJagged && tensor.layout() != c10::kMkldnn) {
      const auto [compressed, plain] = at::sparse_csr::getCompressedPlainIndices(tensor);
      const at::Tensor inner[] = {compressed, plain, tensor.values()};
      for (const at::Tensor& t : inner) {
        if (t.defined() && t.has_storage()) collect_tensor(call, t, arg, kPart, false, false);
      }
      return;
    }
    if (!tensor.unsafeGetTensorImpl()->has_storage()) return;
  }
  if (!detail::is_ours(tensor)) {
    call.foreign = true;
    return;
  }
  c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  Call::Arg entry{nullptr,
                  element == kPart ? nullptr : &tensor,
                  c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>()),
                  static_cast<std::int16_t>(arg),
                  static_cast<std::int16_t>(element),
                  written,
                  hidden,
                  false};
  Value* value = value_of(storage, true);
  if (value == nullptr) {
    call.foreign = true;  // foreign memory, or no bytes at all: a recipe could not name it
    return;
  }
  entry.value = value;
  if (written || hidden) {
    entry.storage =
        c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  }
  ++value->locks;
  value->last_use = clock_;
  call.input_bytes += value->bytes;
  disarm(storage);
  call.args.push_back(std::move(entry));
}

void Engine::collect(Call& call, const torch::jit::Stack& stack) {
  const OpRule& rule = *call.rule;
  const std::size_t first = stack.size() - rule.args;
  bool hidden_active = !rule.hidden_writes.empty();
  if (hidden_active && rule.training_arg >= 0) hidden_active = stack[first + rule.training_arg].toBool();
  for (std::uint32_t i = 0; i < rule.args; ++i) {
    if (rule.kinds[i] != ArgKind::Tensor && rule.kinds[i] != ArgKind::TensorList) continue;
    const c10::IValue& v = stack[first + i];
    const bool written = rule.writes_arg(i);
    bool hidden = false;
    if (hidden_active) {
      for (const std::uint32_t h : rule.hidden_writes) hidden = hidden || h == i;
    }
    if (v.isTensor()) {
      collect_tensor(call, v.toTensor(), i, -1, written, hidden);
    } else if (v.isList()) {
      int element = 0;
      for (const c10::IValue& e : v.toListRef()) {
        if (e.isTensor()) collect_tensor(call, e.toTensor(), i, element, written, hidden);
        ++element;
      }
    }
  }
}

void Engine::begin(Call& call, const torch::jit::Stack& stack) {
  const Turn turn(*this);
  ++sequence_;
  ++clock_;
  const OpRule& rule = *call.rule;
  if (rule.random) note_random_thread(rule);
  try {
    collect(call, stack);
    before_planned(rule, stack);
    std::vector<Value*> missing;
    for (auto& a : call.args) {
      if (a.written && rule.overwrites) {
        bool shared = false;
        for (const auto& other : call.args) shared = shared || (&other != &a && other.value == a.value);
        a.blank = !shared && covers_storage(*a.tensor, a.value->bytes);
      }
      // Content that only a copy elsewhere has is still needed where something is made from it.
      const bool needed = !a.blank || (a.value->recipe == nullptr && a.value->readers != nullptr);
      if (!a.value->resident && needed) missing.push_back(a.value);
    }
    if (!missing.empty()) restore(missing);
    for (auto& a : call.args) {
      if (a.blank && !a.value->resident) restore_blank(a.value);
    }
    keep_state(call);
    prepare_writes(call);
    if (call.opaque) {
      for (auto& a : call.args) {
        if (auto storage = a.value->binding.lock()) raw_access(storage.get());
      }
    }
    prepare_recipe(call, stack);
    // While the op runs nobody may take what it is writing for the old content.
    for (auto& a : call.args) {
      if ((a.written || a.hidden) && !rule.resizes && a.value->recipe != nullptr && a.value->bound) unbind(a.value);
    }
  } catch (...) {
    unlock_all(call);
    throw;
  }
  call.first_birth = allocator_.ledger().allocations;
}

// Note [What lives on]
//   A recipe must not reach back through what a program carries from step to step: parameters, their gradients,
//   optimizer state, averages. Each step would hang on all steps before it, with their inputs. So these become sources:
//   - a leaf that requires grad and does not share its storage (one that does is an activation that a checkpoint
//     detached), and the gradient it has while it is used;
//   - what an update reads: an op without grad mode that writes a leaf or, outside backward, an old source;
//   - whatever has lived through two rounds of updates.
void Engine::keep_state(Call& call) {
  const std::uint64_t me = detail::thread_number();
  if (op_thread_ == 0) op_thread_ = me;
  several_op_threads_ = several_op_threads_ || op_thread_ != me;
  constexpr std::uint64_t kPause = 64;  // ops between updates of one round, at most; what is younger is no state
  // Sums of gradients on their way through the graph are written too, and are no state.
  const bool in_backward = torch::autograd::get_current_graph_task_id() != -1;
  bool updates = false;
  for (auto& a : call.args) {
    if (a.written && a.value->recipe == nullptr && !in_backward && sequence_ - a.value->born > kPause) updates = true;
    if (a.tensor == nullptr || !a.tensor->is_leaf() || !a.tensor->requires_grad()) continue;
    if (a.written) updates = true;
    if (a.value->recipe != nullptr && a.value->resident && (a.written || a.tensor->storage().use_count() == 1))
      make_source(a.value);
    if (several_op_threads_) continue;  // another one may be setting the gradient
    const at::Tensor& gradient = a.tensor->grad();
    if (!gradient.defined() || detail::is_opaque(gradient) || !detail::is_ours(gradient)) continue;
    Value* value = value_of(gradient.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl(), false);
    if (value != nullptr && value->resident) make_source(value);
  }
  if (!updates || c10::GradMode::is_enabled()) return;
  for (auto& a : call.args) {
    if (!a.blank && a.value->recipe != nullptr && a.value->resident) make_source(a.value);
  }
  if (sequence_ - last_update_ > kPause) {
    keep_older_than(update_round_);
    update_round_ = sequence_;
  }
  last_update_ = sequence_;
}

void Engine::keep_older_than(std::uint64_t sequence) {
  std::vector<Value*> old;
  for (Value* v : candidates_) {
    if (v->bound && v->recipe != nullptr && v->recipe->sequence < sequence) old.push_back(v);
  }
  for (Value* v : old) ++v->references;
  for (Value* v : old) make_source(v);
  for (Value* v : old) {
    --v->references;
    release_if_unused(v);
  }
}

// Before an argument's content is lost: what would need it to be made again is brought back or given a copy.
void Engine::prepare_writes(Call& call) {
  if (call.rule->resizes) return;
  for (auto& a : call.args) {
    if (!a.written && !a.hidden) continue;
    before_content_is_lost(a.value, true);
    drop_spare(a.value);
  }
}

NumericContext Engine::numeric_context() const {
  NumericContext c;
  auto& g = at::globalContext();
  c.threads = at::get_num_threads();
  c.default_dtype = c10::get_default_dtype_as_scalartype();
  c.flags = (g.deterministicAlgorithms() ? 1u : 0u) | (g.userEnabledMkldnn() ? 2u : 0u) |
            (g.userEnabledFlashSDP() ? 4u : 0u) | (g.userEnabledMathSDP() ? 8u : 0u) |
            (g.userEnabledMemEfficientSDP() ? 16u : 0u) | (g.deterministicFillUninitializedMemory() ? 32u : 0u) |
            (g.userEnabledNNPACK() ? 64u : 0u) | (c10::GradMode::is_enabled() ? 128u : 0u) |
            (static_cast<std::uint32_t>(g.float32MatmulPrecision()) << 8);
  c.float_control = _mm_getcsr() & ~0x3fu;  // without the sticky exception flags
  return c;
}

void Engine::prepare_recipe(Call& call, const torch::jit::Stack& stack) {
  const OpRule& rule = *call.rule;
  if (rule.op_class != OpClass::Record || call.opaque || call.foreign || forked_) return;
  if (rule.random && rule.generator_arg < 0 && several_random_threads_) return;
  if (recipe_count_ > kMaxRecipes) return;
  std::uint32_t depth = 0;
  for (const auto& a : call.args) {
    if (a.hidden || a.blank) continue;
    if (a.value->escaped && (a.written || a.value->bytes > kSnapshotBytes)) return;
    if (a.written && a.value->recipe == nullptr) return;
    if (!a.value->bound && !available(a.value)) return;
    depth = std::max(depth, a.value->depth);
  }
  if (depth >= kMaxDepth) return;
  auto recipe = std::make_unique<Recipe>();
  recipe->rule = &rule;
  recipe->sequence = sequence_;
  recipe->context = numeric_context();
  const std::size_t first = stack.size() - rule.args;
  if (rule.random) {
    const c10::IValue given = rule.generator_arg >= 0 ? stack[first + rule.generator_arg] : c10::IValue();
    at::Generator generator = given.isGenerator() && given.toGenerator().defined()
                                  ? given.toGenerator()
                                  : at::globalContext().defaultGenerator(c10::kCPU);
    if (generator.device().type() != c10::kCPU) return;
    std::lock_guard generator_lock(generator.mutex());
    recipe->generator = generator.clone();
  }
  // Copies of small arguments that somebody may write unseen. They can fail, so they come before anything is linked.
  c10::SmallVector<Value*, 10> copies;
  try {
    for (const auto& a : call.args) {
      copies.push_back(!a.hidden && !a.blank && a.value->escaped ? snapshot(a.value) : nullptr);
    }
  } catch (...) {
    for (Value* copy : copies) {
      if (copy != nullptr) release_if_unused(copy);
    }
    throw;
  }
  recipe->args.reserve(rule.args);
  for (std::uint32_t i = 0; i < rule.args; ++i) {
    const c10::IValue& v = stack[first + i];
    const bool tensors = rule.kinds[i] == ArgKind::Tensor || rule.kinds[i] == ArgKind::TensorList;
    if (!tensors) {
      recipe->args.push_back(rule.kinds[i] == ArgKind::Generator ? c10::IValue() : v);
    } else if (v.isTensor()) {
      recipe->args.push_back(v.toTensor().defined() ? c10::IValue() : v);
    } else if (v.isList()) {
      // An empty list of the same element type, filled at replay; its length is kept beside it.
      recipe->args.push_back(c10::IValue(static_cast<std::int64_t>(v.toListRef().size())));
    } else {
      recipe->args.push_back(v);
    }
  }
  recipe->tensor_count = static_cast<std::uint32_t>(call.args.size());
  recipe->tensors = std::make_unique<TensorArg[]>(call.args.size());
  for (std::size_t i = 0; i < call.args.size(); ++i) {
    const auto& a = call.args[i];
    TensorArg& t = recipe->tensors[i];
    const c10::TensorImpl* impl = a.tensor->unsafeGetTensorImpl();
    t.arg = a.arg;
    t.element = a.element;
    t.use = a.hidden    ? TensorArg::Use::Scratch
            : a.blank   ? TensorArg::Use::Blank
            : a.written ? TensorArg::Use::InPlace
                        : TensorArg::Use::Read;
    t.storage_bytes = a.value->bytes;
    t.offset = impl->storage_offset();
    t.geometry.set_sizes(impl->sizes());
    t.geometry.set_strides(impl->strides());
    t.dtype = impl->dtype();
    t.keys = impl->key_set();
    t.wrapped_number = impl->is_wrapped_number();
    if (t.use == TensorArg::Use::Read || t.use == TensorArg::Use::InPlace)
      add_reader(t, recipe.get(), copies[i] != nullptr ? copies[i] : a.value);
  }
  ++recipe_count_;
  call.recipe = recipe.release();
}

// The written storages go on with new values. One entry in the recipe's results for each written argument.
void Engine::finish_writes(Call& call) {
  Recipe* recipe = call.recipe;
  for (auto& a : call.args) {
    if (!a.written && !a.hidden) continue;
    Value* fresh = nullptr;
    auto storage = a.storage.lock();
    c10::DataPtr* data = storage ? &storage->_mutable_data_ptr_no_checks() : nullptr;
    const bool ours =
        data != nullptr && data->get_deleter() == &CpuAllocator::delete_block && data->get_context() != nullptr;
    Block* block = ours ? Block::of(data->get_context()) : nullptr;
    if (block != nullptr && block->value == nullptr) {
      if (recipe != nullptr && a.written && block->requested >= kMinRecordedBytes) {
        fresh = new_value(block->requested);
        bind(fresh, block, storage.get());
        fresh->recipe = recipe;
        fresh->result = static_cast<std::uint32_t>(recipe->results.size());
        ++recipe->living;
      }
    } else if (a.value->recipe == nullptr && !call.rule->resizes) {
      cut_readers(a.value);  // a source written over is a new source
    }
    if (recipe != nullptr && a.written) recipe->results.push_back(fresh);
  }
}

void Engine::finish(Call& call, const torch::jit::Stack& stack) {
  const Turn turn(*this);
  const OpRule& rule = *call.rule;
  const std::size_t returns = call.rule->op.schema().returns().size();
  Recipe* recipe = call.recipe;
  c10::SmallVector<Value*, 8> touched;
  std::uint32_t position = 0;
  auto take = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) {
      if (recipe != nullptr) recipe->results.push_back(nullptr);
      return;
    }
    Value* made = nullptr;
    if (detail::is_opaque(tensor)) {
      call.opaque_result = true;
    } else if (detail::is_ours(tensor)) {
      c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
      if (data.get_deleter() == &CpuAllocator::delete_block && data.get_context() != nullptr) {
        Block* block = Block::of(data.get_context());
        arm(storage);
        if (block->value == nullptr && block->birth > call.first_birth && recipe != nullptr &&
            block->requested >= kMinRecordedBytes) {
          made = new_value(block->requested);
          bind(made, block, storage);
          made->recipe = recipe;
          made->result = position;
          made->last_use = clock_;
          ++recipe->living;
          touched.push_back(made);
        }
      }
    }
    if (recipe != nullptr) recipe->results.push_back(made);
  };
  // Results that are written arguments have their old value still, so `take` passes them by.
  for (std::size_t i = stack.size() - returns; i < stack.size(); ++i) {
    const c10::IValue& v = stack[i];
    if (v.isTensor()) {
      take(v.toTensor());
      ++position;
    } else if (v.isTensorList()) {
      for (const c10::IValue& e : v.toListRef()) {
        take(e.toTensor());
        ++position;
      }
    }
  }
  if (recipe != nullptr) recipe->fresh_results = position;
  if (!rule.writes.empty() || !rule.hidden_writes.empty()) finish_writes(call);
  if (call.opaque_result) {
    // The result may hold its arguments' storages inside.
    for (auto& a : call.args) {
      if (auto storage = a.value->binding.lock()) raw_access(storage.get());
    }
  }
  if (recipe != nullptr) {
    std::uint32_t depth = 0;
    std::uint32_t writes = 0;
    for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
      const TensorArg& t = recipe->tensors[i];
      if (t.value == nullptr) continue;
      if (t.use == TensorArg::Use::InPlace) writes = std::max(writes, t.value->writes + 1);
      depth = std::max(depth, t.value->depth);
      if (!available(t.value)) recipe->broken = true;  // another thread wrote it meanwhile
    }
    if (recipe->living == 0 || recipe->broken) {
      for (Value* v : recipe->results) {
        if (v != nullptr) v->recipe = nullptr;
      }
      destroy(recipe);
      call.recipe = nullptr;
      drain_unused();
    } else {
      if (rule.random && rule.generator_arg < 0) threadbound_.insert(recipe);
      for (Value* v : recipe->results) {
        if (v == nullptr) continue;
        v->depth = depth + 1;
        v->writes = v->result >= recipe->fresh_results ? writes : 0;
        v->last_use = clock_;
        update_candidate(v);
        arm(v);
      }
      ++stats_.recorded;
    }
  }
  unlock_all(call);
  stats_.engine_ns += detail::ticks_to_ns(call.begin_ticks + (detail::ticks() - call.end));
}

// The op threw: what it was writing has unknown content now, what it made is gone.
void Engine::abandon(Call& call) noexcept {
  const Turn turn(*this);
  planned_.leave();
  if (call.recipe != nullptr) {
    destroy(call.recipe);
    call.recipe = nullptr;
  }
  finish_writes(call);
  drain_unused();
  unlock_all(call);
}

void Engine::unlock_all(Call& call) noexcept {
  for (auto& a : call.args) {
    if (a.value == nullptr) continue;
    --a.value->locks;
    if (a.value->locks == 0) {
      arm(a.value);
      release_if_unused(a.value);
    }
    a.value = nullptr;
  }
}

void Engine::note_random_thread(const OpRule& rule) {
  const std::uint64_t me = detail::thread_number();
  if (random_thread_ == 0) random_thread_ = me;
  if (random_thread_ == me || several_random_threads_) return;
  // A second thread draws from the default generator: ops whose kernel offers no other may not be replayed any more,
  // since that needs the default generator's state swapped for a moment.
  several_random_threads_ = true;
  const auto bound = threadbound_;
  for (Recipe* recipe : bound) {
    if (threadbound_.count(recipe) == 0) continue;  // gone with one before it
    for (std::size_t i = 0; i < recipe->results.size(); ++i) {
      Value* v = recipe->results[i];
      if (v == nullptr) continue;
      if (!v->resident && v->bound) restore(v);
      if (!v->resident) before_content_is_lost(v, false);
      if (threadbound_.count(recipe) == 0) break;
    }
  }
  for (Recipe* recipe : bound) {
    if (threadbound_.count(recipe) == 0) continue;
    const auto results = recipe->results;
    for (Value* v : results) {
      if (v != nullptr) ++v->references;
    }
    for (Value* v : results) {
      if (v == nullptr) continue;
      if (!v->resident) cut_readers(v);
      make_source(v);
    }
    for (Value* v : results) {
      if (v == nullptr) continue;
      --v->references;
      release_if_unused(v);
    }
  }
}

void Engine::publish() noexcept {
  if (status_ == nullptr) return;
  std::lock_guard lock(lock_);
  auto set = [](trace::RunStatus::Counter& c, std::uint64_t v) { c.store(v, std::memory_order_relaxed); };
  const memory::Ledger& ledger = allocator_.ledger();
  set(status_->live_bytes, ledger.live);
  set(status_->cached_bytes, ledger.cached);
  set(status_->peak_bytes, ledger.peak);
  set(status_->unlimited_peak_bytes, ledger.peak_program);
  set(status_->ops, ops_.load(std::memory_order_relaxed));
  set(status_->evictions, stats_.evictions);
  set(status_->recomputed_ops, stats_.recomputed_ops);
  set(status_->recompute_ns, stats_.recompute_ns);
  set(status_->engine_ns, stats_.engine_ns + (recorder_ != nullptr ? recorder_->spent_ns() : 0));
  set(status_->search_ns, stats_.search_ns);
  set(status_->planned_steps, stats_.planned_steps);
  set(status_->replanned, stats_.replanned);
  set(status_->predicted_peak_bytes, stats_.predicted_peak);
  set(status_->predicted_step_ns, stats_.predicted_step_ns);
  set(status_->step_ns, stats_.step_ns);
  set(status_->offload_write_bytes, stats_.offload_write_bytes);
  set(status_->offload_read_bytes, stats_.offload_read_bytes);
  set(status_->refusals, stats_.refusals);
  set(status_->verified_values, stats_.verified);
}

// The child has no threads that could finish a copy.
void Engine::before_fork() {
  turn_.lock();
  std::lock_guard lock(lock_);
  if (!forked_) finish_moves();
}

void Engine::after_fork_in_child() {
  for (const auto& store : offload_stores_) store->after_fork_in_child();
  if (offload_) offload_->after_fork_in_child();
  // It was taken by the forking thread in the parent; here it is a new one. The allocator sees to its own lock.
  new (&turn_) std::recursive_mutex();
  forked_ = true;
  limited_ = false;
  planning_ = want_plan_ = false;
  planned_.leave();
  if (recorder_ != nullptr) recorder_->stop();
  status_ = nullptr;
}

}  // namespace memfit::engine
