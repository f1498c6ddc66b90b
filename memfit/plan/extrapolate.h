// The step that other batch sizes would record, from two that were recorded: what scales is told from what does not value by value.
// Not here: the plan for it (compute_plan.h works on the result like on any step).
// Threads: pure. Cost: linear.
#pragma once

#include <optional>
#include <span>
#include <utility>

#include "memfit/trace/step.h"

namespace memfit::plan {

/// Two steps of the same ops with the same operands, at two known batch sizes (the first is the smaller): the furthest apart, or nothing.
std::optional<std::pair<const trace::Step*, const trace::Step*>> find_two_batches(std::span<const trace::Step> steps);

/// Two steps of the same ops at different batch sizes that nobody has named: the sizes are the leading dimensions of the first value whose
/// shapes differ in nothing else. Sets Step::batch of both, if there is one.
void name_batches(trace::Step& a, trace::Step& b);

/// Every size and time is a + b * batch, through both recordings; none gets below zero.
/// Requires: `small` and `large` come from find_two_batches().
trace::Step extrapolate(const trace::Step& small, const trace::Step& large, std::uint64_t batch);

}  // namespace memfit::plan
