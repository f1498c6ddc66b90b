// Carrying out a plan: its instructions before and after each op, and plans for the steps that come again.
// Whatever a plan foresees and does not find is left to the online policy: a plan can cost time when it is wrong, never
// a bit.
#include <algorithm>
#include <cstdio>
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
constexpr std::int64_t kMostWork = 100'000'000, kMostWorkPerOp = 5'000;   // about a second; what is not found by then is left to the online policy
constexpr double kOffloadEffort = 0.2;  // there is much more to try
// Left free for what no plan knows of: bookkeeping in tensors, small values.
constexpr std::uint64_t kLeastSlack = 32 << 10;
// Steps that are timed before a plan is made anew with their times.
constexpr std::size_t kTimedSteps = 5;
constexpr std::uint64_t kMostUnplannedOps = 200'000;
}  // namespace

// Planning begins with the first eviction: before that there is nothing to plan for.
void Engine::start_planning() {
  want_plan_ = false;
  if (forked_ || recording() || recording_to_file_) return;
  recorder_ = std::make_unique<Recorder>(allocator_);
  unplanned_ops_ = 0;
}

void Engine::stop_planning() {
  planned_.forget_plans();
  want_plan_ = false;
  if (planning_ && recorder_ != nullptr) recorder_->stop();
}

void Engine::before_planned(const OpRule& rule, const torch::jit::Stack& stack) {
  if (want_plan_) start_planning();
  if (planned_.current() == nullptr && !moving_.empty()) finish_moves();
  if (!planning_ || !recording()) return;
  // Recording is not free: where steps do not come again it ends.
  if (++unplanned_ops_ > kMostUnplannedOps) {
    planning_ = false;
    planned_.forget_plans();
    recorder_->stop();
    return;
  }
  const std::uint32_t position = recorder_->next_position();
  if (position == trace::kNone) return planned_.leave();
  if (!planned_.arrive(position, Recorder::hash_of(rule, stack), recorder_->expected())) return;
  const plan::Plan& plan = planned_.current()->plan;
  const std::uint32_t here = planned_.arrived();
  for (std::uint32_t i = planned_.next(); i < here; ++i) carry_out(plan.after(i));
  planned_.set_next(here);
  carry_out(plan.before(here));
}

void Engine::begin_recorded(std::optional<Recorder::Running>& running, const OpRule& rule, c10::DispatchKeySet keys,
                            const torch::jit::Stack& stack) {
  const Turn turn(*this);
  running.emplace(*recorder_, rule, keys, stack, true);
  if (planning_) planned_.began(*running);
}

void Engine::after_planned(const Recorder::Running& run) {
  if (planned_.passed(run)) {
    const trace::Step& step = planned_.current()->step;
    const plan::Plan& plan = planned_.current()->plan;
    const std::uint32_t here = run.position();
    carry_out(plan.after(here));
    planned_.set_next(here + 1);
    unplanned_ops_ = 0;
    // What comes without an op gives no sign before it comes.
    for (std::uint32_t i = here + 1; i < step.ops.size() && step.ops[i].hash == 0; ++i) carry_out(plan.before(i));
  }
  if (const auto end = recorder_->take_step_end()) end_planned_step(*end, run.position());
}

/// One list of instructions. What it brings to life for itself is gone when it ends.
void Engine::carry_out(std::span<const Instruction> list) {
  if (list.empty()) return;
  const bool replays =
      std::any_of(list.begin(), list.end(), [](const Instruction& i) { return i.action != Action::Drop; });
  const std::uint64_t t0 = detail::ticks();
  const std::uint64_t evicting = detail::thread_engine_ticks();
  std::vector<Value*> made;
  const bool old = memory::set_allocating_for_replay(true);
  const char* op = replays ? memory::set_current_op("replay") : nullptr;
  ++attempts_;  // what does not fit is made room for by the online policy
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
      } else if (instruction.action == Action::Pack) {
        pack_planned(instruction.target);
      } else if (instruction.action == Action::Unpack) {
        Value* value = planned_.value(instruction.target);
        if (value == nullptr) continue;
        if (value->bound && !value->resident) restore(value);
        if (!instruction.preserve) drop_spare(value);
      } else {
        move_planned(instruction);
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
  if (!value->bound && value->held && value->recipe != nullptr && value->locks == 0 && value->references == 0)
    drop_held(value);
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
  if (value->locks == 0 && (value->recipe != nullptr || value->spare) && evictable(value)) evict(value);
}

