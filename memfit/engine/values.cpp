// Values and recipes: how they begin, who keeps them, and what happens before content is lost.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "memfit/device/address_space.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/out_of_budget.h"

namespace memfit::engine {

using memory::Block;
using memory::CpuAllocator;

namespace {

constexpr std::uint64_t kSmallSource = 4096;

/// Memory of PyTorch's own allocator that we count and watch from the moment an op uses it.
struct Adopted {
  c10::DataPtr original;
  Value* value;
  std::uint64_t bytes;
};

void delete_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  Engine::instance().dropped_outside(adopted->value, adopted->bytes, std::move(adopted->original));
  delete adopted;
}

/// Bytes of an evicted value that a raw reader found at its stand-in address.
struct StoodIn {
  void* address;
  Value* value;
  std::uint64_t bytes;
};

void delete_stood_in(void* context) {
  auto* stood_in = static_cast<StoodIn*>(context);
  Engine::instance().dropped_outside(stood_in->value, stood_in->bytes, c10::DataPtr());
  device::AddressReservation::instance().release(stood_in->address);
  delete stood_in;
}

void delete_evicted(void* context) { Engine::instance().dropped_while_evicted(static_cast<Value*>(context)); }

void on_raw_access(c10::StorageImpl* storage) {
  if (detail::thread_state.in_op > 0) return;  // a kernel, about its own arguments
  Engine::instance().raw_access(storage);
}

c10::DeleterFnPtr default_deleter() {
  static const c10::DeleterFnPtr deleter = c10::GetDefaultCPUAllocator()->raw_deleter();
  return deleter;
}

}  // namespace

Value* Engine::new_value(std::uint64_t bytes) {
  auto* value = new Value();
  value->bytes = bytes;
  value->born = sequence_;
  value->last_use = clock_;
  ++value_count_;
  return value;
}

Value* Engine::value_of(c10::StorageImpl* storage, bool create) {
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  const c10::DeleterFnPtr deleter = data.get_deleter();
  void* context = data.get_context();
  if (context == nullptr) return nullptr;
  if (deleter == &CpuAllocator::delete_block) {
    Block* block = Block::of(context);
    auto* value = static_cast<Value*>(block->value);
    if (value == nullptr && create) {
      value = new_value(block->requested);
      bind(value, block, storage);
      if (offload_) update_candidate(value);
    }
    return value;
  }
  if (deleter == &delete_evicted) return static_cast<Value*>(context);
  if (deleter == &delete_adopted) return static_cast<Adopted*>(context)->value;
  if (deleter == &delete_stood_in) return static_cast<StoodIn*>(context)->value;
  if (!create || deleter != default_deleter() || data.get() != context) return nullptr;
  allocator_.adopt(storage->nbytes());  // throws when it does not fit, and then nothing has changed
  Value* value = new_value(storage->nbytes());
  value->outside = value->bound = value->resident = true;
  value->binding =
      c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  void* address = data.get();
  const c10::Device device = data.device();
  auto* adopted = new Adopted{std::move(data), value, value->bytes};
  storage->set_data_ptr_noswap(c10::DataPtr(address, adopted, &delete_adopted, device));
  return value;
}

void Engine::bind(Value* value, Block* block, c10::StorageImpl* storage) {
  value->block = block;
  block->value = value;
  value->binding =
      c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage));
  value->bound = value->resident = true;
}

// The storage goes on without this value. Its bytes stay with the storage.
void Engine::unbind(Value* value) {
  if (value->block != nullptr) value->block->value = nullptr;
  value->block = nullptr;
  value->binding.reset();
  value->bound = value->resident = false;
  drop_spare(value);
  update_candidate(value);
}

void Engine::add_reader(TensorArg& arg, Recipe* recipe, Value* value) {
  arg.value = value;
  arg.owner = recipe;
  arg.previous = nullptr;
  arg.next = value->readers;
  if (value->readers != nullptr) value->readers->previous = &arg;
  value->readers = &arg;
}

