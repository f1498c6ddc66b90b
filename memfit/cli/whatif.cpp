// memfit whatif: replay a snapshot's history under other allocator settings or on another device.
#include <fmt/format.h>

#include <optional>

#include "memfit/analysis/replay.h"
#include "memfit/cli/verbs.h"
#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/report/snapshot_report.h"
#include "memfit/snapshot/snapshot_reader.h"

namespace memfit::cli {
namespace {

struct WhatIfArguments {
  std::string file;
  std::optional<bool> expandable;
  std::string max_split, conf, device_memory;
  std::optional<double> gc, fraction;
  std::optional<std::uint32_t> roundup;
  bool search = false, json = false;
};

analysis::AllocatorSettings changed_settings(const WhatIfArguments& args, analysis::AllocatorSettings settings) {
  if (!args.conf.empty() && !analysis::apply_conf(args.conf, settings))
    throw UsageError(fmt::format(
        "--conf: \"{}\" is no text for PYTORCH_ALLOC_CONF, for example expandable_segments:True,max_split_size_mb:512.",
        args.conf));
  if (args.expandable) settings.expandable_segments = *args.expandable;
  if (args.max_split == "none") settings.max_split_size = analysis::kNoSplitLimit;
  else if (!args.max_split.empty()) {
    settings.max_split_size = parse_size(args.max_split, "--max-split-size").count();
    if (settings.max_split_size <= (std::uint64_t{20} << 20))
      throw UsageError("--max-split-size: PyTorch takes sizes above 20MiB only.");
  }
  if (args.gc) settings.garbage_collection_threshold = *args.gc;
  if (args.fraction) settings.memory_fraction = *args.fraction;
  if (args.roundup) settings.roundup_power2_divisions.fill(*args.roundup);
  return settings;
}

void run_whatif(const WhatIfArguments& args) {
  const trace::AllocatorSnapshot snapshot = snapshot::read_allocator_snapshot(args.file);
  if (!snapshot.has_history)
    throw BadInput(args.file, 0,
                   "has no history to replay: record with torch.cuda.memory._record_memory_history() before the run");
  const std::vector<analysis::DeviceTimeline> timelines = analysis::compute_timelines(snapshot);
  std::optional<std::uint64_t> device_memory;
  if (!args.device_memory.empty()) device_memory = parse_size(args.device_memory, "--device-memory").count();
  std::vector<report::WhatIfView> views;
  for (const analysis::DeviceTimeline& timeline : timelines) {
    if (timeline.count == 0) continue;
    report::WhatIfView view;
    view.timeline = &timeline;
    const analysis::ReplayValidation validation = analysis::validate_replay(timeline, device_memory);
    view.recorded = validation.result;
    view.settings = changed_settings(args, timeline.settings);
    view.capacity = device_memory ? device_memory : analysis::usable_at_oom(timeline);
    const analysis::WhatIf what{view.settings, view.capacity, device_memory};
    view.predicted = analysis::predict(validation.program, what);
    if (args.search) view.best = analysis::search_settings(validation.program, what);
    views.push_back(std::move(view));
  }
  if (args.json) {
    fmt::print("{}\n", report::json_text(report::whatif_json(views)));
  } else {
    fmt::print("{}", report::whatif_text(views));
    if (!args.search) fmt::print("Next: memfit whatif {} --search    tries the settings that can help\n", args.file);
  }
}

}  // namespace

void add_whatif(CLI::App& app, Context& context) {
  auto args = std::make_shared<WhatIfArguments>();
  CLI::App* verb =
      app.add_subcommand("whatif", "replay a memory snapshot under other allocator settings or on another device");
  verb->add_option("FILE", args->file, "A memory snapshot with history")->required();
  verb->add_flag_callback(
      "--expandable-segments", [args] { args->expandable = true; }, "With expandable segments");
  verb->add_flag_callback(
      "--no-expandable-segments", [args] { args->expandable = false; }, "Without expandable segments");
  verb->add_option("--max-split-size", args->max_split, "Largest block that may be split (512MiB), or none");
  verb->add_option("--roundup-power2-divisions", args->roundup,
                   "Round sizes up to this many steps between powers of two")
      ->check(CLI::Range(0, 1 << 20));
  verb->add_option("--garbage-collection-threshold", args->gc,
                   "Give cached blocks back above this share of the memory fraction")
      ->check(CLI::Range(0.0, 1.0));
  verb->add_option("--memory-fraction", args->fraction, "As set_per_process_memory_fraction")
      ->check(CLI::Range(0.0, 1.0));
  verb->add_option("--conf", args->conf, "Settings as text of PYTORCH_ALLOC_CONF");
  verb->add_option("--device-memory", args->device_memory,
                   "Size of the device (80GiB); default: what the recording could have");
  verb->add_flag("--search", args->search, "Also try the settings that can help and rank them");
  verb->add_flag("--json", args->json, "Print JSON");
  verb->callback([args] { run_whatif(*args); });
  (void)context;
}

}  // namespace memfit::cli
