// A complete schedule under construction: which values are away when, the replay pass before each op that follows from it, the
// exact bytes of every stage and the exact cost. Every change keeps all of that exact and can be taken back.
// Private to plan/. Threads: one.
//
// Note [Schedule]
// The free variables are the absences: for each value a list of stretches of time in which its bytes are gone. All else
// follows. Before op t a pass brings back what is due (absences that end at t) and nothing else: it runs, in original order, exactly the ops
// that are needed given what is there at t, frees each temporary after its last use in the pass, and leaves. So a change of one
// value's absences changes only the passes that read it (it is no longer there), the passes that made it as a
// temporary (it is there now), and those at the ends of its absences. Readers and makers are indexed, which makes a change local.
// Stage t is feasible when  bytes there at its start + max(what the pass adds at most, what op t adds)  <=  limit.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "memfit/plan/detail/problem.h"

namespace memfit::plan::detail {

enum class Mode : std::uint8_t { Recompute, Pack, Offload };

/// Away from after op `a` to before op `b` (n+1: for good).
/// Mode::Offload with a == -1 (away when the step begins) or b == n+1 (away when it ends) are two halves of one stay outside.
/// Bytes are gone in the stages lo .. hi; content cannot be read in lo <= t < b, and is made by the pass at b for Mode::Recompute.
struct Absence {
  std::int32_t a, b, lo, hi;
  Mode mode;
  float write_at = 0, read_at = 0;  // Mode::Offload: when its copies begin, in seconds of the step; 0 long if there is none
  bool operator==(const Absence&) const = default;
};

struct Pass {
  std::vector<std::int32_t> due;    // values to bring back for good
  std::vector<std::int32_t> ops;    // in order
  std::vector<std::int32_t> reads;  // movable values it finds in place (or packed), each once
  std::vector<std::int32_t> makes;  // held but absent values it makes for itself only
  double cost = 0;
  std::int64_t extra = 0;           // most bytes it adds at one moment
};

class Schedule {
 public:
  Schedule(const Problem& problem, std::int64_t limit);

  double cost() const { return cost_; }
  /// Sum over stages of bytes above the limit.
  std::int64_t violation() const { return violation_; }
  bool feasible() const { return violation_ == 0; }
  std::int64_t limit() const { return limit_; }
  void set_limit(std::int64_t limit);
  std::span<const std::int64_t> profile() const { return profile_; }
  std::int64_t peak() const;

  const std::vector<Absence>& absences(std::int32_t value) const { return absences_[value]; }
  const Pass& pass(std::int32_t stage) const { return passes_[stage]; }
  std::span<const std::int32_t> readers(std::int32_t value) const { return readers_[value]; }
  std::span<const std::int32_t> makers(std::int32_t value) const { return makers_[value]; }
  bool available(std::int32_t value, std::int32_t stage) const { return availability(value, stage) == 1; }

  static Absence recompute(std::int32_t a, std::int32_t b) { return {a, b, a + 1, b, Mode::Recompute, 0, 0}; }
  static Absence pack(std::int32_t a, std::int32_t b) { return {a, b, a + 1, b - 1, Mode::Pack, 0, 0}; }

  /// Replace the absences of `value` (sorted, disjoint). False, and nothing changed, when some pass becomes impossible
  /// or would run more than `max_pass_ops` ops.
  bool assign(std::int32_t value, std::vector<Absence> absences);
  using Change = std::pair<std::int32_t, std::vector<Absence>>;
  using Changes = std::vector<Change>;
  /// The same for many values at once, each named once: every pass is worked out once, however many of them it concerns.
  bool assign_all(Changes changes) { return apply(changes); }

  /// Everything after mark() can be taken back by rollback(mark).
  std::size_t mark() const { return journal_.size(); }
  void rollback(std::size_t mark);
  void forget_history() { journal_.clear(); }

  std::int64_t work = 0;              // counts elementary operations, so that effort can be bounded without a clock
  std::int32_t max_pass_ops = 1 << 30;

  /// Recompute everything from the absences alone and compare. For tests.
  bool check_invariants() const;

 private:
  struct Undo {
    bool is_pass;
    std::int32_t index;
    Pass pass;
    std::vector<Absence> absences;
  };

  /// While one lives, many changes' bytes are noted as differences; they reach profile_ and violation_ in one walk at its
  /// end. Few changes are cheaper made at once.
  class Deferral {
   public:
    Deferral(Schedule& schedule, std::size_t changes);
    ~Deferral();
    Deferral(const Deferral&) = delete;
    Deferral& operator=(const Deferral&) = delete;

   private:
    Schedule& schedule_;
    const bool outer_;  // another one is at work already
  };

  int availability(std::int32_t value, std::int32_t stage) const;  // 0 no, 1 yes, 2 packed
  bool apply(std::span<Change> changes);
  void find_affected(std::int32_t value, const std::vector<Absence>& fresh);
  bool evaluate(std::int32_t stage, Pass& pass);
  bool collect(std::int32_t stage, Pass& pass);
  void measure(Pass& pass);
  void install(std::int32_t stage, Pass&& pass, bool journal);
  void swap_absences(std::int32_t value, std::vector<Absence>& absences);
  void account(std::int32_t value, const Absence& absence, std::int64_t sign);
  void add_range(std::int32_t from, std::int32_t to, std::int64_t bytes);
  void settle();
  void set_height(std::int32_t stage, std::int64_t height);
  double own_cost(std::int32_t value, const Absence& absence) const;

  const Problem& p_;
  std::int64_t limit_;
  double cost_ = 0;
  std::int64_t violation_ = 0;
  std::vector<std::int64_t> profile_, height_;
  std::vector<std::vector<Absence>> absences_;
  std::vector<Pass> passes_;
  std::vector<std::vector<std::int32_t>> readers_, makers_;
  std::vector<Undo> journal_;
  bool deferring_ = false;
  std::vector<std::int64_t> differences_;
  // scratch of evaluate()
  std::uint32_t epoch_ = 0, due_epoch_ = 0;
  std::vector<std::uint32_t> op_seen_, value_seen_, value_wanted_, due_seen_;
  std::vector<std::int32_t> last_use_;
  std::vector<std::int32_t> stack_, unpacked_;
  std::vector<std::int32_t> affected_;
  // scratch of apply()
  struct Due {
    std::int32_t stage, value;
    bool comes;
  };
  std::vector<Due> dues_;
  std::vector<std::int32_t> stages_;
};

}  // namespace memfit::plan::detail
