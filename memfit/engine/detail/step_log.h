// What the recorder notes while the program runs, as flat arrays, and how a stretch of it becomes a trace::Step.
// Not here: who notes it (engine/recorder.h). Threads: one, or under a lock. Cost: 80 bytes an op, 48 a value, 4 an
// operand.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "memfit/memory/packing.h"
#include "memfit/trace/step.h"

namespace memfit::engine::detail {

struct StepLog {
  static constexpr std::uint32_t kNone = trace::kNone;

  enum OpFlag : std::uint8_t {
    kBackward = 1,  // while autograd runs
    kWritesParameter = 2,
    kUnseen = 4,  // no op of the dispatcher: memory that came, or was written, without one
  };
  struct Op {
    const char* name = "";             // lives as long as the process
    std::uint64_t hash = 0, kind = 0;  // as SequenceDetector takes them; 0 when unseen
    std::uint64_t began = 0;           // ticks
    std::uint64_t recorder = 0;        // ticks that recording had cost by then
    std::uint64_t ticks = 0;           // of the op alone
    std::uint64_t workspace = 0;
    std::uint64_t live = 0;                                                    // bytes before the op
    std::uint32_t inputs = 0, input_count = 0, outputs = 0, output_count = 0;  // in `operands`
    trace::Replay replay = trace::Replay::Yes;
    std::uint8_t flags = 0;
  };

  enum ValueFlag : std::uint8_t {
    kParameter = 1,
    kGradient = 2,
    kUpdated = 4,  // its storage was written without grad mode and outside backward
    kPinned = 8,
    kKept = 16,       // its content goes back to something that nothing here can make: a source, or unseen memory
    kFilled = 32,     // its op filled a storage whose old content it did not read, in the same bytes
    kUnread = 64,     // it outlived the stretch, but nothing read it afterwards
    kConstant = 128,  // of a storage that is no value: a few bytes that no op made
  };
  struct Value {
    std::uint64_t bytes = 0;
    std::uint32_t producer = kNone;  // kNone: there before the log began
    std::uint32_t death = kNone;
    std::uint32_t overwrites = kNone;
    std::uint32_t storage = 0;
    std::uint32_t shape = kNone;  // index in `shapes` of the number of dimensions, which follow
    std::uint8_t flags = 0;
    memory::PackForm::Kind pack = memory::PackForm::Kind::None;  // as a sample looked when its op had run
    std::uint64_t packed = 0;                                    // bytes it will likely need
  };

  std::vector<Op> ops;
  std::vector<Value> values;
  std::vector<std::uint32_t> operands;
  std::vector<std::int64_t> shapes;

  std::uint32_t size() const { return static_cast<std::uint32_t>(ops.size()); }
  std::span<const std::uint32_t> inputs(const Op& op) const { return {operands.data() + op.inputs, op.input_count}; }
  std::span<const std::uint32_t> outputs(const Op& op) const { return {operands.data() + op.outputs, op.output_count}; }
  void clear();

  /// The highest number of live bytes while ops begin .. end-1 ran.
  std::uint64_t peak(std::uint32_t begin, std::uint32_t end) const;
  /// Where each round of updates of parameters ends: the number of the op after its last.
  std::vector<std::uint32_t> update_ends() const;

  /// Ops begin .. end-1 as a step that took from the begin of its first op until `end_ticks`, when recording had cost
  /// `end_recorder` ticks.
  /// Requires: begin < end <= size().
  trace::Step cut(std::uint32_t begin, std::uint32_t end, std::uint64_t end_ticks, std::uint64_t end_recorder) const;
};

}  // namespace memfit::engine::detail