void Engine::remove_reader(TensorArg& arg) {
  Value* value = arg.value;
  if (value == nullptr) return;
  if (arg.previous != nullptr) {
    arg.previous->next = arg.next;
  } else {
    value->readers = arg.next;
  }
  if (arg.next != nullptr) arg.next->previous = arg.previous;
  arg.value = nullptr;
  if (value->readers == nullptr && !value->bound && value->references == 0 && value->locks == 0) mark_unused(value);
}

void Engine::destroy(Recipe* recipe) {
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) remove_reader(recipe->tensors[i]);
  if (!threadbound_.empty()) threadbound_.erase(recipe);
  --recipe_count_;
  delete recipe;
}

// A value is listed once, or it would be deleted twice.
void Engine::mark_unused(Value* value) {
  if (value->listed_unused) return;
  value->listed_unused = true;
  unused_.push_back(value);
}

void Engine::release_if_unused(Value* value) {
  if (value->bound || value->references != 0 || value->locks != 0 || value->readers != nullptr) return;
  mark_unused(value);
  drain_unused();
}

// One after the other instead of recursively: chains can be thousands long.
void Engine::drain_unused() {
  if (draining_) return;
  draining_ = true;
  while (!unused_.empty()) {
    Value* value = unused_.back();
    unused_.pop_back();
    value->listed_unused = false;
    if (value->bound || value->references != 0 || value->locks != 0 || value->readers != nullptr) continue;
    if (value->held) {
      if (value->block != nullptr) value->block->value = nullptr;
      const auto place = std::find(retained_.begin(), retained_.end(), value);
      if (place != retained_.end()) retained_.erase(place);
      value->resident = false;
      if (value->outside) {
        allocator_.program_grew(value->bytes);  // it was taken off when the program dropped it; disown takes it again
        allocator_.disown(value->bytes);
      }
      value->held.reset();
    }
    value->block = nullptr;
    update_candidate(value);
    Recipe* recipe = value->recipe;
    if (recipe != nullptr) {
      recipe->results[value->result] = nullptr;
      if (--recipe->living == 0) destroy(recipe);
    }
    // destroy may have queued it twice only if it had readers, and it has none.
    --value_count_;
    planned_.forget(value);
    delete value;
  }
  draining_ = false;
}

void Engine::make_source(Value* value) {
  Recipe* recipe = value->recipe;
  if (recipe == nullptr) return;
  if (value->block != nullptr && recording()) recorder_->lost(value->block);
  value->recipe = nullptr;
  value->depth = 0;
  update_candidate(value);
  recipe->results[value->result] = nullptr;
  if (--recipe->living == 0) {
    destroy(recipe);
    drain_unused();
  }
}

// Nothing may be made from this value's content any more. Results that have their bytes become sources; ghosts made
// from it are lost, and so are recipes that read those. No evicted value may depend on it (evicted_dependents).
void Engine::cut_readers(Value* value) {
  std::vector<Value*> lost{value};
  ++value->references;
  while (!lost.empty()) {
    Value* x = lost.back();
    lost.pop_back();
    while (x->readers != nullptr) {
      Recipe* recipe = x->readers->owner;
      if (recipe->living == 0) {  // of an op that is running now: it finds out when it ends
        TensorArg* arg = x->readers;
        remove_reader(*arg);
        recipe->broken = true;
        continue;
      }
      std::vector<Value*> results = recipe->results;
      for (Value* r : results) {
        if (r == nullptr) continue;
        if (is_temporary(r)) drop_held(r);
        r->recipe = nullptr;
        r->depth = 0;
        update_candidate(r);
        if (!r->resident && !r->spare && r->readers != nullptr) {
          ++r->references;
          lost.push_back(r);
        } else if (!r->bound) {
          mark_unused(r);
        }
      }
      destroy(recipe);
    }
    --x->references;
    if (!x->bound && x->references == 0 && x->locks == 0) mark_unused(x);
  }
  drain_unused();
}

