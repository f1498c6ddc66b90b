#include "memfit/plan/detail/emit.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

namespace memfit::plan::detail {
namespace {

class Emitter {
 public:
  Emitter(const Problem& p, const Schedule& s) : p_(p), s_(s), lists_(2 * (static_cast<std::size_t>(p.n) + 1)) {}

  Plan run() {
    for (std::int32_t v = 0; v < p_.m; ++v) departures(v);
    // What frees bytes goes before what takes some.
    for (auto& list : lists_)
      std::stable_sort(list.begin(), list.end(), [](const Instruction& x, const Instruction& y) { return rank(x.action) < rank(y.action); });
    for (std::int32_t t = 0; t <= p_.n; ++t)
      if (!s_.pass(t).ops.empty()) pass(t);
    Plan plan;
    plan.offsets.push_back(0);
    for (const auto& list : lists_) {
      plan.instructions.insert(plan.instructions.end(), list.begin(), list.end());
      plan.offsets.push_back(static_cast<std::uint32_t>(plan.instructions.size()));
    }
    plan.starts_offloaded = starts_outside_;
    for (std::int32_t v = 0; v < p_.m; ++v)
      if (!s_.absences(v).empty()) summarise(v, plan);
    return plan;
  }

 private:
  std::vector<Instruction>& before(std::int32_t t) { return lists_[2 * static_cast<std::size_t>(t)]; }
  std::vector<Instruction>& after(std::int32_t t) { return lists_[2 * static_cast<std::size_t>(t) + 1]; }
  static int rank(Action action) {
    return action == Action::FinishOffload || action == Action::Drop ? 0 : action == Action::StartOffload || action == Action::Pack ? 1 : 2;
  }
  static Instruction on(Action action, std::int32_t target, bool preserve = false) {
    return {action, preserve, static_cast<std::uint32_t>(target)};
  }

  /// Departures and those returns that need no pass. They stand before the pass, which may want the values.
  void departures(std::int32_t v) {
    for (const Absence& x : s_.absences(v)) {
      if (x.mode == Mode::Offload) {
        outside(v, x);
        continue;
      }
      auto& gone = x.a < 0 ? before(0) : after(x.a);
      if (x.mode == Mode::Pack) {
        gone.push_back(on(Action::Pack, v));
        before(x.b).push_back(on(Action::Unpack, v));
      } else {
        gone.push_back(on(Action::Drop, v));
      }
    }
  }

  /// Copies begin where the search gave them time on their channel, so that they queue in that order.
  void outside(std::int32_t v, const Absence& x) {
    if (x.a >= 0) {
      const bool clean = x.b > p_.n && p_.producer[v] < 0;  // never written in this step: the copy outside is still good
      if (clean) {
        after(x.a).push_back(on(Action::Drop, v));
      } else {
        const auto at = static_cast<std::int32_t>(std::upper_bound(p_.start.begin(), p_.start.end(), static_cast<double>(x.write_at)) - p_.start.begin()) - 1;
        const std::int32_t begin = std::max(at, x.a + 1);
        (begin < x.lo ? before(begin) : after(x.a)).push_back(on(Action::StartOffload, v));
        before(x.lo).push_back(on(Action::FinishOffload, v));
      }
    } else {
      starts_outside_.push_back(static_cast<trace::ValueId>(v));
    }
    if (x.b > p_.n) return;
    before(x.hi + 1).push_back(on(Action::StartFetch, v));
    before(x.b).push_back(on(Action::FinishFetch, v));
    if (x.a >= 0) before(x.b).push_back(on(Action::DropCopy, v));
  }

  bool packed_at(std::int32_t v, std::int32_t t) const {
    for (const Absence& x : s_.absences(v))
      if (x.mode == Mode::Pack && x.lo <= t && t < x.b) return true;
    return false;
  }

  void pass(std::int32_t t) {
    const Pass& pass = s_.pass(t);
    const auto count = static_cast<std::int32_t>(pass.ops.size());
    std::unordered_map<std::int32_t, std::int32_t> last;  // of temporaries and of what is due: index of the last op that reads it
    std::unordered_set<std::int32_t> unpacked;
    const std::unordered_set<std::int32_t> due(pass.due.begin(), pass.due.end());
    for (std::int32_t v : pass.reads)
      if (packed_at(v, t)) unpacked.insert(v);
    for (std::int32_t k = 0; k < count; ++k) {
      for (std::int32_t v : p_.outputs[pass.ops[k]])
        if (!s_.available(v, t)) last[v] = k;
      for (std::int32_t v : p_.inputs[pass.ops[k]])
        if (unpacked.count(v) || last.count(v)) last[v] = k;
    }
    std::unordered_set<std::int32_t> opened;
    auto& list = before(t);
    for (std::int32_t k = 0; k < count; ++k) {
      const std::int32_t op = pass.ops[k];
      for (std::int32_t v : p_.inputs[op])
        if (unpacked.count(v) && opened.insert(v).second) list.push_back(on(Action::Unpack, v, true));
      std::unordered_set<std::int32_t> eaten;
      bool preserve = false;
      for (std::int32_t v : p_.outputs[op]) {
        const std::int32_t old = p_.overwrites[v];
        if (old < 0) continue;
        if (last.at(old) > k) preserve = true;
        eaten.insert(old);
      }
      if (preserve) eaten.clear();
      list.push_back(on(Action::Replay, op, preserve));
      for (std::int32_t v : p_.outputs[op])
        if (!due.count(v) && last.count(v) && last.at(v) == k) list.push_back(on(Action::Drop, v));
      for (std::int32_t v : p_.inputs[op])
        if (last.count(v) && last.at(v) == k && !due.count(v) && !eaten.count(v)) list.push_back(on(Action::Drop, v));
    }
  }

  void summarise(std::int32_t v, Plan& plan) const {
    ValueSummary summary;
    summary.value = static_cast<trace::ValueId>(v);
    std::int32_t longest = -1;
    for (const Absence& x : s_.absences(v)) {
      ++summary.gaps;
      const std::int32_t length = std::min(x.b, p_.n) - x.a;
      if (length > longest) {
        longest = length;
        summary.fate = x.mode == Mode::Recompute ? Fate::Recompute : x.mode == Mode::Pack ? Fate::Pack : Fate::Offload;
      }
      if (x.mode == Mode::Pack) summary.seconds += trace::Seconds(p_.pack_cost[v] + p_.unpack_cost[v]);
      if (x.mode == Mode::Recompute && x.b <= p_.n) {
        const Pass& pass = s_.pass(x.b);
        summary.seconds += trace::Seconds(pass.cost / static_cast<double>(pass.due.size()));
      }
    }
    plan.values.push_back(summary);
  }

  const Problem& p_;
  const Schedule& s_;
  std::vector<std::vector<Instruction>> lists_;
  std::vector<trace::ValueId> starts_outside_;
};

}  // namespace

Plan emit(const Problem& problem, const Schedule& schedule) { return Emitter(problem, schedule).run(); }

}  // namespace memfit::plan::detail
