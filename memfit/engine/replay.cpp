// Bringing evicted values back: the region of recipes that is needed runs once, in the order of the original ops.
// What several of its ops need is made once; temporaries go after their last use.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "memfit/engine/detail/pass.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/out_of_budget.h"

#include <fmt/format.h>

namespace memfit::engine {

using memory::Block;
using memory::CpuAllocator;

namespace detail {
std::uint64_t checksum(const void* data, std::uint64_t bytes) {
  // FNV-style over 64-bit words in four lanes; only ever compared within one process.
  const auto* p = static_cast<const unsigned char*>(data);
  std::uint64_t lane[4] = {1469598103934665603ull, 1099511628211ull, 88172645463325252ull, 2685821657736338717ull};
  std::uint64_t i = 0;
  for (; i + 32 <= bytes; i += 32) {
    std::uint64_t w[4];
    std::memcpy(w, p + i, 32);
    for (int k = 0; k < 4; ++k) lane[k] = (lane[k] ^ w[k]) * 0x9E3779B97F4A7C15ull + (lane[k] >> 29);
  }
  std::uint64_t hash = bytes;
  for (const std::uint64_t l : lane) hash = (hash ^ l) * 0xFF51AFD7ED558CCDull + (hash >> 33);
  for (; i < bytes; ++i) hash = (hash ^ p[i]) * 1099511628211ull;
  return hash;
}
}  // namespace detail

namespace {
// What a smaller region made on its way goes at once: making it again costs less than its place. Of a larger one it
// stays until somebody needs the room, since the ops that follow often want the same region.
constexpr std::size_t kKeptRegion = 64;
}  // namespace

namespace {

c10::Storage fresh_storage(CpuAllocator& allocator, std::uint64_t bytes) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes),
                                                            allocator.allocate(bytes), &allocator, true));
}

/// Settings of the recorded op, while it is replayed.
class ContextGuard {
 public:
  ContextGuard(const NumericContext& wanted, const NumericContext& now)
      : wanted_(wanted), now_(now), changed_(!(wanted == now)) {
    if (changed_) apply(wanted, now);
  }
  ~ContextGuard() {
    if (changed_) apply(now_, wanted_);
  }

 private:
  static void apply(const NumericContext& to, const NumericContext& from) {
    auto& g = at::globalContext();
    if (to.threads != from.threads) at::set_num_threads(to.threads);
    if (to.default_dtype != from.default_dtype) c10::set_default_dtype(c10::scalarTypeToTypeMeta(to.default_dtype));
    if (to.float_control != from.float_control) _mm_setcsr(to.float_control);
    if (to.flags == from.flags) return;
    c10::GradMode::set_enabled((to.flags & 128) != 0);   // oneDNN's recurrent layers keep a workspace only when it is on
    g.setDeterministicAlgorithms((to.flags & 1) != 0, g.deterministicAlgorithmsWarnOnly());
    g.setUserEnabledMkldnn((to.flags & 2) != 0);
    g.setSDPUseFlash((to.flags & 4) != 0);
    g.setSDPUseMath((to.flags & 8) != 0);
    g.setSDPUseMemEfficient((to.flags & 16) != 0);
    g.setDeterministicFillUninitializedMemory((to.flags & 32) != 0);
    g.setUserEnabledNNPACK((to.flags & 64) != 0);
    static constexpr const char* kPrecisions[] = {"highest", "high", "medium"};   // in the enum's order
    g.setFloat32MatmulPrecision(kPrecisions[(to.flags >> 8) & 3]);
  }
  NumericContext wanted_;
  NumericContext now_;
  bool changed_;
};

}  // namespace

