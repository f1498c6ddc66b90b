// One recorded training step as plain data: its values, its ops, and what each cost.
// Not here: how a step is observed (engine/), how it is stored (mft.h), what to do about it (plan/).
// Threads: plain data. Cost: a Value is 56 bytes, an Op 56, every operand 4.
//
// Note [The model of a step]
// A step is the ops 0 .. n-1 in the order in which the program ran them.
//  * A *value* is one version of the content of one storage. It is made by its producer, or is a *source*: there
//    before op 0 (parameter, optimizer state, input). What appears in mid-step without an op that made it gets an op
//    of its own that is not replayable (Replay::ReadsForeignMemory) and no seconds.
//  * The program holds a value from its producer to `death`, the op after which the last handle went; kNone when the
//    value outlives the step. A value the program has dropped is a ghost: no bytes, but its op may be run again.
//  * An op that writes in place makes a new value that `overwrites` an older one of the same storage. The older value
//    is an input of that op, dies with it (death == that op), and hands its bytes over: while the op runs, and after, the storage
//    counts once. Run again, such an op eats its input in the same way, or needs a copy of it when it is needed later.
//  * Views are no values: an op that only makes a view has no outputs, and a use of a view is a use of its storage.
//  * `workspace` is what the op allocates and frees while it runs, outputs not counted.
//  * A value that survives the step is needed at its end, as if by an op n, unless `needed_after` is false (a logits
//    tensor that a variable of the program happens to hold until the next step, for example).
//  * Bytes that are there all the time and that no op touches are `fixed_bytes`.
// Bytes live while op i runs = fixed + held values + outputs that overwrite nothing + workspace.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::trace {

using Seconds = std::chrono::duration<double>;
using ValueId = std::uint32_t;
using OpId = std::uint32_t;
using NameId = std::uint32_t;
/// "No such thing": no producer, no death inside the step, no overwritten value, no name, no shape.
inline constexpr std::uint32_t kNone = 0xffffffffu;

enum class Category : std::uint8_t { Other, Parameter, Gradient, OptimizerState, Buffer, Input, Activation, Temporary };
inline constexpr std::uint8_t kCategoryCount = 8;

/// Whether an op may be run again, and if not, why.
enum class Replay : std::uint8_t {
  Yes,
  SideEffect,              // writes something besides its outputs, or waits for the device
  RandomWithoutGenerator,  // draws numbers from a generator that cannot be put back
  Nondeterministic,        // may give other bits the second time
  CustomOp,                // nobody knows what it does
  ReadsForeignMemory,      // reads bytes that change outside any op (numpy, files, other threads)
  WritesSource,            // overwrites a value that outlives the step or was there before it
  Communication,           // a collective: other processes take part
};
inline constexpr std::uint8_t kReplayCount = 8;

std::string_view category_name(Category category);
std::string_view replay_name(Replay replay);

struct Value {
  Bytes bytes;
  OpId producer = kNone;          // kNone: a source
  OpId death = kNone;             // kNone: outlives the step
  ValueId overwrites = kNone;     // the older value whose storage this one took over
  std::uint32_t storage = 0;      // equal for all versions of one storage
  std::uint32_t shape = kNone;    // index into Step::shapes
  Category category = Category::Other;
  bool needed_after = true;       // only read when death == kNone
  bool pinned = false;            // somebody outside may look at its bytes: never dropped, packed or moved
  bool packable = false;          // a sample says that it can be kept in packed_bytes, without loss
  Bytes packed_bytes;
  float pack_seconds = 0;
  float unpack_seconds = 0;

  bool operator==(const Value&) const = default;
};

/// A stretch of Step::operands.
struct OperandRange {
  std::uint32_t begin = 0;
  std::uint32_t count = 0;

  bool operator==(const OperandRange&) const = default;
};

struct Op {
  std::uint64_t hash = 0;  // of name and input shapes: what SequenceDetector is fed
  NameId name = kNone;
  NameId source_line = kNone;  // "train.py:12", where known
  OperandRange inputs;         // values read or overwritten, each once
  OperandRange outputs;        // values made
  Seconds seconds{0};
  Bytes workspace;
  Replay replay = Replay::Yes;

  bool operator==(const Op&) const = default;
};

struct Step {
  std::vector<Value> values;
  std::vector<Op> ops;
  std::vector<ValueId> operands;                  // pool that Op::inputs and Op::outputs point into
  std::vector<std::string> names;                 // op names and source lines, each once
  std::vector<std::vector<std::int64_t>> shapes;  // each once
  Bytes fixed_bytes;
  Seconds seconds{0};                 // the whole step by the clock, the program's own time included
  std::optional<std::uint64_t> batch;  // leading dimension of the input, where known

  std::span<const ValueId> inputs(const Op& op) const { return {operands.data() + op.inputs.begin, op.inputs.count}; }
  std::span<const ValueId> outputs(const Op& op) const { return {operands.data() + op.outputs.begin, op.outputs.count}; }
  std::string_view name(NameId id) const { return id == kNone ? std::string_view("?") : std::string_view(names[id]); }
  std::string_view op_name(OpId op) const { return name(ops[op].name); }
  bool is_source(ValueId v) const { return values[v].producer == kNone; }

  bool operator==(const Step&) const = default;
};

/// Puts a Step together one op at a time: interns names and shapes, keeps the operand pool.
/// Threads: one.  Cost: amortised constant per operand.
class StepBuilder {
 public:
  NameId intern(std::string_view name);
  std::uint32_t intern_shape(std::span<const std::int64_t> sizes);
  /// A value that is there before the first op. Storage ids are the caller's.
  ValueId add_source(Value value);
  /// Append an op that reads `inputs` and makes `outputs` (their `producer` is set here, their `death` may come later).
  /// An output with `overwrites` ends the life of the older value at this op.
  OpId add_op(Op op, std::span<const ValueId> inputs, std::span<const Value> outputs, ValueId* first_output = nullptr);
  /// The program dropped its last handle after the latest op (values dropped before op 0 are not part of the step).
  void drop(ValueId value);
  Value& value(ValueId id) { return step_.values[id]; }
  Step& step() { return step_; }
  OpId next_op() const { return static_cast<OpId>(step_.ops.size()); }
  Step take() { names_.clear(); shapes_.clear(); return std::move(step_); }

 private:
  Step step_;
  std::unordered_map<std::string, NameId> names_;
  std::unordered_map<std::string, std::uint32_t> shapes_;
};

/// The first broken rule of Note [The model of a step], in words, or nothing when the step keeps them all.
/// Everything in plan/ requires a step without fault.  Cost: one pass.
std::optional<std::string> find_fault(const Step& step);

/// Bytes live while each op runs when nothing is dropped (size n).
std::vector<Bytes> live_bytes(const Step& step);
/// The highest of them, or what is there before op 0 when that is more.
Bytes peak_bytes(const Step& step);

}  // namespace memfit::trace
