// What must hold of values, recipes, blocks and ledger between ops. For tests: a walk over everything that can be
// reached, under the lock. Not to be called while an op runs on any thread.
#include <algorithm>
#include <unordered_set>
#include <vector>

#include "memfit/engine/engine.h"

namespace memfit::engine {
namespace {

using memory::Block;

const void* content_of(const c10::StorageImpl& storage) {
  return const_cast<c10::StorageImpl&>(storage)._mutable_data_ptr_no_checks().get_context();
}

void check_readers(const Value* value) {
  const TensorArg* previous = nullptr;
  for (const TensorArg* arg = value->readers; arg != nullptr; arg = arg->next) {
    TORCH_INTERNAL_ASSERT(arg->value == value && arg->previous == previous, "a value's list of readers is broken");
    const Recipe* recipe = arg->owner;
    TORCH_INTERNAL_ASSERT(arg >= recipe->tensors.get() && arg < recipe->tensors.get() + recipe->tensor_count,
                          "a reader is no argument of its recipe");
    previous = arg;
  }
}

void check_bytes_of(const Value* value) {
  if (value->block != nullptr) {
    TORCH_INTERNAL_ASSERT(value->block->value == value, "a value's block belongs to another value");
    TORCH_INTERNAL_ASSERT(value->resident && !value->outside, "a value with a block is not resident");
    TORCH_INTERNAL_ASSERT(value->block->requested == value->bytes, "a value and its block differ in size");
  }
  if (value->held) {
    TORCH_INTERNAL_ASSERT(value->resident && !value->bound, "held bytes of a value that is bound or not resident");
    TORCH_INTERNAL_ASSERT(value->outside || content_of(*value->held) == value->block->data(), "held bytes are another block's");
  }
  if (!value->bound) {
    TORCH_INTERNAL_ASSERT(!value->resident || value->held, "a resident value that nothing holds");
    return;
  }
  TORCH_INTERNAL_ASSERT(value->resident || value->recipe != nullptr || value->spare, "an evicted value that nobody can make again");
  const auto storage = value->binding.lock();
  TORCH_INTERNAL_ASSERT(storage, "a bound value's storage is gone");
  if (!value->resident) {
    TORCH_INTERNAL_ASSERT(content_of(*storage) == value, "an evicted value's storage does not lead to it");
  } else if (value->block != nullptr) {
    TORCH_INTERNAL_ASSERT(content_of(*storage) == value->block->data(), "a bound value's storage has another block");
  }
}

void check_recipe(const Recipe* recipe) {
  std::uint32_t living = 0;
  std::uint32_t depth = 0;
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    const TensorArg& arg = recipe->tensors[i];
    if (arg.use != TensorArg::Use::Read && arg.use != TensorArg::Use::InPlace) continue;
    const Value* input = arg.value;
    TORCH_INTERNAL_ASSERT(input != nullptr && arg.owner == recipe, "a live recipe has lost an input: ", recipe->rule->name);
    TORCH_INTERNAL_ASSERT(input->resident || input->recipe != nullptr || input->spare, "an input of a live recipe is not available: ", recipe->rule->name);
    const TensorArg* listed = input->readers;
    while (listed != nullptr && listed != &arg) listed = listed->next;
    TORCH_INTERNAL_ASSERT(listed == &arg, "an input does not know its reader: ", recipe->rule->name);
    depth = std::max(depth, input->depth);
  }
  for (std::size_t i = 0; i < recipe->results.size(); ++i) {
    const Value* result = recipe->results[i];
    if (result == nullptr) continue;
    ++living;
    TORCH_INTERNAL_ASSERT(result->recipe == recipe && result->result == i, "a result has another recipe: ", recipe->rule->name);
    TORCH_INTERNAL_ASSERT(result->depth > depth, "a result is not deeper than what it is made from: ", recipe->rule->name);
  }
  TORCH_INTERNAL_ASSERT(living == recipe->living && living > 0, "a recipe's living results are miscounted: ", recipe->rule->name);
  TORCH_INTERNAL_ASSERT(!recipe->broken, "a broken recipe lives on: ", recipe->rule->name);
}

}  // namespace