// In one pass, which runs no op twice. When not all that the pass makes fits, what it needs latest is dropped, and
// another pass makes that again. When that does not do either: value by value, holding only what the next op needs.
// Either way the number of replays is bounded.
void Engine::restore(const std::vector<Value*>& targets) {
  constexpr int kPasses = 32;
  const std::uint64_t before = stats_.recomputed_ops;
  std::size_t region = 0;
  ++attempts_;
  try {
    for (int i = 0; i < kPasses; ++i) {
      if (restore_at_once(targets)) {
        --attempts_;
        return;
      }
      region = std::max(region, last_region_);
      if (stats_.recomputed_ops - before > 16 * region) break;
    }
    --attempts_;
  } catch (const OutOfBudget&) {
    --attempts_;
  } catch (...) {
    --attempts_;
    throw;
  }
  region = std::max(region, last_region_);
  restore_frugally(targets, 64 + 16 * region);
}

struct Engine::Frugal {
  std::vector<Value*> made;      // temporaries, let go at the end
  std::size_t replays_left;
};

void Engine::restore_frugally(const std::vector<Value*>& targets, std::size_t most_replays) {
  Frugal frugal{{}, most_replays};
  const std::uint64_t t0 = detail::ticks();
  const std::uint64_t evicting = detail::thread_engine_ticks();
  const bool old = memory::set_allocating_for_replay(true);
  const char* op = memory::set_current_op("replay");
  std::size_t locked = 0;
  auto finish = [&] {
    memory::set_allocating_for_replay(old);
    memory::set_current_op(op);
    for (std::size_t i = 0; i < locked; ++i) --targets[i]->locks;
    for (Value* v : frugal.made) {
      --v->references;
      release_if_unused(v);
    }
    const std::uint64_t spent = detail::ticks() - t0;
    const std::uint64_t searched = detail::thread_engine_ticks() - evicting;
    stats_.recompute_ns += detail::ticks_to_ns(spent - std::min(spent, searched));
    detail::thread_state.engine_ticks += spent - std::min(spent, searched);
  };
  try {
    for (Value* v : targets) {
      bring(v, frugal);
      ++v->locks;
      ++locked;
    }
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

void Engine::bring(Value* value, Frugal& frugal) {
  if (value->resident) return;
  if (value->spare) return fetch(value);
  Recipe* recipe = value->recipe;
  TORCH_INTERNAL_ASSERT(recipe != nullptr, "memfit: a value of ", value->bytes, " bytes has neither bytes nor recipe (", value->bound ? "bound" : "ghost", ")");
  if (frugal.replays_left-- == 0) {
    frugal.replays_left = 1;
    refuse(value->bytes);
  }
  std::vector<Value*> inputs;
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    Value* x = recipe->tensors[i].value;
    if (x != nullptr && std::find(inputs.begin(), inputs.end(), x) == inputs.end()) inputs.push_back(x);
  }
  // The one that takes most room to make comes first, while nothing else is held.
  std::sort(inputs.begin(), inputs.end(), [](const Value* a, const Value* b) { return a->depth > b->depth; });
  std::size_t locked = 0;
  auto unlock = [&] {
    for (std::size_t i = 0; i < locked; ++i) --inputs[i]->locks;
  };
  try {
    for (Value* x : inputs) {
      bring(x, frugal);
      ++x->locks;
      ++locked;
    }
    Pass pass;
    pass.kind = Pass::Kind::Frugal;
    pass.wanted = value;
    pass.made = &frugal.made;
    replay(pass, recipe);
  } catch (...) {
    unlock();
    throw;
  }
  unlock();
  TORCH_INTERNAL_ASSERT(value->resident, "memfit: a value of ", value->bytes, " bytes did not come back");
}

bool Engine::restore_at_once(const std::vector<Value*>& targets) {
  Pass pass;
  pass.id = ++visit_;
  const std::uint64_t t0 = detail::ticks();
  const std::uint64_t evicting = detail::thread_engine_ticks();
  const bool old = memory::set_allocating_for_replay(true);
  const char* op = memory::set_current_op("replay");
  auto finish = [&] {
    memory::set_allocating_for_replay(old);
    memory::set_current_op(op);
    for (Value* v : pass.members) {
      if (v->pass_locked) {
        v->pass_locked = false;
        --v->locks;
      }
      v->pass_uses = 0;
      v->in_pass = false;
      if (!v->bound && v->held && v->recipe != nullptr && pass.order.size() < kKeptRegion) drop_held(v);
      --v->references;
      release_if_unused(v);
    }
    const std::uint64_t spent = detail::ticks() - t0;
    const std::uint64_t searched = detail::thread_engine_ticks() - evicting;
    stats_.recompute_ns += detail::ticks_to_ns(spent - std::min(spent, searched));
    detail::thread_state.engine_ticks += spent - std::min(spent, searched);
  };
  std::vector<Value*> walk;
  auto meet = [&](Value* v) {
    if (!v->in_pass) {
      v->in_pass = true;
      v->pass_uses = 0;
      ++v->references;
      pass.members.push_back(v);
      walk.push_back(v);
    }
    ++v->pass_uses;
  };
  try {
    for (Value* v : targets) meet(v);
    while (!walk.empty()) {
      Value* v = walk.back();
      walk.pop_back();
      if (!v->resident && v->spare) fetch(v);
      if (v->resident) {
        v->pass_locked = true;
        ++v->locks;
        continue;
      }
      Recipe* recipe = v->recipe;
      TORCH_INTERNAL_ASSERT(recipe != nullptr, "memfit: a value of ", v->bytes, " bytes has neither bytes nor recipe (",
                            v->bound ? "bound" : "ghost", ")");
      if (recipe->visit == pass.id) continue;
      recipe->visit = pass.id;
      pass.order.push_back(recipe);
      for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
        if (recipe->tensors[i].value != nullptr) meet(recipe->tensors[i].value);
      }
    }
    std::sort(pass.order.begin(), pass.order.end(), [](const Recipe* a, const Recipe* b) { return a->sequence < b->sequence; });
    last_region_ = pass.order.size();
    for (std::size_t i = 0; i < pass.order.size(); ++i) {
      bool done = false;
      while (!done) {
        if (!inputs_present(pass.order[i])) {
          finish();
          return false;
        }
        try {
          replay(pass, pass.order[i]);
          done = true;
        } catch (const OutOfBudget&) {
          if (!shed(pass, i, targets)) throw;
        }
      }
    }
    for (const Value* v : targets) {
      TORCH_INTERNAL_ASSERT(v->resident || !v->bound, "memfit: a value of ", v->bytes, " bytes did not come back");
    }
  } catch (...) {
    finish();
    throw;
  }
  finish();
  return true;
}

