#include "memfit/plan/detail/schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace memfit::plan::detail {
namespace {

constexpr std::size_t kMany = 64;  // changes at once whose bytes are first noted as differences
constexpr std::int32_t kStays = std::numeric_limits<std::int32_t>::max();

void erase_one(std::vector<std::int32_t>& from, std::int32_t what) {
  auto at = std::find(from.begin(), from.end(), what);
  *at = from.back();
  from.pop_back();
}

bool due_in(const std::vector<Absence>& list, std::int32_t t) {
  for (const Absence& x : list)
    if (x.mode == Mode::Recompute && x.b == t) return true;
  return false;
}

/// What a pass at `t` sees of the value, as a number.
int seen_at(const std::vector<Absence>& list, std::int32_t t) {
  for (const Absence& x : list)
    if (x.a < t && t <= x.b) return static_cast<int>(x.mode) + 1 + 10 * (t >= x.lo) + 100 * (t == x.b);
  return 0;
}

}  // namespace

Schedule::Schedule(const Problem& problem, std::int64_t limit)
    : p_(problem), limit_(limit), profile_(problem.base), height_(problem.added), absences_(problem.m), passes_(problem.n + 1),
      readers_(problem.m), makers_(problem.m), op_seen_(problem.n, 0), value_seen_(problem.m, 0), value_wanted_(problem.m, 0),
      due_seen_(problem.m, 0), last_use_(problem.m, 0) {
  for (std::int32_t t = 0; t <= p_.n; ++t) profile_[t] += height_[t];
  set_limit(limit);
}

void Schedule::set_limit(std::int64_t limit) {
  limit_ = limit;
  violation_ = 0;
  for (std::int64_t bytes : profile_) violation_ += std::max<std::int64_t>(0, bytes - limit_);
}

std::int64_t Schedule::peak() const { return *std::max_element(profile_.begin(), profile_.end()); }

int Schedule::availability(std::int32_t value, std::int32_t stage) const {
  if (stage <= p_.birth[value] || stage > p_.death[value]) return 0;
  for (const Absence& x : absences_[value]) {
    if (x.a >= stage) break;
    if (x.mode == Mode::Recompute ? stage <= x.b : (stage >= x.lo && stage < x.b)) return x.mode == Mode::Pack ? 2 : 0;
  }
  return 1;
}

double Schedule::own_cost(std::int32_t value, const Absence& absence) const {
  if (absence.mode == Mode::Offload) return p_.offload_cost * static_cast<double>(p_.bytes[value]);
  return absence.mode == Mode::Pack ? static_cast<double>(p_.pack_cost[value]) + p_.unpack_cost[value] : 0.0;
}

Schedule::Deferral::Deferral(Schedule& schedule, std::size_t changes) : schedule_(schedule), outer_(schedule.deferring_) {
  if (outer_ || changes <= kMany) return;
  schedule_.deferring_ = true;
  schedule_.differences_.assign(static_cast<std::size_t>(schedule_.p_.n) + 2, 0);
}

Schedule::Deferral::~Deferral() {
  if (!outer_ && schedule_.deferring_) schedule_.settle();
}

void Schedule::settle() {
  deferring_ = false;
  std::int64_t difference = 0;
  violation_ = 0;
  for (std::int32_t t = 0; t <= p_.n; ++t) {
    difference += differences_[t];
    profile_[t] += difference;
    violation_ += std::max<std::int64_t>(0, profile_[t] - limit_);
  }
  work += p_.n / 4;
}

void Schedule::add_range(std::int32_t from, std::int32_t to, std::int64_t bytes) {
  if (from > to) return;
  if (deferring_) {
    differences_[from] += bytes;
    differences_[to + 1] -= bytes;
    ++work;
    return;
  }
  std::int64_t before = 0, after = 0;
  for (std::int32_t t = from; t <= to; ++t) {
    before += std::max<std::int64_t>(0, profile_[t] - limit_);
    profile_[t] += bytes;
    after += std::max<std::int64_t>(0, profile_[t] - limit_);
  }
  violation_ += after - before;
  work += (to - from) / 8 + 1;
}

void Schedule::set_height(std::int32_t stage, std::int64_t height) {
  add_range(stage, stage, height - height_[stage]);
  height_[stage] = height;
}

void Schedule::account(std::int32_t value, const Absence& x, std::int64_t sign) {
  const std::int32_t end = std::min(x.hi, p_.death[value]);
  add_range(x.lo, end, -sign * p_.bytes[value]);
  if (x.mode == Mode::Pack) add_range(std::max(0, x.a), std::min(x.b, p_.death[value]), sign * p_.packed[value]);
  cost_ += static_cast<double>(sign) * own_cost(value, x);
}

