// What explains the difference between two snapshots' peaks, place by place; the rows add up to the difference.
// Threads: pure functions. Cost: one pass over each history up to its peak.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memfit/analysis/explain.h"

namespace memfit::analysis {

/// One place's share of a peak, with persistent and temporary bytes told apart: persistent is what outlives its step
/// (or half of the recording where no steps are visible) or is never freed.
struct PeakShare {
  std::string where;
  Category category = Category::Other;
  bool persistent = false;
  std::uint64_t bytes = 0;
};
std::vector<PeakShare> compute_peak_shares(const DeviceExplanation& device, const Attribution& attribution);

struct DiffRow {
  std::int64_t bytes = 0;  // after minus before
  std::string where;
  Category category = Category::Other;
  bool persistent = false;
  std::uint64_t before = 0, after = 0;
};

struct SnapshotDiff {
  std::int32_t device = 0;
  std::uint64_t peak_before = 0, peak_after = 0;
  std::vector<DiffRow> rows;  // largest difference first; equal ones left out
};
SnapshotDiff compute_diff(std::int32_t device, std::uint64_t peak_before, const std::vector<PeakShare>& before,
                          std::uint64_t peak_after, const std::vector<PeakShare>& after);

}  // namespace memfit::analysis
