// Writes a finished Schedule down as the instructions of a Plan.
// Private to plan/. Threads: pure.
#pragma once

#include "memfit/plan/detail/schedule.h"
#include "memfit/plan/plan.h"

namespace memfit::plan::detail {

/// Instructions and value summaries; limits and predictions are filled in by whoever simulates the result.
Plan emit(const Problem& problem, const Schedule& schedule);

}  // namespace memfit::plan::detail