bool Engine::inputs_present(const Recipe* recipe) {
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    const Value* v = recipe->tensors[i].value;
    if (v != nullptr && !v->resident) return false;
  }
  return true;
}

// Room for what the pass makes next: a quarter of what it holds goes, first what it needs latest.
bool Engine::shed(Pass& pass, std::size_t position, const std::vector<Value*>& targets) {
  const std::uint64_t id = ++visit_;
  for (Value* v : targets) v->visit = id;
  Recipe* now = pass.order[position];
  for (std::uint32_t i = 0; i < now->tensor_count; ++i) {
    if (now->tensors[i].value != nullptr) now->tensors[i].value->visit = id;
  }
  std::vector<Value*> by_next_use;
  std::uint64_t held = 0;
  for (std::size_t i = position + 1; i < pass.order.size(); ++i) {
    const Recipe* recipe = pass.order[i];
    for (std::uint32_t k = 0; k < recipe->tensor_count; ++k) {
      Value* v = recipe->tensors[k].value;
      if (v == nullptr || v->visit == id || !v->pass_locked || v->locks != 1 || v->recipe == nullptr || !evictable(v)) continue;
      v->visit = id;
      held += v->bytes;
      by_next_use.push_back(v);
    }
  }
  std::uint64_t freed = 0;
  while (!by_next_use.empty() && freed <= held / 4) {
    Value* v = by_next_use.back();
    by_next_use.pop_back();
    v->pass_locked = false;
    --v->locks;
    evict(v);
    if (!v->resident) freed += v->bytes;
  }
  return freed != 0;
}

