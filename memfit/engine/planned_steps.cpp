#include "memfit/engine/planned_steps.h"

#include <algorithm>
#include <unordered_map>

namespace memfit::engine {

bool PlannedSteps::matches(const PlannedStep& planned, std::uint32_t position, std::uint64_t hash) const {
  if (!planned.feasible || position >= planned.step.ops.size() || planned.step.ops[position].hash != hash) return false;
  for (std::uint32_t i = position; i-- > 0;) {
    if (planned.step.ops[i].hash != past_[i].hash) return false;
  }
  return true;
}

bool PlannedSteps::arrive(std::uint32_t position, std::uint64_t hash, std::optional<std::uint32_t> expected) {
  if (position == 0) {
    lost_ = false;
    if (!past_.empty()) end_step();
    if (expected) current_ = find(*expected);
  }
  if (position < past_.size()) {  // another thread's op is in between
    leave();
    return false;
  }
  past_.resize(position);  // what came without an op has no operands of its own here, and hash 0
  if (current_ != nullptr && current_->feasible) {
    const auto& ops = current_->step.ops;
    bool same = true;
    for (std::uint32_t i = std::min(next_, position); i < position; ++i)
      same = same && i < ops.size() && ops[i].hash == past_[i].hash;
    // What the op's own begin will note (a raw pointer into its arguments) comes before it.
    std::uint32_t here = position;
    while (here < ops.size() && ops[here].hash == 0) ++here;
    if (same && here < ops.size() && ops[here].hash == hash) {
      past_.resize(here);
      past_.push_back({hash, static_cast<std::uint32_t>(operands_.size()), 0, 0});
      return true;
    }
  }
  current_ = nullptr;
  if (!lost_) {
    for (const auto& planned : plans_) {
      if (!matches(*planned, position, hash)) continue;
      current_ = planned.get();
      logged_of_.assign(current_->step.values.size(), kNone);
      bool tied = true;
      for (std::uint32_t i = 0; i < position && tied; ++i) tied = match_operands(current_->step, i);
      if (tied) break;
      current_ = nullptr;
    }
  }
  past_.push_back({hash, static_cast<std::uint32_t>(operands_.size()), 0, 0});
  lost_ = current_ == nullptr;
  if (lost_) return false;
  next_ = position;
  return true;
}

/// Says which logged values play the parts of op `position`'s operands. False: they cannot.
bool PlannedSteps::match_operands(const trace::Step& step, std::uint32_t position) {
  const trace::Op& op = step.ops[position];
  const Past& past = past_[position];
  if (op.hash == 0) return true;
  if (op.inputs.count != past.inputs || op.outputs.count != past.outputs) return false;
  const std::uint32_t* logged = operands_.data() + past.first;
  if (logged_of_.size() != step.values.size()) logged_of_.assign(step.values.size(), kNone);
  for (const auto list : {step.inputs(op), step.outputs(op)}) {
    for (const trace::ValueId id : list) {
      std::uint32_t& known = logged_of_[id];
      if (known != kNone && known != *logged) return false;
      known = *logged++;
    }
  }
  return true;
}

void PlannedSteps::tie(Value* value, std::uint32_t logged) {
  if (values_.size() <= logged) values_.resize(logged + 1, nullptr);
  if (values_[logged] == value) return;
  if (values_[logged] != nullptr) values_[logged]->logged = kNone;
  forget(value);
  values_[logged] = value;
  value->logged = logged;
}

void PlannedSteps::forget(Value* value) noexcept {
  if (value->carried) {
    std::erase_if(carried_, [&](const auto& c) { return c.second == value; });
    value->carried = false;
  }
  if (value->logged == kNone) return;
  values_[value->logged] = nullptr;
  value->logged = kNone;
}

void PlannedSteps::began(const Recorder::Running& run) {
  if (past_.empty() || run.position() == kNone || run.position() + 1 < past_.size()) return leave();
  if (run.position() + 1 != past_.size()) {  // notes before it that no plan foresaw
    leave();
    const Past op = past_.back();
    past_.back() = Past{};
    past_.resize(run.position());
    past_.push_back(op);
  }
  past_.back().first = static_cast<std::uint32_t>(operands_.size());
  past_.back().inputs = static_cast<std::uint32_t>(run.inputs().size());
  for (const auto& operand : run.inputs()) {
    operands_.push_back(operand.logged);
    if (operand.block->value != nullptr) tie(static_cast<Value*>(operand.block->value), operand.logged);
  }
}

bool PlannedSteps::passed(const Recorder::Running& run) {
  Past* const past = past_.empty() ? nullptr : &past_.back();
  // Another thread's op has come in between: whose operands these are is not to be told.
  if (past == nullptr || run.position() + 1 != past_.size() || past->first + past->inputs != operands_.size()) {
    leave();
    return false;
  }
  past->outputs = static_cast<std::uint32_t>(run.outputs().size());
  for (const auto& operand : run.outputs()) {
    operands_.push_back(operand.logged);
    if (dtypes_.size() <= operand.logged) dtypes_.resize(operand.logged + 1);
    dtypes_[operand.logged] = operand.dtype;
    if (operand.block->value != nullptr) tie(static_cast<Value*>(operand.block->value), operand.logged);
  }
  if (current_ == nullptr) return false;
  const trace::Step& step = current_->step;
  const trace::Op& op = step.ops[run.position()];
  bool same = match_operands(step, run.position());
  for (std::size_t k = 0; same && k < run.outputs().size(); ++k) {
    same = step.values[step.outputs(op)[k]].bytes.count() == run.outputs()[k].block->requested;
  }
  if (!same) leave();
  return same;
}

/// Which values the sources of the next step will be: what their storages hold now.
void PlannedSteps::carry_over(const PlannedStep& next, std::vector<std::pair<trace::ValueId, Value*>>& carried) {
  const trace::Step& step = next.step;
  if (next.plan.starts_offloaded.empty() || past_.size() != step.ops.size()) return;
  logged_of_.assign(step.values.size(), kNone);
  for (std::uint32_t i = 0; i < step.ops.size(); ++i) {
    if (step.ops[i].hash != past_[i].hash || !match_operands(step, i)) return;
  }
  std::unordered_map<std::uint32_t, trace::ValueId> last;  // by storage
  for (trace::ValueId v = 0; v < step.values.size(); ++v) {
    if (step.values[v].death == kNone) last[step.values[v].storage] = v;
  }
  for (const trace::ValueId id : next.plan.starts_offloaded) {
    const auto at = last.find(step.values[id].storage);
    if (at == last.end()) continue;
    const std::uint32_t logged = logged_of_[at->second];
    if (logged < values_.size() && values_[logged] != nullptr) carried.emplace_back(id, values_[logged]);
  }
}

std::vector<Value*> PlannedSteps::carried() const {
  std::vector<Value*> out;
  for (const auto& [id, value] : carried_) out.push_back(value);
  return out;
}

void PlannedSteps::end_step(const PlannedStep* next) {
  for (const auto& carried : carried_) carried.second->carried = false;
  std::vector<std::pair<trace::ValueId, Value*>> carried;
  if (next != nullptr && next->feasible) carry_over(*next, carried);
  carried_plan_ = next;
  carried_ = std::move(carried);
  for (const auto& kept : carried_) kept.second->carried = true;
  values_.clear();
  dtypes_.clear();
  past_.clear();
  operands_.clear();
  logged_of_.clear();
  current_ = nullptr;
  next_ = 0;
}

PlannedStep* PlannedSteps::find(std::uint32_t sequence) {
  for (const auto& planned : plans_) {
    if (planned->sequence != sequence) continue;
    planned->last_used = ++clock_;
    return planned.get();
  }
  return nullptr;
}

PlannedStep& PlannedSteps::add(std::uint32_t sequence) {
  if (plans_.size() == kRemembered) {
    const auto oldest = std::min_element(plans_.begin(), plans_.end(),
                                         [](const auto& a, const auto& b) { return a->last_used < b->last_used; });
    if (oldest->get() == current_) leave();
    plans_.erase(oldest);
  }
  plans_.push_back(std::make_unique<PlannedStep>());
  plans_.back()->sequence = sequence;
  plans_.back()->last_used = ++clock_;
  return *plans_.back();
}

void PlannedSteps::forget_plans() {
  end_step();
  plans_.clear();
}

}  // namespace memfit::engine