void Engine::move_planned(const Instruction& instruction) {
  Value* value = planned_.value(instruction.target);
  if (value == nullptr || !offload_) return;
  switch (instruction.action) {
    case Action::StartOffload:
      if (value->resident && value->bound && value->block != nullptr && !value->escaped && value->locks == 0 &&
          !start_leaving(value))
        ++stats_.plan_misses;
      break;
    case Action::FinishOffload:
      if (value->spare && value->spare->leaving && finish_leaving(value) && value->locks == 0 && evictable(value))
        evict(value);
      break;
    case Action::StartFetch:
      if (value->bound && !value->resident) start_arriving(value);
      break;
    case Action::FinishFetch:
      if (value->bound && !value->resident) restore(value);
      break;
    case Action::DropCopy:
      if (value->resident) drop_spare(value);
      break;
    default:
      break;
  }
}

void Engine::pack_planned(trace::ValueId id) {
  Value* value = planned_.value(id);
  if (value == nullptr || !value->resident || !value->bound || value->block == nullptr || value->escaped ||
      value->locks != 0)
    return;
  const trace::Value& planned = planned_.current()->step.values[id];
  if (pack(value, planned_.dtype(id), planned.packed_bytes.count())) evict(value);
  else ++stats_.plan_misses;
}

struct Engine::Unlock {
  ~Unlock() {
    for (Value* v : values) --v->locks;
    for (Value* v : values) engine.release_if_unused(v);
  }
  Engine& engine;
  const std::vector<Value*>& values;
};

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
  // Locked: what the op takes for its results must not push them out.
  std::vector<Value*> inputs, missing;
  for (std::uint32_t i = 0; i < recipe->tensor_count; ++i) {
    Value* input = recipe->tensors[i].value;
    if (input == nullptr) continue;
    inputs.push_back(input);
    ++input->locks;
    if (!input->resident) missing.push_back(input);
  }
  const Unlock unlock{*this, inputs};
  if (!missing.empty()) {  // not as foreseen
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
  PlannedStep* followed = planned_.current();
  const bool whole = followed != nullptr && position + 1 == followed->step.ops.size();
  if (whole) {
    carry_out(followed->plan.before(position + 1));
    ++followed->runs;
    ++stats_.planned_steps;
  }
  if (step_began_ != 0) {
    const std::uint64_t took = detail::ticks() - step_began_;
    note_step_time(took);
    if (whole && end.whole) note_op_times(*followed, took - std::min(took, recorder_->overhead() - step_overhead_));
  }
  finish_moves();
  planned_.leave();
  PlannedStep* planned = planned_.find(end.sequence);
  if (planned == nullptr) {
    if (end.whole && end.seen >= 2) make_plan(end.sequence);
  } else if (whole && planned == followed && online_bytes_ == 0) {
    if (planned->program_ticks.size() == kTimedSteps) refine(*planned);
  } else if (end.whole && needs_change(*planned, whole && planned == followed)) {
    change_plan(*planned);
  }
  planned_.end_step(planned_.find(end.sequence));
  leave_outside(planned_.carried());
  online_bytes_ = 0;
  step_began_ = detail::ticks();
  step_overhead_ = recorder_->overhead();
}

/// What the plan of the next step expects outside, and the step before has not left there.
void Engine::leave_outside(const std::vector<Value*>& values) {
  if (!offload_) return;
  const auto may_go = [this](const Value* v) {
    return v->resident && v->bound && v->block != nullptr && v->locks == 0 && evictable(v);
  };
  std::vector<Value*> going;
  for (Value* v : values) {
    if (may_go(v) && start_leaving(v) && v->spare->leaving) going.push_back(v);
  }
  for (Value* v : going) finish_leaving(v);
  for (Value* v : values) {
    if (may_go(v) && v->spare) evict(v);
  }
}

/// One step's times may be anything; several make better ones, and those of a step that runs by plan are what counts.
void Engine::note_op_times(PlannedStep& planned, std::uint64_t program_ticks) {
  if (planned.program_ticks.size() >= kTimedSteps) return;
  planned.ticks.resize(planned.step.ops.size(), 0);
  recorder_->add_op_ticks(planned.ticks);
  planned.program_ticks.push_back(program_ticks);
}