namespace {
c10::Storage storage_of(const Value* value) {
  if (value->held) return c10::Storage(value->held);
  if (auto bound = value->binding.lock()) return c10::Storage(bound);
  // Another thread is dropping it, and waits for the lock; keep_dropped leaves what is locked where it is.
  void* bytes = value->block != nullptr ? value->block->data() : nullptr;
  TORCH_INTERNAL_ASSERT(bytes != nullptr && value->locks != 0, "memfit: an input of a replay is gone");
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(value->bytes),
                                                            c10::DataPtr(bytes, c10::Device(c10::kCPU)), nullptr, false));
}
}  // namespace

at::Tensor Engine::tensor_for(Pass& pass, TensorArg& arg) {
  c10::Storage storage;
  if (arg.use == TensorArg::Use::Blank) {
    storage = fresh_storage(allocator_, arg.storage_bytes);
  } else if (arg.use == TensorArg::Use::Scratch) {
    storage = fresh_storage(allocator_, arg.storage_bytes);
    std::memset(Block::of(storage.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get_context())->data(), 0, arg.storage_bytes);
  } else {
    Value* value = arg.value;
    const auto buffer = std::find_if(pass.in_place.begin(), pass.in_place.end(), [&](const auto& b) { return b.first == value; });
    if (buffer != pass.in_place.end()) {
      storage = buffer->second;
    } else {
      TORCH_INTERNAL_ASSERT(value->resident, "memfit: an input of a replay is missing");
      storage = storage_of(value);
    }
  }
  auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), arg.keys, arg.dtype);
  impl->set_sizes_and_strides(arg.geometry.sizes_arrayref(), arg.geometry.strides_arrayref(), arg.offset);
  if (arg.wrapped_number) impl->set_wrapped_number(true);
  return at::Tensor(std::move(impl));
}

namespace {
/// The kernel's workers may allocate, and other threads drop or allocate, while it runs.
struct Lent {
  explicit Lent(memory::Lock& l) : lock(l), depth(l.lend()) {}
  ~Lent() { lock.take_back(depth); }
  memory::Lock& lock;
  int depth;
};
}  // namespace

namespace {
/// The default generator with another's state, while it lives. Not by get_state(): that allocates, and must not fail
/// on the way back.
class DefaultGenerator {
 public:
  explicit DefaultGenerator(const at::Generator& other)
      : generator_(at::globalContext().defaultGenerator(c10::kCPU)),
        mine_(*at::check_generator<at::CPUGeneratorImpl>(generator_)) {
    const std::lock_guard lock(mine_.mutex_);
    saved_ = State(mine_);
    State(*at::check_generator<at::CPUGeneratorImpl>(other)).put_into(mine_);
  }
  ~DefaultGenerator() {
    const std::lock_guard lock(mine_.mutex_);
    saved_.put_into(mine_);
  }
  DefaultGenerator(const DefaultGenerator&) = delete;
  DefaultGenerator& operator=(const DefaultGenerator&) = delete;

 private:
  struct State {
    State() = default;
    explicit State(at::CPUGeneratorImpl& from)
        : engine(from.engine()), single(from.next_float_normal_sample()), twice(from.next_double_normal_sample()) {}
    void put_into(at::CPUGeneratorImpl& to) const {
      to.set_engine(engine);
      to.set_next_float_normal_sample(single);
      to.set_next_double_normal_sample(twice);
    }
    at::mt19937 engine;
    std::optional<float> single;
    std::optional<double> twice;
  };
  at::Generator generator_;
  at::CPUGeneratorImpl& mine_;
  State saved_;
};
}  // namespace

namespace {
/// What a replayed kernel allocates is none of the program's.
struct Unseen {
  explicit Unseen(Recorder* r) : recorder(r) {
    if (recorder != nullptr) recorder->set_replaying(true);
  }
  ~Unseen() {
    if (recorder != nullptr) recorder->set_replaying(false);
  }
  Recorder* recorder;
};
}  // namespace

