#include "memfit/engine/recording_file.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <cmath>
#include <filesystem>
#include <fstream>

#include "memfit/core/output_file.h"
#include "memfit/core/version.h"
#include "memfit/plan/extrapolate.h"
#include "memfit/trace/mft.h"

namespace memfit::engine {
namespace {

using Kind = Recorder::Recording::Kind;

std::string own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string words;
  for (std::string word; std::getline(file, word, '\0');) words += (words.empty() ? "" : " ") + word;
  return words;
}

trace::TraceInfo info() {
  trace::TraceInfo out;
  out.program = own_words();
  out.torch_version = TORCH_VERSION;
  out.device = "cpu";
  out.recorder = std::string(version());
  return out;
}

std::string summary(const Recorder::Recording& recording) {
  const trace::Step& step = recording.step;
  return fmt::format("{} ops, {} values, peak {}, {:.4g} ms", step.ops.size(), step.values.size(),
                     format_bytes(trace::peak_bytes(step)), step.seconds.count() * 1e3);
}

}  // namespace

RecordingFile::RecordingFile(Recorder& recorder, const std::string& path, bool force)
    : recorder_(recorder), path_(std::filesystem::absolute(path).string()), force_(force) {
  check_output_file(path_, "MEMFIT_RECORD", force ? Replace::Yes : Replace::No);
}

std::string RecordingFile::save(bool final) noexcept {
  std::lock_guard lock(mutex_);
  try {
    const auto recording = recorder_.recording();
    if (!recording || (recording->kind != Kind::Step && !final)) {
      if (!final || recorder_.ops() == 0) return "";
      return fmt::format("no step that repeats was found in {} ops, and they are too many to be kept as one (at most {}): "
                         "nothing is recorded",
                         recorder_.ops(), Recorder::kMostOps);
    }
    if (const auto fault = trace::find_fault(recording->step)) {
      return fmt::format("what was recorded contradicts itself ({}), which is an error of memfit: nothing is written", *fault);
    }
    std::vector<trace::Step> steps{recording->step};
    if (recording->other && !trace::find_fault(*recording->other)) steps.push_back(*recording->other);
    if (steps.size() == 2) plan::name_batches(steps[0], steps[1]);
    trace::write_mft({info(), steps}, path_, force_);
    force_ = true;   // from now on it is our own
    std::string what = fmt::format("recorded one step, the latest of {}", recording->steps);
    if (steps.size() == 2 && steps[0].batch) what += fmt::format(", at batch size {}, and one at {}", *steps[0].batch, *steps[1].batch);
    if (recording->kind == Kind::Updates) {
      what = fmt::format("no step that repeats was found, so the ops between two updates of parameters are recorded, those with the "
                         "highest peak of {}", recording->steps);
    } else if (recording->kind == Kind::WholeRun) {
      what = "no step that repeats was found, so the whole run is recorded as one step";
    }
    return fmt::format("{}: {}; {}", what, summary(*recording), path_);
  } catch (const std::exception& error) {
    return fmt::format("nothing is recorded: {}", error.what());
  }
}

}  // namespace memfit::engine