// Walks what is made from `value`, as far as the first results that have their bytes. `at_recipe()` for each recipe on the
// way, `at_result(value, has bytes)` for each result; the walk ends where one of them says false.
template <class AtRecipe, class AtResult>
void Engine::walk_dependents(Value* value, AtRecipe at_recipe, AtResult at_result) {
  c10::SmallVector<Value*, 32> walk{value};
  const std::uint64_t id = ++visit_;
  while (!walk.empty()) {
    Value* x = walk.back();
    walk.pop_back();
    for (TensorArg* arg = x->readers; arg != nullptr; arg = arg->next) {
      Recipe* recipe = arg->owner;
      if (recipe->visit == id) continue;
      recipe->visit = id;
      if (!at_recipe()) return;
      for (Value* r : recipe->results) {
        if (r == nullptr || r->visit == id) continue;
        r->visit = id;
        const bool has_bytes = (r->resident && !is_temporary(r)) || r->spare;
        if (!at_result(r, has_bytes)) return;
        if (!has_bytes) walk.push_back(r);
      }
    }
  }
}

Engine::Dependents Engine::dependents_of(Value* value) {
  Dependents found;
  walk_dependents(value, [] { return true; }, [&](Value* r, bool has_bytes) {
    if (has_bytes) found.resident.push_back(r);
    else if (r->bound) found.evicted.push_back(r);
    return true;
  });
  return found;
}

// Results made from `value` that have their bytes keep them from now on. Without this, bringing the evicted ones back
// could evict these, and then nobody could make them again.
void Engine::keep_resident_dependents(Value* value) {
  const std::vector<Value*> kept = dependents_of(value).resident;
  for (Value* r : kept) ++r->references;
  for (Value* r : kept) make_source(r);
  for (Value* r : kept) {
    --r->references;
    if (r->held && std::find(retained_.begin(), retained_.end(), r) == retained_.end()) retained_.push_back(r);
    release_if_unused(r);
  }
}

void Engine::restore_dependents(Value* value) {
  keep_resident_dependents(value);
  const std::vector<Value*> evicted = dependents_of(value).evicted;
  if (!evicted.empty()) restore(evicted);
}

// Called before a write: afterwards the old content is nowhere. A value with a recipe becomes a ghost; a source's
// readers must do without, or, when that would bring back more than a copy costs, get a copy.
void Engine::before_content_is_lost(Value* value, bool may_copy) {
  if (value == nullptr || value->recipe != nullptr || value->readers == nullptr) return;
  const std::vector<Value*> evicted = dependents_of(value).evicted;
  if (!evicted.empty()) {
    std::uint64_t bytes = 0;
    for (const Value* v : evicted) bytes += v->bytes;
    if (may_copy && value->bound && value->resident && !value->escaped && value->bytes < bytes) {
      hold_copy(value);
      return;
    }
    restore_dependents(value);
  }
  cut_readers(value);
}

c10::DataPtr Engine::copy_of(Value* value, const void* bytes) {
  ++value->locks;
  const bool old = memory::set_allocating_for_replay(true);
  c10::DataPtr copy;
  try {
    copy = allocator_.allocate(value->bytes);
  } catch (...) {
    memory::set_allocating_for_replay(old);
    --value->locks;
    throw;
  }
  memory::set_allocating_for_replay(old);
  --value->locks;
  std::memcpy(copy.get(), bytes, value->bytes);
  return copy;
}

void Engine::hold(Value* value, c10::DataPtr&& data) {
  value->block = Block::of(data.get_context());
  value->block->value = value;
  value->held = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(value->bytes), std::move(data), nullptr, false);
  value->resident = true;
  retained_.push_back(value);
  update_candidate(value);
}

// The content of a value that may change unseen, for one recipe alone.
Value* Engine::snapshot(Value* value) {
  auto storage = value->binding.lock();
  if (!storage) return nullptr;
  c10::DataPtr copy = copy_of(value, storage->_mutable_data_ptr_no_checks().get());
  Value* fresh = new_value(value->bytes);
  hold(fresh, std::move(copy));
  return fresh;
}

