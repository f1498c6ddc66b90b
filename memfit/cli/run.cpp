// memfit run: holds a program under a memory limit and reports.
#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>

#include "memfit/cli/verbs.h"
#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/plan/traffic_probe.h"
#include "memfit/preload/environment.h"
#include "memfit/preload/launch.h"
#include "memfit/preload/machine_memory.h"
#include "memfit/report/run_report.h"

namespace memfit::cli {
namespace {

struct RunFlags {
  std::string memory;
  std::string tensor_memory;
  std::string report;
  bool verify = false;
  bool quiet = false;
  bool force = false;
  bool no_plan = false;
  std::string offload;
  std::string offload_limit;
};

std::optional<Bytes> limit(const std::string& text, const char* flag) {
  if (text.empty()) return std::nullopt;
  const Bytes size = parse_size(text, flag, preload::machine_memory());
  if (size == Bytes(0)) {
    throw UsageError(
        fmt::format("{}: \"{}\" leaves no memory. Write a limit above zero, for example {} 512MiB.", flag, text, flag));
  }
  return size;
}

/// The rank that a launcher gave this very process: its report is then that rank's.
std::int64_t own_rank() {
  const char* text = std::getenv("RANK");
  if (text == nullptr || *text < '0' || *text > '9') return -1;
  char* end = nullptr;
  const long long rank = std::strtoll(text, &end, 10);
  return *end == '\0' ? rank : -1;
}

/// The page of the program itself among those of all processes that attached: its own pid, else (a shell script, a
/// launcher that is no PyTorch program) the process of this one's rank, or of none like this one, that did most.
/// nullptr when there is none.
const trace::RunStatus* main_page(const preload::LaunchResult& result) {
  const trace::RunStatus* best = nullptr;
  for (const auto& page : result.pages) {
    if (page->pid == static_cast<std::uint64_t>(result.pid)) return page.get();
    if (page->rank == own_rank() && (best == nullptr || page->ops.load() > best->ops.load())) best = page.get();
  }
  return best;
}

class Reporter {
 public:
  Reporter(const RunFlags& flags, const preload::LaunchOptions& options, const std::vector<std::string>& program,
           const preload::LaunchResult& result)
      : flags_(flags), result_(result) {
    facts_.program = program;
    facts_.exit_status = result.exit_status;
    facts_.signal = result.signal;
    facts_.wall = result.wall;
    facts_.memory_limit = options.memory;
    facts_.tensor_memory_limit = options.tensor_memory;
    if (!result.refusals.empty()) facts_.refusal = result.refusals.front();
  }

  /// Write every report and say one line for each process of interest. Returns false when a report could not be
  /// written.
  bool report() {
    for (const std::string& complaint : result_.complaints) say(complaint);
    const trace::RunStatus* main = main_page(result_);
    const bool only_ranks = main == nullptr && !result_.pages.empty();
    report_process(main, report::rank_report_path(flags_.report, own_rank()), !only_ranks);
    std::size_t others = 0;
    for (const auto& page : result_.pages) {
      if (page.get() == main) continue;
      std::string path = report::rank_report_path(flags_.report, page->rank);
      if (page->rank < 0) path = report::numbered_report_path(flags_.report, ++others + 1);
      report_process(page.get(), path, page->ops.load() > 0);
    }
    return written_;
  }

  bool refused() const {
    for (const auto& page : result_.pages) {
      if (report::ended_by_refusal(*page, facts_)) return true;
    }
    return false;
  }

 private:
  void say(const std::string& text) const {
    if (!flags_.quiet) fmt::print(stderr, "memfit: {}\n", text);
  }

  void report_process(const trace::RunStatus* page, const std::string& path, bool worth_a_line) {
    report::RunFacts facts = facts_;
    facts.peak_rss = peak_rss(page);
    if (!flags_.report.empty()) {
      // A name or an argument may hold bytes that are no UTF-8.
      const auto json =
          report::run_report_json(page, facts).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
      try {
        write_output_file(path, json + "\n", flags_.force ? Replace::Yes : Replace::No);
      } catch (const Error& error) {
        fmt::print(stderr, "memfit run: {}\n", error.what());  // also with --quiet: a result is missing
        written_ = false;
      }
    }
    if (!worth_a_line) return;
    const std::string rank = page != nullptr && page->rank >= 0 ? fmt::format("rank {}: ", page->rank) : "";
    const std::string where = flags_.report.empty() ? "" : "; report: " + path;
    say(rank + report::run_report_line(page, facts) + where);
    // A refusal's text was the program's to show.
    if (page != nullptr && page->message[0] != '\0' && page->refusals.load() == 0) say(rank + page->message);
    if (page != nullptr && report::ended_by_refusal(*page, facts)) {
      say(fmt::format("{}does not fit. The smallest limit that gets past this point: {}", rank, next_limit(*page)));
    }
  }

