#include <fmt/format.h>

#include "memfit/core/bytes.h"
#include "memfit/report/snapshot_report.h"

namespace memfit::report {
namespace {

using nlohmann::json;

std::string size_text(std::uint64_t n) { return format_bytes(Bytes(n)); }

json outcome(const analysis::ReplayResult& result) {
  json out{{"reserved_peak_bytes", result.reserved_peak}, {"oom", result.oom}};
  if (result.oom && result.oom_event != analysis::kNever) out["oom_event"] = result.oom_event;
  else out["oom_event"] = nullptr;
  if (result.oom) out["oom_requested_bytes"] = result.oom_requested;
  out["retries"] = result.retries;
  return out;
}

std::string conf_or_default(const analysis::AllocatorSettings& settings) {
  const std::string text = analysis::conf_text(settings);
  return text.empty() ? "the default settings" : text;
}

std::string outcome_text(const analysis::ReplayResult& result) {
  std::string text = fmt::format("reserved peak {}", size_text(result.reserved_peak));
  if (result.oom && result.oom_event == analysis::kNever) {
    text += fmt::format(", out of memory: even what was live when the recording began does not fit (asked for {})",
                        size_text(result.oom_requested));
  } else if (result.oom) {
    text += fmt::format(", out of memory at event {} (asked for {}, {} reserved, {} of it free, largest piece {})",
                        result.oom_event, size_text(result.oom_requested), size_text(result.oom_reserved),
                        size_text(result.oom_free_bytes), size_text(result.oom_largest_free));
  } else {
    text += ", no out of memory";
  }
  if (result.retries > 0) text += fmt::format(", {} retries after giving memory back", result.retries);
  return text;
}

}  // namespace

json whatif_json(const std::vector<WhatIfView>& devices) {
  json list = json::array();
  for (const WhatIfView& view : devices) {
    json entry{{"index", view.timeline->device},
               {"recorded", outcome(view.recorded)},
               {"predicted", outcome(view.predicted)},
               {"settings", analysis::conf_text(view.settings)},
               {"match", {{"events_replayed", view.recorded.events}, {"events_that_differ", view.recorded.differ}}}};
    // The recording itself is the truth of `recorded`.
    entry["recorded"]["reserved_peak_bytes"] = view.timeline->peak_reserved;
    if (view.capacity) entry["capacity_bytes"] = *view.capacity;
    if (!view.best.empty()) {
      json search = json::array();
      for (const analysis::Candidate& candidate : view.best) {
        json row = outcome(candidate.result);
        row["setting"] = analysis::conf_text(candidate.settings);
        search.push_back(std::move(row));
      }
      entry["search"] = std::move(search);
    }
    list.push_back(std::move(entry));
  }
  json out{{"version", 1}, {"devices", list}};
  if (list.size() == 1) {  // the fixed interface: one device stands at the top
    out["recorded"] = list[0]["recorded"];
    out["predicted"] = list[0]["predicted"];
    out["match"] = list[0]["match"];
    if (list[0].contains("search")) out["search"] = list[0]["search"];
  }
  return out;
}

std::string whatif_text(const std::vector<WhatIfView>& devices) {
  std::string text;
  for (const WhatIfView& view : devices) {
    const analysis::DeviceTimeline& t = *view.timeline;
    text += fmt::format("Device {}: {} events\n", t.device, t.count);
    analysis::ReplayResult recorded = view.recorded;
    recorded.reserved_peak = t.peak_reserved;
    text += fmt::format("  recorded   {}: {}\n", conf_or_default(t.settings), outcome_text(recorded));
    text +=
        view.recorded.differ == 0
            ? fmt::format("  check      the replay gives the recorded reserved bytes after every one of {} events\n",
                          view.recorded.events)
            : fmt::format(
                  "  check      the replay differs from the recording at {} of {} events, first at {}: take the "
                  "prediction with care\n",
                  view.recorded.differ, view.recorded.events, view.recorded.first_difference);
    text += fmt::format("  predicted  {}{}: {}\n", conf_or_default(view.settings),
                        view.capacity ? fmt::format(", {} for this process", size_text(*view.capacity)) : ", no limit",
                        outcome_text(view.predicted));
    if (!view.best.empty()) {
      text += "  search, best first:\n";
      for (const analysis::Candidate& candidate : view.best)
        text += fmt::format("    {:<44} {}\n", conf_or_default(candidate.settings), outcome_text(candidate.result));
    }
  }
  return text;
}

}  // namespace memfit::report
