// What `memfit plan` found, as text, JSON (docs/verbs/plan.md) and a page with the memory/time curve.
// Not here: any arithmetic (plan/study.h), storing plans (plan/plan_json.h).
// Threads: pure functions. Cost: linear.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "memfit/plan/simulate.h"
#include "memfit/plan/study.h"

namespace memfit::report {

std::string plan_study_text(const plan::Study& study);
nlohmann::ordered_json plan_study_json(const plan::Study& study);
std::string plan_study_html(const plan::Study& study);

/// The verdict on a schedule (`--check`).
nlohmann::ordered_json simulation_json(const plan::Simulation& simulation);

}  // namespace memfit::report
