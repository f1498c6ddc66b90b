// A Plan as JSON, in both directions: to store it, to compare two, and to judge a schedule that something else made
// (`memfit plan FILE --check SCHEDULE.json`).
// Not here: the report of a plan in words or tables (report/plan_report.h).
// Threads: any, no state. Cost: linear.
//
// {"version": 1, "ops": 3, "limit_bytes": 1000, "starts_offloaded": [], "instructions": [["after", 0, "drop", 5],
//  ["before", 2, "replay", 0], ["before", 2, "replay", 1, "preserve"]]}
// Instructions stand in the order in which they are carried out; "before", 3 is the end of a step of 3 ops.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

#include "memfit/plan/plan.h"

namespace memfit::plan {

inline constexpr int kPlanJsonVersion = 1;

nlohmann::json plan_to_json(const Plan& plan);

/// `file` names the input in errors.
/// Throws:   BadInput: no JSON, another version (both named), or not of the form above.
Plan plan_from_json(const std::string& text, const std::string& file);

}  // namespace memfit::plan
