// What explain, whatif and diff found, as text and as JSON. Sums are those of analysis/; nothing is computed here.
// Threads: any, no state. Cost: proportional to what is printed.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "memfit/analysis/replay.h"

namespace memfit::report {

struct WhatIfView {
  const analysis::DeviceTimeline* timeline = nullptr;
  analysis::ReplayResult recorded;   // validation: recorded settings, recorded answers of the device
  analysis::ReplayResult predicted;
  analysis::AllocatorSettings settings;                 // of the prediction
  std::optional<std::uint64_t> capacity;                // of the prediction
  std::vector<analysis::Candidate> best;                // of the search, best first; empty when not asked
};

nlohmann::json whatif_json(const std::vector<WhatIfView>& devices);
std::string whatif_text(const std::vector<WhatIfView>& devices);

}  // namespace memfit::report
