// What explain, whatif and diff found, as text and as JSON. Sums are those of analysis/; nothing is computed here.
// Threads: any, no state. Cost: proportional to what is printed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "memfit/analysis/explain.h"
#include "memfit/analysis/ranks.h"
#include "memfit/analysis/replay.h"
#include "memfit/analysis/snapshot_diff.h"

namespace memfit::report {

struct WhatIfView {
  const analysis::DeviceTimeline* timeline = nullptr;
  analysis::ReplayResult recorded;  // validation: recorded settings, recorded answers of the device
  analysis::ReplayResult predicted;
  analysis::AllocatorSettings settings;   // of the prediction
  std::optional<std::uint64_t> capacity;  // of the prediction
  std::vector<analysis::Candidate> best;  // of the search, best first; empty when not asked
};

nlohmann::json whatif_json(const std::vector<WhatIfView>& devices);
std::string whatif_text(const std::vector<WhatIfView>& devices);

nlohmann::json explain_json(const analysis::Explanation& explanation);
std::string explain_text(const analysis::Explanation& explanation);

nlohmann::json ranks_json(const std::vector<analysis::RankSummary>& ranks, const analysis::RankComparison& comparison);
std::string ranks_text(const std::vector<analysis::RankSummary>& ranks, const analysis::RankComparison& comparison);

nlohmann::json diff_json(const std::vector<analysis::SnapshotDiff>& devices);
std::string diff_text(const std::vector<analysis::SnapshotDiff>& devices);

/// JSON as text: names in files need not be UTF-8, and the output always is.
std::string json_text(const nlohmann::json& value);

}  // namespace memfit::report
