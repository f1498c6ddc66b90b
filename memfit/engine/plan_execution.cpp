// Carrying out a plan: its instructions before and after each op, and plans for the steps that come again.
// Whatever a plan foresees and does not find is left to the online policy: a plan can cost time when it is wrong, never a bit.
#include <algorithm>
#include <stdexcept>

#include "memfit/engine/detail/pass.h"
#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/out_of_budget.h"
#include "memfit/plan/compute_plan.h"

namespace memfit::engine {

using plan::Action;
using plan::Instruction;

namespace {
// A step that departs from its plan's memory so often is left to the online policy.
constexpr std::uint32_t kMostChanges = 4;
// The search takes about 0.3 s at effort 1; it may take this share of the time that the step takes.
constexpr double kEffortPerSecond = 3.0;
constexpr double kLeastEffort = 0.05;
}  // namespace

// Planning begins with the first eviction: before that there is nothing to plan for.
void Engine::start_planning() {
  want_plan_ = false;
  if (forked_ || recording() || recording_to_file_) return;
  recorder_ = std::make_unique<Recorder>(allocator_);
}

void Engine::stop_planning() {
  planned_.forget_plans();
  want_plan_ = false;
  if (planning_ && recorder_ != nullptr) recorder_->stop();
}

void Engine::before_planned(const OpRule& rule, const torch::jit::Stack& stack) {
  if (want_plan_) start_planning();
  if (!planning_ || !recording()) return;
  const std::uint32_t position = recorder_->next_position();
  if (position == trace::kNone) return planned_.leave();
  if (!planned_.arrive(position, Recorder::hash_of(rule, stack), recorder_->expected())) return;
  const plan::Plan& plan = planned_.current()->plan;
  const std::uint32_t here = planned_.arrived();
  for (std::uint32_t i = planned_.next(); i < here; ++i) carry_out(plan.after(i));
  planned_.set_next(here);
  carry_out(plan.before(here));
}

void Engine::after_planned(const Recorder::Running& run) {
  if (planned_.passed(run)) {
    const trace::Step& step = planned_.current()->step;
    const plan::Plan& plan = planned_.current()->plan;
    const std::uint32_t here = run.position();
    carry_out(plan.after(here));
    planned_.set_next(here + 1);
    // What comes without an op gives no sign before it comes.
    for (std::uint32_t i = here + 1; i < step.ops.size() && step.ops[i].hash == 0; ++i) carry_out(plan.before(i));
  }
  if (const auto end = recorder_->take_step_end()) end_planned_step(*end, run.position());
}

/// One list of instructions. What it brings to life for itself is gone when it ends.
void Engine::carry_out(std::span<const Instruction> list) {
  if (list.empty()) return;
  const bool replays = std::any_of(list.begin(), list.end(), [](const Instruction& i) { return i.action == Action::Replay; });
  const std::uint64_t t0 = detail::ticks();
  const std::uint64_t evicting = detail::thread_engine_ticks();
  std::vector<Value*> made;
  const bool old = memory::set_allocating_for_replay(true);
  const char* op = replays ? memory::set_current_op("replay") : nullptr;
  ++attempts_;   // what does not fit is made room for by the online policy
  auto finish = [&] {
    --attempts_;
    memory::set_allocating_for_replay(old);
    if (replays) memory::set_current_op(op);
    for (Value* v : made) let_go(v);
    const std::uint64_t spent = detail::ticks() - t0;
    const std::uint64_t searched = detail::thread_engine_ticks() - evicting;
    const std::uint64_t own = spent - std::min(spent, searched);
    if (replays) stats_.recompute_ns += detail::ticks_to_ns(own);
    detail::thread_state.engine_ticks += own;
  };
  try {
    for (const Instruction& instruction : list) {
      if (planned_.current() == nullptr) break;
      if (instruction.action == Action::Drop) {
        drop_planned(planned_.value(instruction.target), made);
      } else if (instruction.action == Action::Replay) {
        replay_planned(instruction, made);
      }
    }
  } catch (const OutOfBudget&) {
    ++stats_.plan_misses;
    finish();
    return;
  } catch (...) {
    finish();
    throw;
  }
  finish();
}

/// A temporary of the running list, or one that is left over.
void Engine::let_go(Value* value) {
  --value->locks;
  --value->references;
  if (!value->bound && value->held && value->recipe != nullptr && value->locks == 0 && value->references == 0) drop_held(value);
  release_if_unused(value);
}

void Engine::drop_planned(Value* value, std::vector<Value*>& made) {
  if (value == nullptr) return;
  const auto temporary = std::find(made.begin(), made.end(), value);
  if (temporary != made.end()) {
    made.erase(temporary);
    let_go(value);
    return;
  }
  if (value->locks == 0 && evictable(value)) evict(value);
}

void Engine::replay_planned(const Instruction& instruction, std::vector<Value*>& made) {
  const trace::Step& step = planned_.current()->step;
  Recipe* recipe = nullptr;
  bool wanted = false;
  for (const trace::ValueId id : step.outputs(step.ops[instruction.target])) {
    const Value* value = planned_.value(id);
    if (value == nullptr || value->recipe == nullptr) continue;
    recipe = value->recipe;
    wanted = wanted || !value->resident;
  }
  if (recipe == nullptr || !wanted) return;
  std::vector<Value*> missing;
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    Value* input = recipe->tensors[i].value;
    if (input != nullptr && !input->resident) missing.push_back(input);
  }
  if (!missing.empty()) {   // not as foreseen
    ++stats_.plan_misses;
    restore(missing);
    if (!inputs_present(recipe)) return;
  }
  Pass pass;
  pass.kind = Pass::Kind::Planned;
  pass.preserve = instruction.preserve;
  const std::size_t before = made.size();
  pass.made = &made;
  try {
    replay(pass, recipe);
  } catch (...) {
    for (std::size_t i = before; i < made.size(); ++i) ++made[i]->locks;
    throw;
  }
  for (std::size_t i = before; i < made.size(); ++i) ++made[i]->locks;
}