void Engine::hold_copy(Value* value) {
  auto storage = value->binding.lock();
  if (!storage) return;
  c10::DataPtr copy = copy_of(value, storage->_mutable_data_ptr_no_checks().get());
  if (value->outside) {
    // The adopted storage keeps its counting; it gets a value of its own.
    auto* adopted = static_cast<Adopted*>(storage->_mutable_data_ptr_no_checks().get_context());
    Value* fresh = new_value(value->bytes);
    fresh->outside = fresh->bound = fresh->resident = true;
    fresh->binding = value->binding;
    adopted->value = fresh;
    value->outside = false;
    value->binding.reset();
    value->bound = value->resident = false;
  } else {
    unbind(value);
  }
  hold(value, std::move(copy));
}

bool Engine::keep_dropped(Block* block) noexcept {
  auto* value = static_cast<Value*>(block->value);
  if (value->held) {  // the engine itself lets go of it
    return false;
  }
  value->bound = false;
  value->binding.reset();
  const bool last_copy = value->recipe == nullptr && worth_keeping(value);
  if (last_copy || value->locks != 0) {
    // Its bytes cannot be made again and something may have to be made from them: they stay, for now. So do those
    // that another thread reads at this moment.
    if (!(block->flags & Block::kReplay)) allocator_.program_shrank(block->requested);
    block->flags |= Block::kReplay;
    value->held = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(value->bytes),
        c10::DataPtr(block->data(), block->data(), &CpuAllocator::delete_block, c10::Device(c10::kCPU)), nullptr,
        false);
    if (last_copy) retained_.push_back(value);
    update_candidate(value);
    return true;
  }
  block->value = nullptr;
  value->block = nullptr;
  value->resident = false;
  drop_spare(value);
  note_bring_cost(value);
  update_candidate(value);
  ++value->references;  // cut_readers would let go of it
  if (value->readers != nullptr && value->recipe == nullptr) cut_readers(value);
  --value->references;
  release_if_unused(value);
  return false;
}

void Engine::dropped_while_evicted(Value* value) noexcept {
  std::lock_guard lock(lock_);
  if (recording()) recorder_->dropped_while_evicted(value, value->bytes);
  --evicted_count_;
  allocator_.program_shrank(value->bytes);
  value->bound = false;
  value->binding.reset();
  if (value->stand_in != nullptr) device::AddressReservation::instance().release(value->stand_in);
  value->stand_in = nullptr;
  if (value->spare && (value->recipe != nullptr || !worth_keeping(value))) {
    drop_spare(value);
    ++value->references;  // cut_readers would let go of it
    if (value->recipe == nullptr && value->readers != nullptr) cut_readers(value);
    --value->references;
  }
  release_if_unused(value);
}

void Engine::dropped_outside(Value* value, std::uint64_t bytes, c10::DataPtr&& original) noexcept {
  std::lock_guard lock(lock_);
  value->bound = false;
  value->binding.reset();
  const bool last_copy = worth_keeping(value);
  if ((last_copy || value->locks != 0) && original.get() != nullptr) {
    // Still counted; the copy of the program's view of it is not.
    value->held = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), static_cast<std::int64_t>(bytes), std::move(original), nullptr, false);
    allocator_.program_shrank(bytes);
    if (last_copy) retained_.push_back(value);
    return;
  }
  value->resident = false;
  allocator_.disown(bytes);
  ++value->references;  // cut_readers would let go of it
  if (value->readers != nullptr) cut_readers(value);
  --value->references;
  release_if_unused(value);
}

// Of a source that the program dropped: something evicted is made from it, or more than its own size could be evicted
// as long as it is there.
bool Engine::worth_keeping(Value* value) {
  if (value->readers == nullptr || !limited_ || value->escaped) return false;
  // A plan knows what goes when; only small ones are kept without need, since no plan counts on making them again.
  const bool planned = planned_.current() != nullptr && value->bytes > kSmallSource;
  // Every dropped source comes here, so the walk ends at the first reason. That it would be a long one is a reason too.
  constexpr int kMost = 128;
  int recipes = 0;
  std::uint64_t resident = 0;
  bool keep = false;
  walk_dependents(
      value, [&] { return !(keep = ++recipes > kMost); },
      [&](Value* r, bool has_bytes) {
        if (has_bytes) resident += r->bytes;
        keep = has_bytes ? !planned && resident > value->bytes : r->bound;
        return !keep;
      });
  return keep;
}

