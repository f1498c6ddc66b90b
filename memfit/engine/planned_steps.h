// The plans of the training steps seen so far, and where the running step is in its plan.
// Not here: carrying instructions out (engine/plan_execution.cpp), choosing them (plan/).
// Threads: under the engine's lock. Cost: an array access an operand; a plan and its step stay as long as they are
// remembered.
//
// Note [How a step finds its plan]
//   At the first op of a step the sequence that came last is expected. Each op is compared by hash (name, dtypes,
//   shapes) before it runs. Where it differs, another plan whose step began in the same way takes over; without one the
//   step goes on without a plan. Operands are matched by position: the k-th input of op i in the recorded step is the
//   k-th input of op i now.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "memfit/engine/recorder.h"
#include "memfit/engine/value.h"
#include "memfit/plan/plan.h"
#include "memfit/trace/step.h"

namespace memfit::engine {

struct PlannedStep {
  std::uint32_t sequence = 0;  // SequenceDetector's number
  trace::Step step;
  plan::Plan plan;
  bool feasible = false;                     // otherwise no plan was found, and `plan` is empty
  std::uint64_t limit = 0;                   // that it was made for
  std::uint64_t slack = 0;                   // left free below it for what no plan knows of
  std::uint32_t runs = 0;                    // steps that followed it to the end
  std::uint32_t changes = 0;                 // how often it was made again
  std::vector<std::uint64_t> ticks;          // of each op, added up over the steps since it was recorded
  std::vector<std::uint64_t> program_ticks;  // of each of those steps, without replays and bookkeeping
  std::uint64_t last_used = 0;
};

class PlannedSteps {
 public:
  static constexpr std::uint32_t kNone = trace::kNone;
  static constexpr std::size_t kRemembered = 16;

  /// Op `position` of the running step is about to run. False: no plan goes on with it.
  bool arrive(std::uint32_t position, std::uint64_t hash, std::optional<std::uint32_t> expected);
  /// The op that arrived begins to run; its inputs have their bytes, and keep them until it has run.
  void began(const Recorder::Running& run);
  /// It has run. False: its operands are not those of the plan, which is left.
  bool passed(const Recorder::Running& run);
  /// The running step follows no plan (any more).
  void leave() { current_ = nullptr; }
  /// The running step is over. `next`: the plan that the next one will likely follow, if this step was one of its kind.
  void end_step(const PlannedStep* next = nullptr);
  /// Values that the next step's plan expects to be outside when it begins.
  std::vector<Value*> carried() const;

  PlannedStep* current() const { return current_; }
  /// Position of the op that arrived last.
  std::uint32_t arrived() const { return static_cast<std::uint32_t>(past_.size()) - 1; }
  /// The first op of which not all instructions have been carried out.
  std::uint32_t next() const { return next_; }
  void set_next(std::uint32_t op) { next_ = op; }
  /// The value that plays the part of `id` in the running step; nullptr when it has not come up yet or is gone.
  Value* value(trace::ValueId id) const {
    const std::uint32_t logged = id < logged_of_.size() ? logged_of_[id] : kNone;
    if (logged < values_.size()) return values_[logged];
    if (logged != kNone || carried_plan_ != current_) return nullptr;
    for (const auto& [source, value] : carried_) {
      if (source == id) return value;
    }
    return nullptr;
  }
  /// Of an output of an op that has run in the running step.
  caffe2::TypeMeta dtype(trace::ValueId id) const {
    const std::uint32_t logged = id < logged_of_.size() ? logged_of_[id] : kNone;
    return logged < dtypes_.size() ? dtypes_[logged] : caffe2::TypeMeta();
  }
  /// `value` is about to be deleted.
  void forget(Value* value) noexcept;

  PlannedStep* find(std::uint32_t sequence);
  PlannedStep& add(std::uint32_t sequence);
  void forget_plans();

 private:
  struct Past {
    std::uint64_t hash = 0;
    std::uint32_t first = 0, inputs = 0, outputs = 0;  // in operands_
  };
  bool matches(const PlannedStep& planned, std::uint32_t position, std::uint64_t hash) const;
  bool match_operands(const trace::Step& step, std::uint32_t position);
  void carry_over(const PlannedStep& next, std::vector<std::pair<trace::ValueId, Value*>>& carried);
  void tie(Value* value, std::uint32_t logged);

  std::vector<std::unique_ptr<PlannedStep>> plans_;
  PlannedStep* current_ = nullptr;
  std::uint32_t next_ = 0;
  bool lost_ = false;                       // no plan began like the running step
  std::uint64_t clock_ = 0;
  std::vector<Past> past_;                                  // ops of the running step
  std::vector<std::uint32_t> operands_;                     // their operands as logged: inputs, then outputs
  std::vector<Value*> values_;                              // by logged number
  std::vector<caffe2::TypeMeta> dtypes_;                    // likewise
  std::vector<std::pair<trace::ValueId, Value*>> carried_;  // sources that the step before has left outside
  const PlannedStep* carried_plan_ = nullptr;
  std::vector<std::uint32_t> logged_of_;  // by value of the current plan's step
};

}  // namespace memfit::engine
