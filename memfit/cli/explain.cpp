// memfit explain: what a memory snapshot says, in words; several files are a job's ranks.
#include <fmt/format.h>

#include <memory>

#include "memfit/analysis/explain.h"
#include "memfit/analysis/ranks.h"
#include "memfit/cli/verbs.h"
#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/report/snapshot_report.h"
#include "memfit/snapshot/snapshot_reader.h"

namespace memfit::cli {
namespace {

struct ExplainArguments {
  std::vector<std::string> files;
  std::optional<std::uint32_t> from, to;
  bool last_step = false, json = false;
  std::string min_size, device_memory;
};

void run_explain(const ExplainArguments& args) {
  analysis::ExplainOptions options;
  options.from = args.from;
  options.to = args.to;
  if (args.from && args.to && *args.from >= *args.to)
    throw UsageError(fmt::format("--from {} is not before --to {}.", *args.from, *args.to));
  if (args.last_step && (args.from || args.to))
    throw UsageError("--last-step chooses the events itself: leave --from and --to out.");
  options.last_step = args.last_step;
  if (!args.min_size.empty()) options.min_size = parse_size(args.min_size, "--min-size").count();
  if (!args.device_memory.empty()) options.device_memory = parse_size(args.device_memory, "--device-memory").count();
  if (args.files.size() == 1) {
    const trace::AllocatorSnapshot snapshot = snapshot::read_allocator_snapshot(args.files[0]);
    const analysis::Explanation explanation = analysis::explain(snapshot, options);
    if (args.json) {
      fmt::print("{}\n", report::json_text(report::explain_json(explanation)));
      return;
    }
    fmt::print("{}", report::explain_text(explanation));
    if (snapshot.has_history) fmt::print("\nNext: memfit report {} --html    the same over time\n", args.files[0]);
    else fmt::print("\nNext: torch.cuda.memory._record_memory_history() before the run records the history too\n");
    return;
  }
  // One file at a time: only its summary stays in memory.
  std::vector<analysis::RankSummary> ranks;
  nlohmann::json files = nlohmann::json::array();
  for (const std::string& file : args.files) {
    const trace::AllocatorSnapshot snapshot = snapshot::read_allocator_snapshot(file);
    const analysis::Explanation explanation = analysis::explain(snapshot, options);
    for (const analysis::DeviceExplanation& device : explanation.devices)
      ranks.push_back(analysis::summarize_rank(file, device));
    if (args.json) files.push_back(report::explain_json(explanation));
  }
  const analysis::RankComparison comparison = analysis::compare_ranks(ranks);
  if (args.json) {
    nlohmann::json out = report::ranks_json(ranks, comparison);
    out["version"] = 1;
    out["files"] = std::move(files);
    fmt::print("{}\n", report::json_text(out));
  } else {
    fmt::print("{}", report::ranks_text(ranks, comparison));
    const std::size_t look = comparison.odd >= 0 ? static_cast<std::size_t>(comparison.odd) : 0;
    if (!ranks.empty()) fmt::print("Next: memfit explain {}\n", ranks[look].file);
  }
}

}  // namespace

void add_explain(CLI::App& app, Context& context) {
  auto args = std::make_shared<ExplainArguments>();
  CLI::App* verb = app.add_subcommand(
      "explain", "say what a PyTorch memory snapshot shows and what went wrong; several files are a job's ranks");
  verb->add_option("FILE", args->files, "Snapshots of torch.cuda.memory._dump_snapshot, pickle or JSON")->required();
  verb->add_option("--from", args->from, "First event to look at");
  verb->add_option("--to", args->to, "Event to stop before");
  verb->add_flag("--last-step", args->last_step, "Look at the last whole training step");
  verb->add_option("--min-size", args->min_size, "Do not list blocks below this size (1MiB)");
  verb->add_option("--device-memory", args->device_memory, "Size of the device (80GiB), where you know it");
  verb->add_flag("--json", args->json, "Print JSON");
  verb->callback([args] { run_explain(*args); });
  (void)context;
}

}  // namespace memfit::cli