void Engine::check_invariants() {
  const Turn turn(*this);
  allocator_.check_invariants();
  TORCH_INTERNAL_ASSERT(attempts_ == 0 && !draining_ && unused_.empty(), "something was left half done");

  std::unordered_set<const Value*> values;
  std::unordered_set<const Recipe*> recipes;
  std::vector<const Value*> walk;
  auto meet = [&](const Value* v) {
    if (v != nullptr && values.insert(v).second) walk.push_back(v);
  };
  std::uint64_t live = 0;
  allocator_.for_each_live([&](const Block* b) {
    live += b->requested;
    const auto* v = static_cast<const Value*>(b->value);
    TORCH_INTERNAL_ASSERT(v == nullptr || v->block == b, "a block's value has another block");
    meet(v);
  });
  for (const Value* v : candidates_) meet(v);
  for (const Value* v : retained_) meet(v);
  auto meet_recipe = [&](const Recipe* r) {
    if (r == nullptr || !recipes.insert(r).second) return;
    for (const Value* v : r->results) meet(v);
    for (std::uint32_t i = 0; i < r->tensor_count; ++i) meet(r->tensors[i].value);
  };
  for (const Recipe* r : threadbound_) meet_recipe(r);
  while (!walk.empty()) {
    const Value* v = walk.back();
    walk.pop_back();
    meet_recipe(v->recipe);
    for (const TensorArg* arg = v->readers; arg != nullptr; arg = arg->next) meet_recipe(arg->owner);
  }

  std::size_t evicted = 0;
  std::size_t candidates = 0;
  for (const Value* v : values) {
    check_readers(v);
    check_bytes_of(v);
    const std::uint32_t leaving = v->spare && v->spare->leaving ? 1 : 0;
    TORCH_INTERNAL_ASSERT(v->locks == leaving && v->references == 0, "a value is still in use: ", v->locks, " locks, ", v->references, " references");
    TORCH_INTERNAL_ASSERT(!v->in_pass && !v->pass_locked && v->pass_uses == 0, "a value is still in a replay");
    TORCH_INTERNAL_ASSERT(v->bound || v->readers != nullptr, "a value that nobody can want any more");
    TORCH_INTERNAL_ASSERT((v->candidate >= 0) == evictable(v), "a value is wrongly listed as evictable or is not listed");
    TORCH_INTERNAL_ASSERT(v->candidate < 0 || candidates_[static_cast<std::size_t>(v->candidate)] == v, "a candidate's place is another's");
    candidates += v->candidate >= 0 ? 1 : 0;
    evicted += v->bound && !v->resident ? 1 : 0;
  }
  for (const Recipe* r : recipes) check_recipe(r);
  TORCH_INTERNAL_ASSERT(candidates == candidates_.size(), "the list of candidates has others in it");
  for (const Value* v : retained_) TORCH_INTERNAL_ASSERT(v->held && !v->bound, "a retained value holds nothing");
  for (const Queued& q : queue_) TORCH_INTERNAL_ASSERT(q.value->queued && q.value->candidate >= 0, "the queue has a value that cannot be evicted");
  // What is made from nothing and evicted (zeros, random numbers) is reached by its storage alone, so these are bounds.
  TORCH_INTERNAL_ASSERT(values.size() <= value_count_ && recipes.size() <= recipe_count_, "more values or recipes than were counted");
  TORCH_INTERNAL_ASSERT(evicted <= evicted_count_ && evicted_count_ <= value_count_, "evicted values are miscounted");
  TORCH_INTERNAL_ASSERT(live <= allocator_.ledger().live, "blocks exceed the ledger");
}

}  // namespace memfit::engine