  /// What the process last said of its own peak counts when it got to its end; the system's count includes children it
  /// waited for.
  std::optional<Bytes> peak_rss(const trace::RunStatus* page) const {
    const bool is_program = page == nullptr || page->pid == static_cast<std::uint64_t>(result_.pid);
    if (page != nullptr && (page->finished.load() != 0 || !is_program)) return std::nullopt;
    return result_.largest_rss;
  }

  static std::string next_limit(const trace::RunStatus& page) {
    const std::uint64_t mib = (page.least_limit_bytes.load() >> 20) + 1;  // rounded up: what is printed must be enough
    return fmt::format("{} {}MiB", page.limit_tensor_bytes.load() != 0 ? "--tensor-memory" : "--memory", mib);
  }

  const RunFlags& flags_;
  const preload::LaunchResult& result_;
  report::RunFacts facts_;
  bool written_ = true;
};

int run(const RunFlags& flags, const std::vector<std::string>& program) {
  if (program.empty()) {
    throw UsageError(
        "no program given. Put it after \"--\", for example memfit run --tensor-memory 512MiB -- python train.py.");
  }
  preload::LaunchOptions options;
  options.memory = limit(flags.memory, "--memory");
  options.tensor_memory = limit(flags.tensor_memory, "--tensor-memory");
  options.verify = flags.verify;
  options.quiet = flags.quiet;
  options.plan = !flags.no_plan;
  if (!flags.offload_limit.empty() && flags.offload.empty()) throw UsageError("--offload-limit needs --offload DIR.");
  if (!flags.offload.empty()) {
    const plan::OffloadPlace place = plan::probe_offload_place(flags.offload);
    options.offload = std::filesystem::absolute(flags.offload).string();   // the program may change its folder
    if (!flags.offload_limit.empty()) options.offload_limit = parse_size(flags.offload_limit, "--offload-limit", place.free);
  }
  if (!flags.report.empty()) {
    check_output_file(report::rank_report_path(flags.report, own_rank()), "--report",
                      flags.force ? Replace::Yes : Replace::No);
  }
  preload::LaunchResult result;
  try {
    result = preload::launch(program, options);
  } catch (const preload::CannotStart& error) {
    fmt::print(stderr, "memfit run: {}\n", error.what());
    return error.status();
  }
  Reporter reporter(flags, options, program, result);
  const bool written = reporter.report();
  if (reporter.refused()) return static_cast<int>(ExitStatus::DoesNotFit);
  if (result.exit_status == 0 && !written) return static_cast<int>(ExitStatus::Failed);
  preload::end_as(result);
}

}  // namespace

void add_run(CLI::App& app, Context& context) {
  auto flags = std::make_shared<RunFlags>();
  CLI::App* verb = app.add_subcommand("run", "run a PyTorch program inside a memory limit");
  verb->add_option("--memory", flags->memory, "limit of the process's resident memory, libraries and all")
      ->type_name("SIZE")
      ->envname(preload::kMemory);
  verb->add_option("--tensor-memory", flags->tensor_memory, "limit of the bytes of its tensors")
      ->type_name("SIZE")
      ->envname(preload::kTensorMemory);
  verb->add_option("--report", flags->report, "write what happened to this file, as JSON")
      ->type_name("FILE")
      ->envname(preload::kReport);
  verb->add_flag("--verify", flags->verify, "compare every recomputed value with the original")
      ->envname(preload::kVerify);
  verb->add_flag("--quiet", flags->quiet, "say nothing at the end")->envname(preload::kQuiet);
  verb->add_flag("--force", flags->force, "replace a report that exists");
  verb->add_option("--offload", flags->offload, "move tensors to files in this folder where that is cheaper than making them again")
      ->type_name("DIR")
      ->envname(preload::kOffload);
  verb->add_option("--offload-limit", flags->offload_limit, "use at most this much of it")
      ->type_name("SIZE")
      ->envname(preload::kOffloadLimit);
  verb->add_flag("--no-plan", flags->no_plan, "decide step by step, without planning ahead")->envname(preload::kNoPlan);
  verb->footer(
      "PROGRAM and its arguments come after \"--\": memfit run --tensor-memory 512MiB -- python train.py\n"
      "SIZE is 123456B, 150MiB, 0.5GiB or 80% (of the machine's or the container's memory, whichever is smaller).\n"
      "The program keeps its arguments, input, output, exit status and signals.\n"
      "3 is the exit status of a program that did not fit and did not handle it.");
  context.program_verbs.push_back(verb);
  verb->callback([flags, &context] { context.exit_status = run(*flags, context.program); });
}

}  // namespace memfit::cli
