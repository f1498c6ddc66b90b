// A job's ranks side by side: who uses how much, how uneven that is, which rank is unlike the others and by what.
// Threads: pure functions. Cost: proportional to ranks times owner rows.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memfit/analysis/explain.h"

namespace memfit::analysis {

/// What of one file's device is kept when the file itself is gone from memory.
struct RankSummary {
  std::string file;
  std::int32_t device = 0;
  std::uint64_t peak_allocated = 0, peak_reserved = 0;
  std::uint64_t by_category[kCategories] = {};
  std::vector<OwnerRow> owners;  // adding up to peak_allocated
  std::vector<VerdictKind> verdicts;
};
RankSummary summarize_rank(const std::string& file, const DeviceExplanation& device);

struct RankDifference {
  std::int64_t bytes = 0;  // of the odd rank against the typical one
  Category category = Category::Other;
  std::string where;
};

struct RankComparison {
  std::uint64_t lowest = 0, median = 0, highest = 0;  // of peak_allocated
  double imbalance = 0;                               // highest / median - 1
  std::int64_t odd = -1;                    // index of the rank furthest from the median, when it is further than 5 %
  std::int64_t typical = -1;                // index of the rank at the median
  std::vector<RankDifference> differences;  // odd against typical, adding up to the difference of their peaks
};
RankComparison compare_ranks(const std::vector<RankSummary>& ranks);

}  // namespace memfit::analysis
