// Every tensor allocation of a run, as plain data: how many bytes, when they came and went, who made them, and what they turned out to be for.
// Not here: how it is observed (engine/event_recorder.h), how it is stored (mft.h, memory_trace_coding.h), what to say of it (analysis/).
// Threads: plain data. Cost: an event is 16 bytes, a storage 48; call sites, stacks and names are there once each.
//
// Note [What a storage is for]
// While a program runs nobody knows yet what a tensor is for; what is known is what happened to it. Those facts are its roles, whole at the
// moment when its bytes go (or at the end of the trace). category_of() makes one category of them, which holds for the whole life of the
// storage. First that fits:
//   parameters       a leaf that requires a gradient was seen in it
//   gradients        some parameter's .grad was seen in it
//   optimizer state  written in an update of parameters, or read by an op that writes one, and alive after the update
//   buffers          written by the model besides its results (running statistics), or registered, and no parameter
//   inputs           not computed from parameters, and used together with them
//   activations      made in forward, read in backward
//   temporaries      made by an op and none of the above
//   other            made outside of all ops and none of the above
// Views are no storages: a view counts by what it looks into, once; tied weights are one storage.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/trace/step.h"

namespace memfit::trace {

/// What the thread that took the bytes was doing.
enum class Phase : std::uint8_t { Other, Forward, Backward, Optimizer, Evaluation };
inline constexpr std::uint8_t kPhaseCount = 5;
std::string_view phase_name(Phase phase);  // "other", "forward", ...

/// Facts about a storage, any number of them.
enum Role : std::uint32_t {
  kRoleParameter = 1 << 0,            // holds a leaf that requires a gradient
  kRoleGradient = 1 << 1,             // was the .grad of a parameter
  kRoleOptimizerState = 1 << 2,       // see Note [What a storage is for]
  kRoleBuffer = 1 << 3,
  kRoleInput = 1 << 4,
  kRoleReadInBackward = 1 << 5,       // read in backward, and made outside of it
  kRoleMadeOutsideOps = 1 << 6,       // by the program (torch.empty, from_numpy, a loader's thread), not as an op's result
  kRoleDerived = 1 << 7,              // computed from parameters
  kRoleGraph = 1 << 8,                // its op was recorded by autograd: it has a grad_fn
  kRoleReadInLaterStep = 1 << 9,      // by an op, in a later step than the one it was made in
  kRoleReadInLaterBackward = 1 << 10,  // by backward, in a later step than the one it was made in
  kRoleBufferHistory = 1 << 11,       // a registered buffer that has a grad_fn
  kRoleWritten = 1 << 12,             // written in place after it was made
  kRoleEvaluation = 1 << 13,          // made in an evaluation
};
inline constexpr std::uint32_t kAllRoles = (1u << 14) - 1;

/// One line of a program.
struct Frame {
  NameId file = kNone;
  NameId function = kNone;
  std::uint32_t line = 0;  // 0: not known

  bool operator==(const Frame&) const = default;
};

/// Frames from the innermost outwards, as a tree: `parent` is the stack of the caller.
struct CallStack {
  std::uint32_t parent = kNone;  // index into MemoryTrace::stacks, below this one's
  std::uint32_t frame = 0;       // index into MemoryTrace::frames

  bool operator==(const CallStack&) const = default;
};

/// Who asks for memory: each combination once.
struct CallSite {
  NameId op = kNone;            // "aten::mm"; kNone outside of ops
  NameId module = kNone;        // "encoder.layers.3.linear1"; kNone where not known
  std::uint32_t stack = kNone;  // index into MemoryTrace::stacks; kNone where no frames are recorded

  bool operator==(const CallSite&) const = default;
};

/// One allocation, from the moment its bytes are taken until they are given back.
struct Storage {
  Bytes bytes;
  Bytes visible;               // what the largest view shows that is alive when only views are; equal to `bytes` otherwise
  std::uint32_t site = 0;      // index into MemoryTrace::sites
  NameId owner = kNone;        // name of the parameter or buffer that it is, or whose gradient or state it is, where known
  std::uint32_t step = 0;      // number of steps that had ended when it was made
  std::uint32_t roles = 0;
  Phase phase = Phase::Other;  // when it was made

  bool operator==(const Storage&) const = default;
};

struct MemoryEvent {
  enum class Kind : std::uint8_t {
    Taken,    // of `subject`, a storage
    Given,    // of `subject`, a storage
    Phase,    // `phase` begins; `subject` is 0
    StepEnd,  // step number `subject`, counted from 0, is over: its update of parameters is done
  };
  std::uint64_t nanoseconds = 0;  // since the trace began; never goes back
  std::uint32_t subject = 0;
  Kind kind = Kind::Taken;
  Phase phase = Phase::Other;  // of kind Phase, the one that begins

  bool operator==(const MemoryEvent&) const = default;
};
inline constexpr std::uint8_t kEventKindCount = 4;

struct MemoryTrace {
  std::vector<std::string> names;
  std::vector<Frame> frames;
  std::vector<CallStack> stacks;
  std::vector<CallSite> sites;
  std::vector<Storage> storages;    // in the order in which they were taken
  std::vector<MemoryEvent> events;  // in the order in which they happened
  std::uint32_t steps = 0;          // that ended

  bool empty() const { return events.empty(); }
  std::string_view name(NameId id) const { return id == kNone ? std::string_view() : std::string_view(names[id]); }

  bool operator==(const MemoryTrace&) const = default;
};

/// Category of a storage. See Note [What a storage is for].
Category category_of(const Storage& storage);

/// The lines of a stack from the innermost outwards, as "train.py:12 (train_step)", at most `most` of them, joined by " < ".
/// "" for kNone.
std::string stack_text(const MemoryTrace& trace, std::uint32_t stack, std::size_t most);
/// The innermost line that is the program's own: outside of installed packages and of the interpreter, where there is one, as "train.py:12".
/// "" for a site without frames.
std::string where(const MemoryTrace& trace, std::uint32_t site);

}  // namespace memfit::trace
