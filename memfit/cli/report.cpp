// memfit report: a memory snapshot as a page, as text or as JSON.
#include <fmt/format.h>

#include <memory>

#include "memfit/analysis/explain.h"
#include "memfit/cli/verbs.h"
#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/report/snapshot_html.h"
#include "memfit/report/snapshot_report.h"
#include "memfit/snapshot/snapshot_reader.h"

namespace memfit::cli {
namespace {

struct ReportArguments {
  std::string file, out, min_size, device_memory;
  std::optional<std::uint32_t> from, to;
  bool html = false, json = false, last_step = false, force = false;
};

void run_report(const ReportArguments& args) {
  if (args.html && args.json) throw UsageError("--html and --json: choose one.");
  if (args.from && args.to && *args.from >= *args.to)
    throw UsageError(fmt::format("--from {} is not before --to {}.", *args.from, *args.to));
  analysis::ExplainOptions options;
  options.from = args.from;
  options.to = args.to;
  options.last_step = args.last_step;
  if (!args.min_size.empty()) options.min_size = parse_size(args.min_size, "--min-size").count();
  if (!args.device_memory.empty()) options.device_memory = parse_size(args.device_memory, "--device-memory").count();
  const std::string out = args.out.empty() ? args.file + ".html" : args.out;
  const Replace replace = args.force ? Replace::Yes : Replace::No;
  if (args.html) check_output_file(out, "--out", replace);
  const trace::AllocatorSnapshot snapshot = snapshot::read_allocator_snapshot(args.file);
  const analysis::Explanation explanation = analysis::explain(snapshot, options);
  if (args.html) {
    write_output_file(out, report::snapshot_html(explanation), replace);
    fmt::print("{}\nNext: open {} in a browser\n", out, out);
  } else if (args.json) {
    fmt::print("{}\n", report::json_text(report::explain_json(explanation)));
  } else {
    fmt::print("{}\nNext: memfit report {} --html    the same over time\n", report::explain_text(explanation),
               args.file);
  }
}

}  // namespace

void add_report(CLI::App& app, Context& context) {
  auto args = std::make_shared<ReportArguments>();
  CLI::App* verb = app.add_subcommand("report", "write a memory snapshot as an HTML page that shows it over time");
  verb->add_option("FILE", args->file, "A memory snapshot")->required();
  verb->add_flag("--html", args->html, "Write a page (FILE.html, or --out)");
  verb->add_option("--out", args->out, "Where to write the page");
  verb->add_flag("--force", args->force, "Replace a page that is there");
  verb->add_option("--from", args->from, "First event to look at");
  verb->add_option("--to", args->to, "Event to stop before");
  verb->add_flag("--last-step", args->last_step, "Look at the last whole training step");
  verb->add_option("--min-size", args->min_size, "Do not list blocks below this size (1MiB)");
  verb->add_option("--device-memory", args->device_memory, "Size of the device (80GiB), where you know it");
  verb->add_flag("--json", args->json, "Print JSON");
  verb->callback([args] { run_report(*args); });
  (void)context;
}

}  // namespace memfit::cli
