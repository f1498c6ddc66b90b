// memfit diff: what explains the difference between the peaks of two memory snapshots.
#include <fmt/format.h>

#include <map>
#include <memory>

#include "memfit/analysis/explain.h"
#include "memfit/analysis/snapshot_diff.h"
#include "memfit/cli/verbs.h"
#include "memfit/report/snapshot_report.h"
#include "memfit/snapshot/snapshot_reader.h"

namespace memfit::cli {
namespace {

struct DiffArguments {
  std::string before, after;
  bool json = false;
};

struct Side {
  std::uint64_t peak = 0;
  std::vector<analysis::PeakShare> shares;
};

std::map<std::int32_t, Side> sides_of(const std::string& file) {
  const trace::AllocatorSnapshot snapshot = snapshot::read_allocator_snapshot(file);
  analysis::ExplainOptions options;
  options.advise = false;
  const analysis::Explanation explanation = analysis::explain(snapshot, options);
  std::map<std::int32_t, Side> sides;
  for (const analysis::DeviceExplanation& device : explanation.devices)
    sides[device.timeline.device] = {device.peak_allocated,
                                     analysis::compute_peak_shares(device, *explanation.attribution)};
  return sides;
}

void run_diff(const DiffArguments& args) {
  std::map<std::int32_t, std::pair<Side, Side>> devices;
  for (auto& [device, side] : sides_of(args.before)) devices[device].first = std::move(side);
  for (auto& [device, side] : sides_of(args.after)) devices[device].second = std::move(side);
  std::vector<analysis::SnapshotDiff> diffs;
  for (const auto& [device, sides] : devices)
    diffs.push_back(
        analysis::compute_diff(device, sides.first.peak, sides.first.shares, sides.second.peak, sides.second.shares));
  if (args.json) {
    fmt::print("{}\n", report::json_text(report::diff_json(diffs)));
    return;
  }
  fmt::print("{}Next: memfit explain {}\n", report::diff_text(diffs), args.after);
}

}  // namespace

void add_diff(CLI::App& app, Context& context) {
  auto args = std::make_shared<DiffArguments>();
  CLI::App* verb =
      app.add_subcommand("diff", "rank what explains the difference between the peaks of two memory snapshots");
  verb->add_option("BEFORE", args->before, "A memory snapshot")->required();
  verb->add_option("AFTER", args->after, "Another one")->required();
  verb->add_flag("--json", args->json, "Print JSON");
  verb->callback([args] { run_diff(*args); });
  (void)context;
}

}  // namespace memfit::cli