void Schedule::swap_absences(std::int32_t value, std::vector<Absence>& absences) {
  for (const Absence& x : absences_[value]) account(value, x, -1);
  absences_[value].swap(absences);
  for (const Absence& x : absences_[value]) account(value, x, +1);
}

/// The ops that bring back what is due at `stage`, given what is there. False: impossible.
bool Schedule::collect(std::int32_t stage, Pass& pass) {
  pass.ops.clear();
  pass.reads.clear();
  pass.makes.clear();
  unpacked_.clear();
  stack_.clear();
  ++epoch_;
  auto want = [&](std::int32_t value) {
    value_seen_[value] = value_wanted_[value] = epoch_;
    const std::int32_t op = p_.producer[value];
    if (op < 0 || !p_.replayable[op]) return false;
    if (op_seen_[op] != epoch_) {
      op_seen_[op] = epoch_;
      stack_.push_back(op);
    }
    return true;
  };
  for (std::int32_t v : pass.due)
    if (!want(v)) return false;
  pass.cost = 0;
  while (!stack_.empty()) {
    const std::int32_t op = stack_.back();
    stack_.pop_back();
    pass.ops.push_back(op);
    if (static_cast<std::int32_t>(pass.ops.size()) > max_pass_ops) return false;
    pass.cost += p_.cost[op];
    for (std::int32_t v : p_.inputs[op]) {
      ++work;
      if (value_seen_[v] == epoch_) continue;
      value_seen_[v] = epoch_;
      const int there = availability(v, stage);
      if (there == 0) {
        if (!want(v)) return false;
      } else {
        if (p_.movable[v]) pass.reads.push_back(v);
        if (there == 2) {
          unpacked_.push_back(v);
          value_wanted_[v] = epoch_;
          pass.cost += p_.unpack_cost[v];
        }
      }
    }
  }
  std::sort(pass.ops.begin(), pass.ops.end());
  ++due_epoch_;
  for (std::int32_t v : pass.due) due_seen_[v] = due_epoch_;
  for (std::int32_t op : pass.ops)  // by-products too: what is made anyway might as well stay
    for (std::int32_t v : p_.outputs[op])
      if (stage <= p_.death[v] && p_.movable[v] && due_seen_[v] != due_epoch_ && availability(v, stage) == 0) pass.makes.push_back(v);
  return true;
}

/// The most bytes the pass adds to what is there when it starts.
void Schedule::measure(Pass& pass) {
  const auto count = static_cast<std::int32_t>(pass.ops.size());
  for (std::int32_t k = 0; k < count; ++k) {
    for (std::int32_t v : p_.outputs[pass.ops[k]]) last_use_[v] = k;  // until something reads it
    for (std::int32_t v : p_.inputs[pass.ops[k]]) last_use_[v] = k;
  }
  for (std::int32_t v : pass.due) last_use_[v] = kStays;
  std::int64_t now = 0, most = 0;
  for (std::int32_t k = 0; k < count; ++k) {
    const std::int32_t op = pass.ops[k];
    std::int64_t fresh = 0;
    for (std::int32_t v : p_.outputs[op]) {
      const std::int32_t old = p_.overwrites[v];
      if (old < 0 || last_use_[old] > k) fresh += p_.bytes[v];
    }
    for (std::int32_t v : unpacked_)  // comes into being at its first use in this pass
      if (value_wanted_[v] == epoch_)
        for (std::int32_t in : p_.inputs[op])
          if (in == v) {
            now += p_.bytes[v];
            value_wanted_[v] = epoch_ - 1;  // done
            break;
          }
    most = std::max(most, now + fresh + p_.workspace[op]);
    now += fresh;
    for (std::int32_t v : p_.outputs[op]) {
      const std::int32_t old = p_.overwrites[v];
      if (value_wanted_[v] != epoch_ || last_use_[v] == k) now -= p_.bytes[v];
      if (old >= 0 && last_use_[old] == k) now += p_.bytes[old];  // its bytes went over, so do not count them as freed below
    }
    for (std::int32_t v : p_.inputs[op])
      if (last_use_[v] == k && value_seen_[v] == epoch_ && (value_wanted_[v] == epoch_ || value_wanted_[v] == epoch_ - 1)) {
        const bool temporary = value_wanted_[v] == epoch_ || std::find(unpacked_.begin(), unpacked_.end(), v) != unpacked_.end();
        if (temporary) now -= p_.bytes[v];
      }
    work += 4;
  }
  pass.extra = most;
}

bool Schedule::evaluate(std::int32_t stage, Pass& pass) {
  if (pass.due.empty()) {
    pass.ops.clear();
    pass.reads.clear();
    pass.makes.clear();
    pass.cost = 0;
    pass.extra = 0;
    return true;
  }
  epoch_ += 1;  // keeps epoch_ - 1 free for measure()
  if (!collect(stage, pass)) return false;
  measure(pass);
  return true;
}

