// memfit export: the weights of a run's newest checkpoint as a safetensors file with Python's names.
#include <fmt/format.h>

#include <filesystem>
#include <memory>

#include "memfit/core/error.h"
#include "memfit/core/output_file.h"
#include "memfit/train/checkpoint_folder.h"
#include "memfit/train/tensor_file.h"
#include "memfit/train_cli/verbs.h"

namespace memfit::train_cli {
namespace {

struct Options {
  std::string checkpoints, output;
  bool averages = false, force = false;
};

void run(const Options& o) {
  if (!o.output.ends_with(".safetensors")) throw UsageError(fmt::format("-o {}: weights are written as NAME.safetensors, which safetensors.torch.load_file reads.", o.output));
  if (!std::filesystem::is_directory(o.checkpoints)) throw UsageError(fmt::format("{} is no folder of checkpoints (memfit train --checkpoints).", o.checkpoints));
  check_output_file(o.output, "-o", o.force ? Replace::Yes : Replace::No);
  const auto saved = train::CheckpointFolder(o.checkpoints).latest();
  if (!saved) throw UsageError(fmt::format("{} holds no checkpoint.", o.checkpoints));
  for (const std::string& line : saved->passed_over) fmt::print(stderr, "not used: {}\n", line);
  std::vector<std::pair<std::string, std::string>> names;
  if (saved->state.contains("names")) {
    for (const auto& [name, stored] : saved->state["names"].items()) names.emplace_back(name, stored);
  } else {
    for (const std::string& stored : saved->tensors->names()) {
      const std::size_t slash = stored.find('/');
      if (stored.starts_with("model/") || stored.starts_with("buffer/")) names.emplace_back(stored.substr(slash + 1), stored);
    }
  }
  std::vector<train::NamedTensor> tensors;
  bool averaged = false;
  for (const auto& [name, stored] : names) {
    at::Tensor tensor;
    if (o.averages && stored.starts_with("model/")) tensor = saved->tensors->load("average/" + stored.substr(6));
    averaged |= tensor.defined();
    if (!tensor.defined()) tensor = saved->tensors->load(stored);
    if (!tensor.defined()) throw Error(ExitStatus::BadInput, fmt::format("{} lacks {}, which its state names.", saved->path, stored));
    tensors.push_back({name, tensor});
  }
  if (o.averages && !averaged) throw UsageError(fmt::format("{} holds no averages; train with --ema.", saved->path));
  train::save_tensors(o.output, tensors);
  fmt::print("{}: {} tensors of step {}\n", o.output, tensors.size(), saved->step);
  fmt::print(stderr, "Next: model.load_state_dict(safetensors.torch.load_file(\"{}\"))\n", o.output);
}

}  // namespace

void add_export(CLI::App& app) {
  const auto o = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("export", "Write the weights of a run for Python");
  verb->add_option("CHECKPOINTS", o->checkpoints, "Folder of memfit train --checkpoints")->required();
  verb->add_option("-o,--output", o->output, "NAME.safetensors")->required();
  verb->add_flag("--averages", o->averages, "The averages of --ema instead of the weights");
  verb->add_flag("--force", o->force, "Replace the file");
  verb->callback([o] { run(*o); });
}

}  // namespace memfit::train_cli
