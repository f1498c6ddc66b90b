// A value is one version of one storage's content; a recipe is the op that made it, with the values it read.
// Note [Values, storages, ghosts]
//   A storage holds one value at a time (the value is *bound*); a write gives it a new one. A value that no storage
//   holds any more is a *ghost*: it has no bytes, but as long as something made from it may have to be made again its
//   recipe is kept. A value without a recipe is a *source*: its bytes cannot be made again, so they stay.
//   Invariant: every input of a live recipe is available: it has bytes, a spare copy, or a recipe of its own.
// Lifetime: a value lives while it is bound, while a recipe reads it, or while it is locked; a recipe lives while one
// of its results does. So bookkeeping goes with the values it is about.
// Threads: everything here under the engine's lock.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/core/impl/SizesAndStrides.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "memfit/engine/offload_store.h"
#include "memfit/engine/op_rules.h"
#include "memfit/memory/block.h"
#include "memfit/memory/packing.h"

namespace memfit::engine {

struct Recipe;

/// One tensor argument of a recorded op: which value, seen how.
struct TensorArg {
  enum class Use : std::uint8_t {
    Read,
    InPlace,   // the op turns this value into its result
    Blank,     // the op fills it; only the storage's size matters
    Scratch,   // the op writes it and nobody may notice (running statistics): a replay gets zeros
  };
  struct Value* value = nullptr;   // Read and InPlace
  Recipe* owner = nullptr;
  TensorArg* previous = nullptr;   // list of the value's readers
  TensorArg* next = nullptr;
  std::uint64_t storage_bytes = 0;
  std::int64_t offset = 0;
  c10::impl::SizesAndStrides geometry;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;
  std::int16_t arg = 0;
  std::int16_t element = -1;       // index within a list argument
  Use use = Use::Read;
  bool wrapped_number = false;
};

/// Process-wide settings that change what kernels compute; a replay runs under the recorded ones.
struct NumericContext {
  std::uint32_t flags = 0;       // packed switches
  std::int32_t threads = 0;
  std::uint32_t float_control = 0;
  c10::ScalarType default_dtype = c10::ScalarType::Float;
  bool operator==(const NumericContext&) const = default;
};

struct Recipe {
  const OpRule* rule = nullptr;
  std::uint64_t sequence = 0;      // order of execution
  std::uint64_t cost_ns = 0;       // measured
  std::vector<c10::IValue> args;   // tensors left out
  std::unique_ptr<TensorArg[]> tensors;
  std::uint32_t tensor_count = 0;
  std::vector<struct Value*> results;   // by position of tensors in the op's results, then written arguments; null = gone
  std::uint32_t fresh_results = 0;      // how many of them are results of the op; the rest are written arguments
  std::uint32_t living = 0;
  bool broken = false;             // an input was lost while the op was running
  at::Generator generator;         // state before the op, when it draws
  NumericContext context;
  std::uint64_t visit = 0;         // marks of the walks over recipes
};

/// The content of a value, kept elsewhere or shorter than as its bytes.
struct Spare {
  memory::PackForm form;                        // of `packed`
  c10::DataPtr packed;
  c10::DataPtr arriving;                        // memory that `outside` is being read into
  bool leaving = false;                         // `outside` is still being written; the value is locked meanwhile
  std::shared_ptr<OffloadStore::Copy> outside;  // last: it goes first, and waits for what it is busy with
};

struct Value {
  std::uint64_t bytes = 0;
  memory::Block* block = nullptr;                      // data, when resident in our memory
  c10::weak_intrusive_ptr<c10::StorageImpl> binding{c10::intrusive_ptr<c10::StorageImpl>()};
  c10::intrusive_ptr<c10::StorageImpl> held;           // keeps data of an unbound value
  Recipe* recipe = nullptr;
  std::uint32_t result = 0;                            // position in the recipe's results
  TensorArg* readers = nullptr;
  std::uint32_t references = 0;                        // readers and passes
  std::uint32_t locks = 0;                             // ops in flight that use the bytes
  std::uint32_t writes = 0;                            // in-place ops in a row that made it
  std::uint32_t depth = 0;                             // longest chain of recipes below
  std::int32_t candidate = -1;                         // index among the evictable
  std::uint32_t logged = 0xffffffffu;                  // number in the running step, see PlannedSteps
  std::uint64_t born = 0;                              // number of the op that met it first
  std::uint64_t last_use = 0;                          // on the engine's clock
  std::uint64_t looked = 0;                            // when bring_cost was worked out with care
  float bring_cost = 0;                                // ns to make it again, as far as known when it lost its bytes
  void* stand_in = nullptr;                            // address range that stands for evicted bytes
  std::uint64_t visit = 0;
  std::uint32_t pass_uses = 0;                         // uses left in the running replay pass
  bool in_pass = false;                                // met by the running replay pass
  bool listed_unused = false;
  bool pass_locked = false;
  bool queued = false;                                 // in the evictor's queue
  bool bound = false;
  bool resident = false;
  bool outside = false;                                // bytes are not in a block of ours
  bool escaped = false;                                // a raw pointer is out: never moved, never a recipe's input
  std::unique_ptr<Spare> spare;                        // what is kept instead of its bytes, or beside them
  bool prefers_outside = false;                        // moving it out costs less than making it again
  bool carried = false;                                // known from the step before, see PlannedSteps
  std::uint64_t checksum = 0;                          // of the original bytes, with --verify
  bool has_checksum = false;
};

}  // namespace memfit::engine
