// memfit plan: from a recorded step, what every limit would cost, and what would be done under one.
#include <fmt/format.h>

#include <charconv>
#include <fstream>
#include <memory>
#include <sstream>

#include "memfit/cli/verbs.h"
#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/plan/plan_json.h"
#include "memfit/plan/study.h"
#include "memfit/plan/traffic_probe.h"
#include "memfit/report/plan_report.h"

namespace memfit::cli {
namespace {

struct PlanArguments {
  std::string file, tensor_memory, offload, offload_limit, batch, html, schedule, check;
  double effort = 1.0;
  int points = 12;
  bool json = false, force = false, no_pack = false;
};

std::pair<std::uint64_t, std::uint64_t> parse_range(const std::string& text) {
  const std::size_t dots = text.find("..");
  std::uint64_t first = 0, last = 0;
  auto number = [&](std::string_view part, std::uint64_t& to) {
    const auto [end, error] = std::from_chars(part.data(), part.data() + part.size(), to);
    return error == std::errc() && end == part.data() + part.size() && to > 0;
  };
  const std::string_view view = text;
  if (dots == std::string::npos || !number(view.substr(0, dots), first) || !number(view.substr(dots + 2), last) || first > last || last > (1ull << 40))
    throw UsageError(fmt::format("--batch: \"{}\" is no range of batch sizes. Write it like --batch 8..256.", text));
  return {first, last};
}

std::string read_text(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw UsageError(fmt::format("--check: cannot read {}.", path));
  std::ostringstream text;
  text << in.rdbuf();
  return text.str();
}

void check_schedule(const PlanArguments& args, const trace::Trace& trace, const plan::Traffic& traffic) {
  if (trace.steps.empty()) throw UsageError("The trace holds no step.");
  const plan::Plan schedule = plan::plan_from_json(read_text(args.check), args.check);
  fmt::print("{}\n", report::simulation_json(plan::simulate(trace.steps.front(), schedule, traffic)).dump(args.json ? -1 : 2));
}

void run_plan(const PlanArguments& args) {
  const Replace replace = args.force ? Replace::Yes : Replace::No;
  if (!args.html.empty()) check_output_file(args.html, "--html", replace);
  if (!args.schedule.empty()) check_output_file(args.schedule, "--schedule", replace);
  if (!args.schedule.empty() && args.tensor_memory.empty()) throw UsageError("--schedule needs a limit: give --tensor-memory SIZE too.");
  if (!args.offload_limit.empty() && args.offload.empty()) throw UsageError("--offload-limit needs --offload DIR.");
  const trace::Trace trace = trace::read_mft(args.file);
  plan::StudyOptions options;
  options.effort = args.effort;
  options.curve_points = args.points;
  options.pack = !args.no_pack;
  Bytes largest;
  for (const trace::Step& step : trace.steps) largest = std::max(largest, trace::peak_bytes(step));
  if (!args.tensor_memory.empty()) options.limit = parse_size(args.tensor_memory, "--tensor-memory", largest);
  if (!args.batch.empty()) options.batches = parse_range(args.batch);
  if (!args.offload.empty()) {
    const plan::OffloadPlace place = plan::probe_offload_place(args.offload);
    options.offload = plan::OffloadTarget{args.offload_limit.empty() ? place.free : parse_size(args.offload_limit, "--offload-limit", place.free), place.traffic};
  }
  if (!args.check.empty()) {
    check_schedule(args, trace, options.offload ? options.offload->traffic : plan::Traffic{});
    return;
  }
  const plan::Study study = plan::study(trace, options);
  if (!args.schedule.empty()) write_output_file(args.schedule, plan::plan_to_json(*study.plan).dump() + "\n", replace);
  if (!args.html.empty()) write_output_file(args.html, report::plan_study_html(study), replace);
  if (args.json)
    fmt::print("{}\n", report::plan_study_json(study).dump());
  else
    fmt::print("{}", report::plan_study_text(study));
}

}  // namespace

void add_plan(CLI::App& app, Context& context) {
  auto args = std::make_shared<PlanArguments>();
  CLI::App* verb = app.add_subcommand("plan", "From a recorded step: what every memory limit would cost, and the plan for one");
  verb->add_option("FILE", args->file, "A trace written by `memfit record` (.mft)")->required();
  verb->add_option("--tensor-memory", args->tensor_memory, "Show the plan for this limit: 150MiB, 2GiB, or 60% of the recorded peak");
  verb->add_option("--offload", args->offload, "Plan with offloading to this folder; its speed is measured (64 MiB are written and removed)");
  verb->add_option("--offload-limit", args->offload_limit, "Use at most this much of it");
  verb->add_option("--batch", args->batch, "Predict peak and time for these batch sizes: 8..256");
  verb->add_option("--html", args->html, "Write a page with the memory/time curve");
  verb->add_flag("--json", args->json, "Print JSON");
  verb->add_flag("--force", args->force, "Replace files that exist");
  verb->add_flag("--no-pack", args->no_pack, "Plan without packing");
  verb->add_option("--effort", args->effort, "Search this much harder (1); 10 is good for the last per cent")->check(CLI::Range(0.001, 1000.0));
  verb->add_option("--points", args->points, "Limits on the curve (12); 0 leaves the curve out")->check(CLI::Range(0, 200));
  verb->add_option("--schedule", args->schedule, "Write the plan's instructions as JSON");
  verb->add_option("--check", args->check, "Only judge this schedule (as --schedule writes it): possible? peak? time?");
  verb->callback([args] { run_plan(*args); });
  (void)context;
}

}  // namespace memfit::cli