std::uint64_t Engine::bytes_of(const std::vector<Value*>& values) {
  std::uint64_t bytes = 0;
  for (const Value* v : values) bytes += v->bytes;
  return bytes;
}

// The last that can be done: results of a retained value stay from now on, and the value goes. First those whose
// going makes the fewest bytes unevictable.
bool Engine::release_retained(std::uint64_t bytes) {
  struct Candidate {
    Value* value;
    double loss;
  };
  std::vector<Candidate> candidates;
  for (Value* value : retained_) {
    if (value->locks != 0 || value->references != 0) continue;
    const Dependents made = dependents_of(value);
    if (!made.evicted.empty()) continue;
    candidates.push_back({value, static_cast<double>(bytes_of(made.resident)) / static_cast<double>(value->bytes)});
  }
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.loss < b.loss; });
  std::uint64_t freed = 0;
  for (const Candidate& c : candidates) {
    if (std::find(retained_.begin(), retained_.end(), c.value) == retained_.end()) continue;  // went with one before
    freed += c.value->bytes;
    cut_readers(c.value);  // it dies with its last reader
    if (freed >= bytes) break;
  }
  return freed != 0;
}

// Raw pointers taken outside ops are noticed while the hook is on; a kernel's own are not ours to notice.
void Engine::arm(Value* value) {
  if (!value->bound || value->escaped || value->locks != 0) return;
  if (auto storage = value->binding.lock()) arm(storage.get());
}

// Also of storages that have no value yet: a pointer that is taken now may be written through when they have one.
void Engine::arm(c10::StorageImpl* storage) {
  if (!storage->has_materializer()) storage->set_materializer(&on_raw_access);
}

void Engine::disarm(c10::StorageImpl* storage) {
  if (storage->has_materializer()) storage->clear_materializer();
}

void Engine::raw_access(c10::StorageImpl* storage) {
  if (recording() && !limited_ && evicted_count_ == 0) return recorder_->raw_access(storage);
  const Turn turn(*this);
  Value* value = value_of(storage, limited_);
  if (value == nullptr || value->escaped) return;
  ++sequence_;
  ++clock_;
  ++value->locks;
  try {
    if (!value->resident) restore(value);
    if (value->recipe != nullptr && value->readers != nullptr) {
      // What was read so far can be made again from the old version, which becomes a ghost.
      Block* block = value->block;
      unbind(value);
      --value->locks;
      release_if_unused(value);
      value = new_value(block->requested);
      bind(value, block, storage);
      ++value->locks;
    } else if (value->readers != nullptr) {
      restore_dependents(value);
      cut_readers(value);
    }
  } catch (...) {
    --value->locks;
    throw;
  }
  --value->locks;
  value->escaped = true;
  drop_spare(value);
  make_source(value);
  update_candidate(value);
  ++stats_.raw_accesses;
  if (recording()) recorder_->raw_access(storage);
}

