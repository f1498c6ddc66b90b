// Carries out a Plan on paper: is it possible, how many bytes are live at most, and how long does the step take?
// The one judge of schedules: ours, and those of the solver that the tests compare with.
// Not here: any choice.
// Threads: pure. Cost: one pass over ops and instructions.
#pragma once

#include <string>

#include "memfit/plan/plan.h"
#include "memfit/trace/step.h"

namespace memfit::plan {

/// What a place to offload to can do. One channel each way, copies in order of their start.
struct Traffic {
  double write_bytes_per_second = 0;
  double read_bytes_per_second = 0;
  trace::Seconds latency{0};  // of each copy
  double busy_seconds_per_byte = 0;  // that ops take longer for each byte copied: the copies use the same cores and memory
};

struct Simulation {
  bool possible = true;
  std::string fault;        // why not, naming op and value
  trace::OpId fault_op = 0;
  Bytes peak;
  trace::OpId peak_op = 0;  // n: at the end of the step
  Bytes outside_peak;       // most bytes outside at one time
  trace::Seconds step{0}, recompute{0}, packing{0}, exposed{0};
  Bytes offload_write, offload_read;
  std::size_t replays = 0;
};

/// Requires: find_fault(step) is empty.
/// Returns:  the outcome; an impossible plan is reported up to its first fault. `plan.limit` is not looked at.
///           Temporaries that outlive their list are allowed and counted, so that freer schedules can be judged too.
Simulation simulate(const trace::Step& step, const Plan& plan, const Traffic& traffic = {});

/// The plan that does nothing.
Plan keep_everything(const trace::Step& step);

}  // namespace memfit::plan
