// Chooses what to do with the values of a recorded step so that it stays under a limit at the least cost.
// Not here: carrying it out (engine/), judging it (simulate.h).
// Threads: pure, deterministic for equal inputs (work is counted, the clock is not looked at).
// Cost: under a second for 10,000 ops, under ten for 100,000. The model and the method: docs/design/planning.md.
#pragma once

#include <optional>

#include "memfit/core/error.h"
#include "memfit/plan/plan.h"
#include "memfit/plan/simulate.h"
#include "memfit/trace/step.h"

namespace memfit::plan {

struct OffloadTarget {
  Bytes limit;      // most bytes outside at one time
  Traffic traffic;  // measured
};

struct PlanOptions {
  Bytes limit;                           // on fixed bytes and all values together
  std::optional<OffloadTarget> offload;  // default: nowhere to go
  bool recompute = true;                 // default: yes. Off only to see what packing and offload can do alone
  bool pack = true;                      // default: yes, where the trace says that a value is packable
  double effort = 1.0;     // scales the work of the search; 0.1 is good for curves, 10 for the last per cent
  std::int64_t most_work = 0;            // elementary operations of one search after which it gives up (1e8: about a second); 0: no bound
  std::uint64_t seed = 1;  // of the search
};

/// The least limit, from both sides.
struct Floor {
  Bytes bound;         // no plan can be below this
  trace::OpId op = 0;  // the op that forces `bound`: its inputs, outputs, workspace and what cannot go away
  Bytes reached;       // the lowest limit for which a plan was found
};

/// The limit is too low. Carries the floor; what() names it and the op that forces it.
class LimitTooLow : public DoesNotFit {
 public:
  LimitTooLow(const std::string& text, Floor floor) : DoesNotFit(text), floor_(floor) {}
  const Floor& floor() const { return floor_; }

 private:
  Floor floor_;
};

/// Requires: find_fault(step) is empty.
/// Returns:  a plan that simulate() finds possible, with peak <= options.limit.
/// Throws:   LimitTooLow when none was found.
Plan compute_plan(const trace::Step& step, const PlanOptions& options);

/// The same, without the search for the floor that LimitTooLow carries: nothing when no plan was found.
std::optional<Plan> find_plan(const trace::Step& step, const PlanOptions& options);

/// `options.limit` is not looked at.  Cost: several plans.
Floor compute_floor(const trace::Step& step, const PlanOptions& options);

}  // namespace memfit::plan