void Engine::end_planned_step(const Recorder::StepEnd& end, std::uint32_t position) {
  const std::uint64_t now = detail::ticks();
  PlannedStep* followed = planned_.current();
  const bool whole = followed != nullptr && position + 1 == followed->step.ops.size();
  if (whole) {
    carry_out(followed->plan.before(position + 1));
    ++followed->runs;
    ++stats_.planned_steps;
  }
  if (step_began_ != 0) note_step_time(now - step_began_ - plan_ticks_);
  planned_.end_step();
  PlannedStep* planned = planned_.find(end.sequence);
  if (planned == nullptr) {
    if (end.whole && end.seen >= 2) make_plan(end.sequence, 0);
  } else if (end.whole && needs_change(*planned, whole && planned == followed)) {
    make_plan(end.sequence, planned->changes + 1);
  }
  online_bytes_ = 0;
  step_began_ = detail::ticks();
  plan_ticks_ = 0;
}

bool Engine::needs_change(const PlannedStep& planned, bool followed) const {
  const std::uint64_t limit = allocator_.limit();
  if (planned.changes >= kMostChanges) return false;
  if (planned.feasible) return planned.limit > limit || (followed && online_bytes_ != 0);
  return planned.limit < limit;
}

void Engine::make_plan(std::uint32_t sequence, std::uint32_t changes) {
  const std::uint64_t t0 = detail::ticks();
  auto recording = recorder_->recording();
  if (!recording || recording->kind != Recorder::Recording::Kind::Step || trace::find_fault(recording->step)) return;
  PlannedStep* planned = planned_.find(sequence);
  const bool fresh = planned == nullptr;
  if (fresh) planned = &planned_.add(sequence);
  planned->changes = changes;
  planned->limit = allocator_.limit();
  if (fresh) planned->slack = (std::uint64_t{32} << 10) + planned->limit / 1024;
  else if (planned->feasible) planned->slack = std::min(planned->slack + online_bytes_ + online_bytes_ / 8, planned->limit / 4);
  planned->step = std::move(recording->step);
  planned->feasible = false;
  plan::PlanOptions options;
  options.limit = Bytes(planned->limit - std::min(planned->slack, planned->limit));
  options.effort = std::clamp(planned->step.seconds.count() * kEffortPerSecond, kLeastEffort, 1.0);
  try {
    planned->plan = plan::compute_plan(planned->step, options);
    planned->feasible = true;
    stats_.predicted_peak = planned->plan.predicted_peak.count();
    stats_.predicted_step_ns = static_cast<std::uint64_t>(planned->plan.predicted_step.count() * 1e9);
    if (changes != 0) ++stats_.replanned;
  } catch (const plan::LimitTooLow&) {
    // The online policy keeps temporaries where a plan does not, and may get through.
  }
  plan_ticks_ += detail::ticks() - t0;
  stats_.plan_ns += detail::ticks_to_ns(detail::ticks() - t0);
}

/// The report has the median of the latest steps.
void Engine::note_step_time(std::uint64_t ticks) {
  constexpr std::size_t kLatest = 255;
  if (step_ticks_.size() == kLatest) step_ticks_.erase(step_ticks_.begin());
  step_ticks_.push_back(ticks);
  std::vector<std::uint64_t> sorted = step_ticks_;
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::nth_element(sorted.begin(), middle, sorted.end());
  stats_.step_ns = detail::ticks_to_ns(*middle);
}

}  // namespace memfit::engine
