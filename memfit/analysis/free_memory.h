// The memory that is reserved and not used: how much, in which pieces, what keeps it from being given back, and for
// whom it is lost because pools and streams do not share. Threads: pure functions. Cost: proportional to the blocks.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "memfit/analysis/device_timeline.h"

namespace memfit::analysis {

/// A block in use that keeps a segment from being given back.
struct Pin {
  std::uint64_t free_bytes = 0;   // of its segment
  std::uint64_t block_bytes = 0;  // this block's
  std::uint64_t live_bytes = 0;   // all blocks in use in the segment
  std::uint32_t owner = kNever;   // alloc event, kBaseFlag | base block, or kNever
  trace::StackId stack = trace::kNoStack;
};

struct FreeMemory {
  std::uint64_t reserved = 0, allocated = 0, pending = 0;
  std::uint64_t free_bytes = 0;  // reserved - allocated - pending
  std::uint64_t largest_free = 0;
  std::uint64_t releasable = 0;  // in whole segments or pages: torch.cuda.empty_cache gives it back
  std::uint64_t stuck = 0;       // free - releasable: pinned by blocks in use
  std::uint64_t segments = 0, stuck_segments = 0;
  std::map<std::pair<std::uint16_t, std::uint16_t>, std::uint64_t> stuck_by_pool;  // (stream, private pool)
  std::vector<Pin> pins;  // the segments with most stuck bytes, at most 10
};

/// After event `at` of the timeline.
FreeMemory free_memory_at(const DeviceTimeline& timeline, std::uint32_t at);

/// At the end of the file, from its segments alone.
FreeMemory free_memory_at_end(const DeviceTimeline& timeline);

}  // namespace memfit::analysis