void Schedule::install(std::int32_t stage, Pass&& pass, bool journal) {
  Pass& old = passes_[stage];
  for (std::int32_t v : old.reads) erase_one(readers_[v], stage);
  for (std::int32_t v : old.makes) erase_one(makers_[v], stage);
  for (std::int32_t v : pass.reads) readers_[v].push_back(stage);
  for (std::int32_t v : pass.makes) makers_[v].push_back(stage);
  cost_ += pass.cost - old.cost;
  std::int64_t due = p_.added[stage];
  for (std::int32_t v : pass.due) due += p_.bytes[v];
  set_height(stage, std::max(due, pass.extra));
  std::swap(old, pass);
  if (journal) journal_.push_back({true, stage, std::move(pass), {}});
}

/// affected_: the stages whose passes change when `value` gets these absences, sorted.
void Schedule::find_affected(std::int32_t value, const std::vector<Absence>& fresh) {
  affected_.clear();
  auto ends = [&](const std::vector<Absence>& list) {
    for (const Absence& x : list)
      if (x.mode == Mode::Recompute && x.b <= p_.n) affected_.push_back(x.b);
  };
  for (std::int32_t t : readers_[value]) affected_.push_back(t);
  for (std::int32_t t : makers_[value]) affected_.push_back(t);
  ends(absences_[value]);
  ends(fresh);
  std::sort(affected_.begin(), affected_.end());
  affected_.erase(std::unique(affected_.begin(), affected_.end()), affected_.end());
  const std::vector<Absence>& old = absences_[value];
  std::erase_if(affected_, [&](std::int32_t t) {
    return due_in(fresh, t) == due_in(old, t) && seen_at(fresh, t) == seen_at(old, t);
  });
}

bool Schedule::assign(std::int32_t value, std::vector<Absence> absences) {
  if (absences == absences_[value]) return true;
  Change one(value, std::move(absences));
  return apply({&one, 1});
}

bool Schedule::apply(std::span<Change> changes) {
  const std::size_t start = mark();
  const Deferral deferral(*this, changes.size());
  dues_.clear();
  stages_.clear();
  for (auto& [value, absences] : changes) {
    if (absences == absences_[value]) continue;
    find_affected(value, absences);
    for (std::int32_t t : affected_) {
      const bool before = due_in(absences_[value], t), after = due_in(absences, t);
      if (before != after) dues_.push_back({t, value, after});
    }
    stages_.insert(stages_.end(), affected_.begin(), affected_.end());
    swap_absences(value, absences);
    journal_.push_back({false, value, {}, std::move(absences)});
  }
  std::sort(stages_.begin(), stages_.end());
  stages_.erase(std::unique(stages_.begin(), stages_.end()), stages_.end());
  if (dues_.size() > 1) std::stable_sort(dues_.begin(), dues_.end(), [](const Due& a, const Due& b) { return a.stage < b.stage; });
  auto due = dues_.begin();
  for (const std::int32_t t : stages_) {
    Pass pass;
    pass.due = passes_[t].due;
    for (; due != dues_.end() && due->stage == t; ++due) {
      if (due->comes) pass.due.push_back(due->value);
      else erase_one(pass.due, due->value);
    }
    if (!evaluate(t, pass)) {
      rollback(start);
      return false;
    }
    install(t, std::move(pass), true);
  }
  return true;
}

void Schedule::rollback(std::size_t mark) {
  const Deferral deferral(*this, journal_.size() - std::min(mark, journal_.size()));
  while (journal_.size() > mark) {
    Undo undo = std::move(journal_.back());
    journal_.pop_back();
    if (undo.is_pass)
      install(undo.index, std::move(undo.pass), false);
    else
      swap_absences(undo.index, undo.absences);
  }
}

bool Schedule::check_invariants() const {
  Schedule fresh(p_, limit_);
  for (std::int32_t v = 0; v < p_.m; ++v)
    if (!absences_[v].empty() && !fresh.absences_[v].empty()) return false;
  // All absences first, then every pass: the order of changes must not matter.
  for (std::int32_t v = 0; v < p_.m; ++v) {
    auto copy = absences_[v];
    fresh.swap_absences(v, copy);
  }
  for (std::int32_t t = 0; t <= p_.n; ++t) {
    Pass pass;
    for (std::int32_t v = 0; v < p_.m; ++v)
      for (const Absence& x : absences_[v])
        if (x.mode == Mode::Recompute && x.b == t) pass.due.push_back(v);
    if (!fresh.evaluate(t, pass)) return false;
    if (pass.ops != passes_[t].ops) return false;
    fresh.install(t, std::move(pass), false);
  }
  return fresh.profile_ == profile_ && fresh.violation_ == violation_ && std::abs(fresh.cost_ - cost_) < 1e-6 * (1 + cost_);
}

}  // namespace memfit::plan::detail
