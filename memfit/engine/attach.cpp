// The preload library's way in: environment variables to a running engine.
#include <dlfcn.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <pthread.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>

#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/device/process_memory.h"
#include "memfit/core/output_file.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/recording_file.h"
#include "memfit/trace/run_status.h"

namespace memfit::engine {
namespace {

std::string variable(const char* name) {
  const char* text = std::getenv(name);
  return text == nullptr ? "" : text;
}

trace::RunStatus* status = nullptr;
RecordingFile* recording = nullptr;

void save_recording(bool final) {
  const std::string text = recording->save(final);
  trace::set_text(status->message, text);
  // Without `memfit run` or `memfit record` above us nobody else says it.
  if (final && !text.empty() && variable("MEMFIT_STATUS_DIR").empty() && variable("MEMFIT_QUIET") != "1") {
    std::fprintf(stderr, "memfit: %s\n", text.c_str());
  }
}

void start_recording(const std::string& path, std::int64_t rank) {
  Recorder& recorder = Engine::instance().start_recording();
  recording = new RecordingFile(recorder, rank < 0 ? path : path_with_word(path, fmt::format("rank{}", rank)), variable("MEMFIT_FORCE") == "1");
  recorder.when_sure([] {
    if (status != nullptr) save_recording(false);
  });
}

void at_exit() {
  if (status == nullptr) return;
  Engine& engine = Engine::instance();
  if (recording != nullptr) save_recording(true);
  engine.publish();
  std::size_t i = 0;
  for (const auto& holder : memory::CpuAllocator::instance().holders_at_peak()) {
    if (i == trace::RunStatus::kHolders) break;
    status->largest_holders[i].bytes = holder.bytes;
    trace::set_text(status->largest_holders[i].op, holder.op);
    ++i;
  }
  status->peak_rss_bytes = device::peak_resident_memory().count();
  status->finished = 1;
}

int attach(std::string& message) {
  const std::string rank = variable("RANK").empty() ? "-" : variable("RANK");
  const std::string attached = variable("MEMFIT_ATTACHED");
  if (!attached.empty()) {
    const auto colon = attached.find(':');
    const std::string owner_rank = colon == std::string::npos ? "" : attached.substr(colon + 1);
    if (attached.substr(0, colon) != std::to_string(getpid()) && owner_rank == rank) return 1;
  }
  const std::string tensor_text = variable("MEMFIT_TENSOR_MEMORY");
  const Bytes limit = tensor_text.empty() ? Bytes() : parse_size(tensor_text, "MEMFIT_TENSOR_MEMORY");
  const std::string memory_text = variable("MEMFIT_MEMORY");
  const Bytes memory = memory_text.empty() ? Bytes() : parse_size(memory_text, "MEMFIT_MEMORY");
  const std::string record = variable("MEMFIT_RECORD");
  if (!record.empty() && (!tensor_text.empty() || !memory_text.empty())) {
    throw UsageError("MEMFIT_RECORD: a step is recorded without a limit. Leave out MEMFIT_TENSOR_MEMORY and MEMFIT_MEMORY.");
  }
  status = trace::create_run_status(variable("MEMFIT_STATUS_DIR"));
  if (status == nullptr) throw Error(ExitStatus::Failed, fmt::format("MEMFIT_STATUS_DIR: no status file can be made in \"{}\": {}", variable("MEMFIT_STATUS_DIR"), std::strerror(errno)));
  if (rank != "-") status->rank = std::atoll(rank.c_str());
  trace::set_text(status->torch_version, TORCH_VERSION);
  trace::set_text(status->device, "cpu");
  status->limit_tensor_bytes = limit.count();
  Engine& engine = Engine::instance();
  engine.start(variable("MEMFIT_DOOR"), variable("MEMFIT_VERIFY") == "1", status);
  trace::set_text(status->door, name_of(engine.door()));
  if (!record.empty()) start_recording(record, status->rank);
  const std::string offload = variable("MEMFIT_OFFLOAD");
  if (!offload.empty()) {
    const std::string most = variable("MEMFIT_OFFLOAD_LIMIT");
    engine.set_offload(offload, most.empty() ? Bytes() : parse_size(most, "MEMFIT_OFFLOAD_LIMIT"));
  }
  engine.set_planning(variable("MEMFIT_NO_PLAN") != "1");
  engine.set_limit(limit.count());
  if (memory.count() != 0) {
    status->limit_memory_bytes = memory.count();
    const Bytes fixed = device::resident_memory();
    if (memory <= fixed) {
      throw Error(ExitStatus::DoesNotFit, fmt::format("--memory: {} is below what the program takes without any tensor, {} so far. "
                                                      "Give it more than that, for example --memory {}MiB.",
                                                      format_bytes(memory), format_bytes(fixed), fixed.count() * 3 / 2 / (1 << 20)));
    }
    engine.set_memory_limit(memory.count());
    using SetAllocHook = void (*)(void (*)(std::size_t));
    if (auto set = reinterpret_cast<SetAllocHook>(dlsym(RTLD_DEFAULT, "memfit_preload_set_large_alloc_hook"))) {
      set([](std::size_t bytes) { Engine::instance().before_other_memory(bytes); });
    }
  }
  cover_thread(true);
  using SetThreadHook = void (*)(void (*)());
  if (auto set = reinterpret_cast<SetThreadHook>(dlsym(RTLD_DEFAULT, "memfit_preload_set_thread_hook"))) {
    set([] { cover_thread(true); });
  }
  pthread_atfork(nullptr, nullptr, [] { status = nullptr; });
  setenv("MEMFIT_ATTACHED", fmt::format("{}:{}", getpid(), rank).c_str(), 1);
  std::atexit(at_exit);
  status->attached = 1;
  return 0;
}

}  // namespace

/// Called once by the preload library when libtorch is in the process. 0: attached; 1: passive, another process is the
/// one that is watched; 2: usage is wrong, 3: the limit cannot be met, and `message` says why.
extern "C" __attribute__((visibility("default"))) int memfit_attach(char* message, std::size_t capacity) {
  std::string text;
  int result = 2;
  try {
    result = attach(text);
  } catch (const Error& error) {
    text = error.what();
    result = error.status() == ExitStatus::DoesNotFit ? 3 : 2;
  } catch (const std::exception& error) {
    text = error.what();
  }
  if (capacity > 0) {
    const std::size_t n = std::min(text.size(), capacity - 1);
    std::memcpy(message, text.data(), n);
    message[n] = '\0';
  }
  return result;
}

/// The page of the attached process, for its report where no `memfit run` waits for it; nullptr when it is not attached.
extern "C" __attribute__((visibility("default"))) trace::RunStatus* memfit_run_status() { return status; }

}  // namespace memfit::engine
