// memfit record: runs a program without a limit and writes one of its training steps to a file, for memfit plan.
#include <fmt/format.h>

#include <cstdio>
#include <filesystem>
#include <memory>

#include "memfit/cli/verbs.h"
#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/preload/environment.h"
#include "memfit/preload/launch.h"

namespace memfit::cli {
namespace {

namespace fs = std::filesystem;

struct RecordFlags {
  std::string output = "step.mft";
  bool quiet = false;
  bool force = false;
};

/// What each process says of its recording. Returns whether there is a file.
bool say(const RecordFlags& flags, const preload::LaunchResult& result) {
  std::string file;   // the first that there is
  std::size_t said = 0;
  for (const auto& page : result.pages) {
    const std::string path = page->rank < 0 ? flags.output : path_with_word(flags.output, fmt::format("rank{}", page->rank));
    std::error_code missing;
    const bool there = page->message[0] != '\0' && fs::exists(path, missing);
    if (there && file.empty()) file = path;
    if (page->message[0] == '\0') continue;
    ++said;
    const std::string rank = page->rank >= 0 ? fmt::format("rank {}: ", page->rank) : "";
    if (!flags.quiet || !there) fmt::print(stderr, "memfit: {}{}\n", rank, page->message);
  }
  for (const std::string& complaint : result.complaints) fmt::print(stderr, "memfit: {}\n", complaint);
  if (said == 0 && result.refusals.empty()) {
    const char* why = result.pages.empty() ? "the program used no libtorch" : "the program ended before a step could be told from the next";
    fmt::print(stderr, "memfit: {}: nothing is recorded\n", why);
  }
  if (!file.empty() && !flags.quiet) fmt::print(stderr, "Next: memfit plan {}\n", file);
  return !file.empty();
}

int record(const RecordFlags& flags, const std::vector<std::string>& program) {
  if (program.empty()) {
    throw UsageError("no program given. Put it after \"--\", for example memfit record -o step.mft -- python train.py.");
  }
  check_output_file(flags.output, "--output", flags.force ? Replace::Yes : Replace::No);
  preload::LaunchOptions options;
  options.record = fs::absolute(flags.output).string();   // the program may change its folder
  options.replace_record = flags.force;
  options.quiet = flags.quiet;
  preload::LaunchResult result;
  try {
    result = preload::launch(program, options);
  } catch (const preload::CannotStart& error) {
    fmt::print(stderr, "memfit record: {}\n", error.what());
    return error.status();
  }
  say(flags, result);
  preload::end_as(result);
}

}  // namespace

void add_record(CLI::App& app, Context& context) {
  auto flags = std::make_shared<RecordFlags>();
  CLI::App* verb = app.add_subcommand("record", "run a PyTorch program and record one of its training steps, for memfit plan");
  verb->add_option("-o,--output", flags->output, "file for the step (step.mft)")->type_name("FILE")->envname(preload::kRecord);
  verb->add_flag("--quiet", flags->quiet, "say only what went wrong")->envname(preload::kQuiet);
  verb->add_flag("--force", flags->force, "replace a file that exists");
  verb->footer(
      "PROGRAM and its arguments come after \"--\": memfit record -o step.mft -- python train.py\n"
      "No limit is held. Steps are found by themselves: a few are enough. Without any that repeat the whole run is one step.\n"
      "The program keeps its arguments, input, output, exit status and signals.");
  context.program_verbs.push_back(verb);
  verb->callback([flags, &context] { context.exit_status = record(*flags, context.program); });
}

}  // namespace memfit::cli
