// A history thinned for drawing: curves that keep every peak, bytes by category at fixed points, the blocks that
// matter. Not here: drawing (report/). Threads: pure functions. Cost: one pass for the curve, one for the rest; memory
// follows the limits, not the events.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memfit/analysis/explain.h"

namespace memfit::analysis {

struct ViewLimits {
  std::size_t curve_points = 60'000;
  std::size_t category_points = 3'000;
  std::size_t blocks = 4'000;  // largest first
};

struct ViewBlock {
  std::uint32_t from = 0;     // kNever: before the first event
  std::uint32_t to = kNever;  // event that asked to free it
  std::uint64_t bytes = 0;
  std::uint32_t place = 0;  // into places
};

struct ViewPlace {
  std::string where;
  Category category = Category::Unknown;
  std::string rule;
  std::vector<std::string> frames;  // innermost first, at most 40
};

struct TimelineView {
  Curve curve;
  std::vector<std::uint32_t> at;                        // events of the category series
  std::vector<std::uint64_t> by_category[kCategories];  // add up to allocated at each of them
  std::vector<ViewBlock> blocks;
  std::uint64_t blocks_left_out = 0;
  std::vector<ViewPlace> places;
};

TimelineView compute_view(const DeviceExplanation& device, const Attribution& attribution,
                          const ViewLimits& limits = {});

}  // namespace memfit::analysis