/// With measured times: predicts again, and plans again if that is better.
void Engine::refine(PlannedStep& planned) {
  const double steps = static_cast<double>(planned.program_ticks.size());
  for (std::size_t i = 0; i < planned.ticks.size(); ++i) {
    planned.step.ops[i].seconds =
        trace::Seconds(static_cast<double>(detail::ticks_to_ns(planned.ticks[i])) * 1e-9 / steps);
  }
  std::sort(planned.program_ticks.begin(), planned.program_ticks.end());
  planned.step.seconds =
      trace::Seconds(static_cast<double>(detail::ticks_to_ns(planned.program_ticks[kTimedSteps / 2])) * 1e-9);
  planned.program_ticks.push_back(0);  // once
  const plan::Simulation now =
      plan::simulate(planned.step, planned.plan, offload_ ? offload_->traffic() : plan::Traffic{});
  planned.plan.predicted_step = now.step;
  planned.plan.recompute = now.recompute;
  planned.plan.packing = now.packing;
  planned.plan.exposed = now.exposed;
  const plan::Plan old = planned.plan;
  if (!search_plan(planned) || planned.plan.predicted_step >= old.predicted_step) {
    planned.plan = old;
    planned.feasible = true;
  }
  note_prediction(planned);
}

bool Engine::needs_change(const PlannedStep& planned, bool followed) const {
  const std::uint64_t limit = allocator_.limit();
  if (planned.changes >= kMostChanges) return false;
  if (!planned.feasible) return planned.limit < limit;
  // Its first step began with everything in memory.
  const bool settled = planned.plan.starts_offloaded.empty() || planned.runs > 1;
  return planned.limit > limit || (followed && settled && online_bytes_ != 0);
}

void Engine::make_plan(std::uint32_t sequence) {
  auto recording = recorder_->recording();
  if (!recording || recording->kind != Recorder::Recording::Kind::Step || trace::find_fault(recording->step)) return;
  PlannedStep& planned = planned_.add(sequence);
  planned.slack = kLeastSlack + allocator_.limit() / 1024;
  planned.step = std::move(recording->step);
  if (search_plan(planned)) note_prediction(planned);
}

/// What happened did not fit the plan, or the limit is another.
void Engine::change_plan(PlannedStep& planned) {
  ++planned.changes;
  if (planned.feasible)
    planned.slack = std::min(planned.slack + online_bytes_ + online_bytes_ / 8, allocator_.limit() / 4);
  auto recording = recorder_->recording();
  if (recording && recording->kind == Recorder::Recording::Kind::Step && !trace::find_fault(recording->step)) {
    planned.step = std::move(recording->step);
  }
  planned.ticks.clear();
  planned.program_ticks.clear();
  if (!search_plan(planned)) return;
  ++stats_.replanned;
  note_prediction(planned);
}

/// False: there is none, and the step is left to the online policy.
bool Engine::search_plan(PlannedStep& planned) {
  const std::uint64_t t0 = detail::ticks();
  planned.limit = allocator_.limit();
  plan::PlanOptions options;
  options.limit = Bytes(planned.limit - std::min(planned.slack, planned.limit));
  options.effort = std::clamp(planned.step.seconds.count() * kEffortPerSecond, kLeastEffort, 1.0);
  options.most_work = kMostWork + kMostWorkPerOp * static_cast<std::int64_t>(planned.step.ops.size());
  if (offload_ && !offload_full_) {
    options.offload = plan::OffloadTarget{offload_->limit(), offload_->traffic()};
    options.effort = std::min(options.effort, kOffloadEffort);
  }
  planned.feasible = false;
  try {
    if (auto plan = plan::find_plan(planned.step, options)) {
      planned.plan = std::move(*plan);
      planned.feasible = true;
    }
  } catch (const std::logic_error& error) {  // the planner's own checks: no reason to end the program
    std::fprintf(stderr, "memfit: no plan is made (%s). Please report this.\n", error.what());
  }
  const std::uint64_t spent = detail::ticks() - t0;
  detail::thread_state.engine_ticks += spent;
  stats_.plan_ns += detail::ticks_to_ns(spent);
  return planned.feasible;
}

void Engine::note_prediction(const PlannedStep& planned) {
  stats_.predicted_peak = planned.plan.predicted_peak.count();
  stats_.predicted_step_ns = static_cast<std::uint64_t>(planned.plan.predicted_step.count() * 1e9);
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