void Engine::run_replayed(Recipe* recipe, torch::jit::Stack& stack) {
  const Unseen unseen(recorder_.get());
  const Lent lent(lock_);
  detail::InOp in_op;
  c10::impl::ForceDispatchKeyGuard keys(replay_keys());
  at::DisableRecordFunctionGuard quiet;
  ContextGuard context(recipe->context, numeric_context());
  const OpRule& rule = *recipe->rule;
  if (!rule.random || rule.generator_arg >= 0) {
    recipe->rule->op.callBoxed(stack);
    return;
  }
  // The kernel takes the default generator and nothing else: it gets the recorded state for the moment.
  const DefaultGenerator borrowed(recipe->generator);
  recipe->rule->op.callBoxed(stack);
}

void Engine::take_result(Pass& pass, Recipe* recipe, std::size_t index, const c10::Storage& storage) {
  Value* value = recipe->results[index];
  if (value == nullptr || value->resident) return;
  c10::StorageImpl* made = storage.unsafeGetStorageImpl();
  c10::DataPtr& data = made->_mutable_data_ptr_no_checks();
  TORCH_INTERNAL_ASSERT(data.get_deleter() == &CpuAllocator::delete_block && Block::of(data.get_context())->requested == value->bytes,
                        "memfit: ", recipe->rule->name, " made a result of another size when it ran again");
  const bool region = pass.kind == Pass::Kind::Region;
  const bool member = region ? value->in_pass && value->pass_uses > 0 : pass.kind == Pass::Kind::Planned || value == pass.wanted;
  if (value->bound) {
    settle(value, std::move(data));
    if (!value->resident) return;
  } else if (member) {
    value->block = Block::of(data.get_context());
    value->block->value = value;
    value->held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(made);
    value->resident = true;
    value->last_use = clock_;
    update_candidate(value);
    if (!region) {
      ++value->references;
      pass.made->push_back(value);
    }
  } else {
    return;
  }
  if (member && region) {
    value->pass_locked = true;
    ++value->locks;
  }
  if (verify_) check_bytes(value, recipe);
}

void Engine::check_bytes(Value* value, Recipe* recipe) {
  if (!value->has_checksum) return;
  ++stats_.verified;
  if (detail::checksum(value->block->data(), value->bytes) == value->checksum) return;
  const std::string who = recipe == nullptr ? "a tensor that was kept elsewhere" : fmt::format("op {} (number {})", recipe->rule->name, recipe->sequence);
  const std::string text = fmt::format(
      "memfit --verify: {} gave other bytes when it came back: {} of result {}. The run stops here; please report it.",
      who, format_bytes(Bytes(value->bytes)), value->result);
  if (status_ != nullptr) {
    status_->verify_failures.fetch_add(1);
    trace::set_text(status_->message, text);
  }
  TORCH_CHECK(false, text);
}

