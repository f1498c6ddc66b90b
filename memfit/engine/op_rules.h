// What the engine must know of an operator before it may record, replay or skip it: asked of the operator itself
// (schema, tags, kernels) and, where that does not tell, of a short table with the reason beside each entry.
// Not here: what is done with the answer (engine/engine.cpp).
// Threads: any. Cost: one hash lookup an op; the answer is worked out at an operator's first call.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <string>
#include <vector>

namespace memfit::engine {

/// What an argument can hold, from its schema type.
enum class ArgKind : std::uint8_t { Tensor, TensorList, Generator, Plain, Opaque };

/// How the engine treats a call.
enum class OpClass : std::uint8_t {
  Record,       // runs as one unit; its results can be made again
  Keep,         // runs as one unit; its results stay (side effects, not deterministic, reads the outside)
  View,         // touches no bytes: nothing to restore, nothing to record
  PassThrough,  // made of other ops: let them come by one at a time
  Escape,       // its tensors are read or written later without the dispatcher seeing it: they never move again
};

/// Why results of an op are kept, for reports and traces.
enum class KeepReason : std::uint8_t { None, SideEffect, Nondeterministic, CustomOp, Opaque, ReadsOutside, Communication };

struct OpRule {
  c10::OperatorHandle op;        // a copy: handles given to kernels may be temporaries
  std::string name;              // with overload
  std::uint64_t name_hash = 0;   // the same in every process
  OpClass op_class = OpClass::Record;
  KeepReason reason = KeepReason::None;
  std::uint32_t args = 0;
  std::vector<ArgKind> kinds;    // one an argument
  std::vector<std::uint32_t> writes;         // arguments written, as the schema says
  std::vector<std::uint32_t> hidden_writes;  // arguments written although the schema does not say so; a replay gets scratch
  int training_arg = -1;         // hidden_writes only happen when this bool argument is true
  bool random = false;           // draws from a generator
  int generator_arg = -1;
  bool overwrites = false;       // the written argument's old content is not read
  bool resizes = false;          // may change the written argument's storage (resize_, set_)
  bool has_autocast[2] = {false, false};

  explicit OpRule(const c10::OperatorHandle& handle) : op(handle) {}
  bool writes_arg(std::uint32_t i) const {
    for (const std::uint32_t w : writes) if (w == i) return true;
    return false;
  }
};

/// The rule of `op`; stays valid for the process's life.
const OpRule& rule_of(const c10::OperatorHandle& op);

}  // namespace memfit::engine
