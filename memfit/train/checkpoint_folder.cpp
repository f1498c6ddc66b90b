#include "memfit/train/checkpoint_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "memfit/core/error.h"
#include "memfit/core/output_file.h"

namespace memfit::train {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr const char* kTensors = "/tensors.safetensors";
constexpr const char* kState = "/state.json";
constexpr int kFormat = 1;

void sync_folder(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return;
  ::fsync(file);
  ::close(file);
}

SavedRun open_run(std::int64_t step, const std::string& path) {
  SavedRun out;
  out.step = step;
  out.path = path;
  std::ifstream file(path + kState);
  const json state = json::parse(file, nullptr, false);
  if (!state.is_object() || state.value("format", 0) != kFormat || !state.contains("tensors") || !state.contains("state")) {
    throw BadInput(path + kState, 0, "is no state of this version");
  }
  out.tensors = std::make_unique<TensorFile>(path + kTensors);
  const FileSum sum = out.tensors->sum();
  const FileSum wanted{state["tensors"].value("bytes", std::uint64_t{0}), state["tensors"].value("crc32", std::uint32_t{0})};
  if (sum.bytes != wanted.bytes || sum.crc != wanted.crc) {
    throw BadInput(path + kTensors, 0, fmt::format("{} bytes with CRC-32 {:08x}; {} with {:08x} were written", sum.bytes, sum.crc, wanted.bytes, wanted.crc));
  }
  out.state = state["state"];
  return out;
}

}  // namespace

CheckpointFolder::CheckpointFolder(const std::string& path, int keep) : path_(path), keep_(keep) {
  if (keep < 2) throw UsageError(fmt::format("CheckpointFolder: keep is {}; at least 2 are kept, so that one is always whole.", keep));
  std::error_code error;
  fs::create_directories(path, error);
  if (!fs::is_directory(path)) throw UsageError(fmt::format("checkpoint_dir: \"{}\" cannot be made a folder ({}).", path, error.message()));
}

std::string CheckpointFolder::path_of(std::int64_t step) const { return fmt::format("{}/step-{:09}", path_, step); }

std::vector<std::int64_t> CheckpointFolder::steps() const {
  std::vector<std::int64_t> out;
  for (const auto& entry : fs::directory_iterator(path_)) {
    const std::string name = entry.path().filename();
    if (name.rfind("step-", 0) != 0 || name.find_first_not_of("0123456789", 5) != std::string::npos || name.size() < 6 || name.size() > 23) continue;
    out.push_back(std::stoll(name.substr(5)));
  }
  std::sort(out.rbegin(), out.rend());
  return out;
}

std::string CheckpointFolder::save(std::int64_t step, const std::vector<NamedTensor>& tensors, const json& state) const {
  for (const auto& entry : fs::directory_iterator(path_)) {  // of runs that were killed while they wrote
    if (entry.path().filename().string().rfind(".writing-", 0) == 0) fs::remove_all(entry.path());
  }
  const std::string temporary = fmt::format("{}/.writing-{}-{}", path_, step, ::getpid());
  const std::string path = path_of(step);
  fs::create_directory(temporary);
  try {
    const FileSum sum = write_tensor_file(temporary + kTensors, tensors);
    const json whole = {{"format", kFormat}, {"step", step}, {"tensors", {{"bytes", sum.bytes}, {"crc32", sum.crc}}}, {"state", state}};
    write_output_file(temporary + kState, whole.dump(1), Replace::Yes);
    sync_folder(temporary);
    if (fs::exists(path)) fs::rename(path, temporary + ".old");
    fs::rename(temporary, path);
    sync_folder(path_);
  } catch (...) {
    std::error_code ignored;
    fs::remove_all(temporary, ignored);
    throw;
  }
  fs::remove_all(temporary + ".old");
  const std::vector<std::int64_t> all = steps();
  for (std::size_t i = static_cast<std::size_t>(keep_); i < all.size(); ++i) {
    if (all[i] < step) fs::remove_all(path_of(all[i]));
  }
  return path;
}

std::optional<SavedRun> CheckpointFolder::latest() const {
  std::vector<std::string> passed_over;
  for (const std::int64_t step : steps()) {
    try {
      SavedRun run = open_run(step, path_of(step));
      run.passed_over = std::move(passed_over);
      return run;
    } catch (const BadInput& e) {
      passed_over.push_back(e.what());
    }
  }
  if (passed_over.empty()) return std::nullopt;
  throw Error(ExitStatus::BadInput, fmt::format("{}: no checkpoint can be used: {}. Name another folder to begin anew.", path_, fmt::join(passed_over, "; ")));
}

}  // namespace memfit::train