void Engine::replay(Pass& pass, Recipe* recipe) {
  ++clock_;
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    if (recipe->tensors[i].value != nullptr) recipe->tensors[i].value->last_use = clock_;
  }
  pass.in_place.clear();
  // In-place arguments first: they get a buffer that may be written.
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    TensorArg& arg = recipe->tensors[i];
    if (arg.use != TensorArg::Use::InPlace) continue;
    Value* value = arg.value;
    std::uint32_t here = 0;
    for (std::uint32_t k = 0; k < recipe->tensor_count; ++k) here += recipe->tensors[k].value == value ? 1 : 0;
    if (std::any_of(pass.in_place.begin(), pass.in_place.end(), [&](const auto& b) { return b.first == value; })) continue;
    bool last = !value->bound && value->held && value->recipe != nullptr;
    if (pass.kind == Pass::Kind::Region) {
      last = last && value->pass_uses == here;
    } else if (pass.kind == Pass::Kind::Planned) {
      last = last && !pass.preserve;
    } else {
      std::uint32_t readers = 0;
      for (const TensorArg* r = value->readers; r != nullptr && readers <= here; r = r->next) ++readers;
      last = last && readers == here;
    }
    if (last) {
      // Last use: the buffer itself is handed on.
      pass.in_place.emplace_back(value, c10::Storage(value->held));
      drop_held(value);
    } else {
      c10::Storage copy = fresh_storage(allocator_, value->bytes);
      const auto from = storage_of(value);
      std::memcpy(copy.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(),
                  from.unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get(), value->bytes);
      pass.in_place.emplace_back(value, std::move(copy));
    }
  }
  torch::jit::Stack stack;
  stack.reserve(recipe->args.size());
  std::vector<at::Tensor> written;
  std::uint32_t next = 0;
  for (std::size_t i = 0; i < recipe->args.size(); ++i) {
    const ArgKind kind = recipe->rule->kinds[i];
    if (kind == ArgKind::TensorList && recipe->args[i].isInt()) {
      const auto length = static_cast<std::size_t>(recipe->args[i].toInt());
      std::vector<at::Tensor> elements(length);
      for (; next < recipe->tensor_count && recipe->tensors[next].arg == static_cast<int>(i); ++next) {
        at::Tensor t = tensor_for(pass, recipe->tensors[next]);
        if (recipe->tensors[next].use == TensorArg::Use::InPlace || recipe->tensors[next].use == TensorArg::Use::Blank) written.push_back(t);
        elements[static_cast<std::size_t>(recipe->tensors[next].element)] = std::move(t);
      }
      const c10::TypePtr type = recipe->rule->op.schema().arguments()[i].type();
      const c10::TypePtr list = type->kind() == c10::TypeKind::OptionalType ? type->castRaw<c10::OptionalType>()->getElementType() : type;
      if (list->castRaw<c10::ListType>()->getElementType()->kind() == c10::TypeKind::OptionalType) {
        c10::List<std::optional<at::Tensor>> optional;
        for (at::Tensor& t : elements) optional.push_back(t.defined() ? std::optional<at::Tensor>(std::move(t)) : std::nullopt);
        stack.emplace_back(std::move(optional));
      } else {
        stack.emplace_back(std::move(elements));
      }
    } else if (next < recipe->tensor_count && recipe->tensors[next].arg == static_cast<int>(i)) {
      at::Tensor t = tensor_for(pass, recipe->tensors[next]);
      if (recipe->tensors[next].use == TensorArg::Use::InPlace || recipe->tensors[next].use == TensorArg::Use::Blank) written.push_back(t);
      stack.emplace_back(std::move(t));
      ++next;
    } else if (kind == ArgKind::Generator && recipe->generator.defined()) {
      std::lock_guard lock(recipe->generator.mutex());
      stack.emplace_back(recipe->generator.clone());
    } else {
      stack.push_back(recipe->args[i]);
    }
  }
  run_replayed(recipe, stack);
  ++stats_.recomputed_ops;
  std::size_t position = 0;
  for (const c10::IValue& v : stack) {
    if (v.isTensor()) {
      if (v.toTensor().defined()) take_result(pass, recipe, position, v.toTensor().storage());
      ++position;
    } else if (v.isTensorList()) {
      for (const c10::IValue& e : v.toListRef()) {
        if (e.toTensor().defined()) take_result(pass, recipe, position, e.toTensor().storage());
        ++position;
      }
    }
  }
  stack.clear();
  std::size_t write = 0;
  for (std::size_t i = recipe->fresh_results; i < recipe->results.size(); ++i, ++write) {
    take_result(pass, recipe, i, written[write].storage());
  }
  written.clear();
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    Value* value = recipe->tensors[i].value;
    if (value == nullptr || pass.kind != Pass::Kind::Region) continue;
    if (--value->pass_uses != 0) continue;
    if (value->pass_locked) {
      value->pass_locked = false;
      --value->locks;
    }
    if (!value->bound && value->held && value->recipe != nullptr && pass.order.size() < kKeptRegion) drop_held(value);
  }
  pass.in_place.clear();
}

}  // namespace memfit::engine