// Called from the fault handler, on the thread that reads a tensor's bytes without having asked for them.
bool Engine::raw_fault(void* address) {
  const Turn turn(*this);
  void* start = nullptr;
  auto* value = static_cast<Value*>(device::AddressReservation::instance().owner_of(address, &start));
  if (value == nullptr || !value->bound || value->resident || value->stand_in != start) return false;
  auto storage = value->binding.lock();
  if (!storage) return false;
  try {
    value->stand_in = nullptr;  // the range stays reserved: the reader has its address
    raw_access(storage.get());
    value = value_of(storage.get(), true);
    c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
    Block* block = Block::of(data.get_context());
    const std::uint64_t bytes = block->requested;
    allocator_.adopt(bytes);
    if (!device::AddressReservation::instance().make_accessible(start)) return false;
    std::memcpy(start, block->data(), bytes);
    value->block = nullptr;
    block->value = nullptr;
    value->outside = true;
    const c10::Device device = data.device();
    // The old pointer's deleter frees the block.
    storage->set_data_ptr_noswap(c10::DataPtr(start, new StoodIn{start, value, bytes}, &delete_stood_in, device));
    ++stats_.raw_faults;
    return true;
  } catch (const OutOfBudget& error) {
    // Whoever reads here cannot be told by an exception.
    std::fprintf(stderr,
                 "%s\nmemfit: the bytes were read without PyTorch, so the program cannot be told and ends here.\n",
                 error.what_without_backtrace());
    std::abort();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memfit: an evicted tensor's bytes were read directly and could not be brought back: %s\n",
                 error.what());
    return false;
  }
}

// Eviction's two ends live here, beside the deleters that an evicted storage carries.

void Engine::evict(Value* value) {
  if (value->held) {
    if (value->recipe == nullptr && !keep_outside(value)) return;
    const auto place = std::find(retained_.begin(), retained_.end(), value);
    if (place != retained_.end()) retained_.erase(place);
    drop_held(value);
    return;
  }
  auto storage = value->binding.lock();
  if (!storage) return;
  c10::DataPtr& data = storage->_mutable_data_ptr_no_checks();
  if (value->block == nullptr || data.get_context() != value->block->data()) return;
  if (value->recipe == nullptr || value->prefers_outside) {
    if (!keep_outside(value) && value->recipe == nullptr) return;
  }
  if (verify_ && !value->has_checksum) {
    value->checksum = detail::checksum(value->block->data(), value->bytes);
    value->has_checksum = true;
  }
  // Without an address that faults, whoever reads the bytes directly would find nothing there.
  void* stand_in = device::AddressReservation::instance().reserve(value->bytes, value);
  if (stand_in == nullptr) return;
  value->stand_in = stand_in;
  const c10::Device device = data.device();
  data.release_context();
  storage->set_data_ptr_noswap(c10::DataPtr(value->stand_in, value, &delete_evicted, device));
  arm(storage.get());
  Block* block = value->block;
  value->block = nullptr;
  value->resident = false;
  update_candidate(value);
  block->value = nullptr;
  if (recording()) recorder_->evicted(block, value);
  allocator_.give(block);
  ++evicted_count_;
  ++stats_.evictions;
  stats_.evicted_bytes += value->bytes;
}

void Engine::drop_held(Value* value) {
  if (value->block != nullptr && value->block->value == value) value->block->value = nullptr;
  value->block = nullptr;
  value->resident = false;
  update_candidate(value);
  value->held.reset();
}

void Engine::settle(Value* value, c10::DataPtr&& data) {
  auto storage = value->binding.lock();
  if (!storage) return;  // another thread is dropping it
  c10::DataPtr& old = storage->_mutable_data_ptr_no_checks();
  if (old.get_deleter() != &delete_evicted) return;
  old.release_context();
  Block* block = Block::of(data.get_context());
  storage->set_data_ptr_noswap(std::move(data));
  if (value->stand_in != nullptr) device::AddressReservation::instance().release(value->stand_in);
  value->stand_in = nullptr;
  value->block = block;
  block->value = value;
  if (recording()) recorder_->restored(value, block);
  block->flags &= ~static_cast<std::uint32_t>(Block::kReplay);
  value->resident = true;
  value->last_use = clock_;
  --evicted_count_;
  update_candidate(value);
}

// The next op fills the storage whatever it held.
void Engine::restore_blank(Value* value) {
  const bool old = memory::set_allocating_for_replay(true);
  c10::DataPtr data;
  try {
    data = allocator_.allocate(value->bytes);
  } catch (...) {
    memory::set_allocating_for_replay(old);
    throw;
  }
  memory::set_allocating_for_replay(old);
  settle(value, std::move(data));
  unbind(value);
}

}  // namespace memfit::engine
