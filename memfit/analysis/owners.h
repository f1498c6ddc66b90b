// Everything that was allocated at one event, by owner; the rows add up to the allocated bytes, always.
// Threads: pure functions. Cost: one pass over the events up to the given one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memfit/analysis/attribution.h"
#include "memfit/analysis/device_timeline.h"

namespace memfit::analysis {

struct OwnerRow {
  std::uint64_t bytes = 0;
  std::uint64_t blocks = 0;
  Category category = Category::Unknown;
  std::string where;
  std::string rule;
  trace::StackId stack = trace::kNoStack;  // one of its stacks
};

/// Call `f(owner, bytes, stack)` for each block allocated (and not asked to be freed) after event `at`; owner is an
/// alloc event or kBaseFlag | base block.
void for_each_live(const DeviceTimeline& timeline, std::uint32_t at,
                   const std::function<void(std::uint32_t owner, std::uint64_t bytes, trace::StackId stack)>& f);

/// Rows largest first, at most `limit`; the rest stands in a last row "(N more)". Blocks below `min_size` share one
/// row.
std::vector<OwnerRow> compute_owners(const DeviceTimeline& timeline, const Attribution& attribution, std::uint32_t at,
                                     std::uint64_t min_size = 0, std::size_t limit = 200);

/// Event indices at which steps begin, found from the order of forward, backward and optimizer; empty when not visible.
std::vector<std::uint32_t> find_steps(const DeviceTimeline& timeline, const Attribution& attribution);

}  // namespace memfit::analysis
