// Stands for the engine: attaches as the environment tells it and writes what happened, line by line, to the file
// $FAKE_LOG.
//   FAKE_ATTACH      what memfit_attach returns (0)
//   FAKE_NO_MEMORY_LIMIT   the engine takes no notice of MEMFIT_MEMORY
//   FAKE_OPS, FAKE_REFUSED_AT   counters of the status page: ops in all, and ops at the last refusal (none)
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "memfit/trace/run_status.h"

extern "C" bool fake_torch_is_initialised();
extern "C" int fake_library_answer();

namespace {

memfit::trace::RunStatus* page = nullptr;

void log_line(const char* what) {
  const char* path = getenv("FAKE_LOG");
  if (path == nullptr) return;
  char line[256];
  const char* rank = getenv("RANK");
  const int n = snprintf(line, sizeof line, "%s pid=%d rank=%s torch=%d\n", what, getpid(),
                         rank != nullptr ? rank : "-", static_cast<int>(fake_torch_is_initialised()));
  const int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || write(fd, line, static_cast<size_t>(n)) != n) abort();
  close(fd);
}

std::uint64_t number(const char* variable, std::uint64_t otherwise) {
  const char* text = getenv(variable);
  return text != nullptr ? strtoull(text, nullptr, 10) : otherwise;
}

}  // namespace

extern "C" int memfit_attach(char* message, size_t capacity) {
  if (fake_library_answer() != 42) abort();
  const int outcome = static_cast<int>(number("FAKE_ATTACH", 0));
  if (outcome != 0) {
    snprintf(message, capacity, "the fake engine says %d", outcome);
    return outcome;
  }
  const char* folder = getenv("MEMFIT_STATUS_DIR");
  page = memfit::trace::create_run_status(folder != nullptr ? folder : "");
  if (page == nullptr) abort();
  if (const char* rank = getenv("RANK")) page->rank = atoll(rank);
  memfit::trace::set_text(page->torch_version, "0.0.0");
  memfit::trace::set_text(page->device, "fake");
  page->limit_memory_bytes.store(getenv("FAKE_NO_MEMORY_LIMIT") == nullptr ? number("MEMFIT_MEMORY", 0) : 0);
  page->attached.store(1);
  page->peak_bytes.store(150 << 20);
  page->unlimited_peak_bytes.store(300 << 20);
  page->evictions.store(7);
  page->ops.store(number("FAKE_OPS", 1000));
  page->largest_holders[0].bytes = 100 << 20;
  memfit::trace::set_text(page->largest_holders[0].op, "aten::mm");
  memfit::trace::set_text(page->largest_holders[0].shape, "[10, 20]");
  if (getenv("FAKE_REFUSED_AT") != nullptr) {
    page->refusals.store(1);
    page->ops_at_last_refusal.store(number("FAKE_REFUSED_AT", 0));
    page->least_limit_bytes.store(200 << 20);
    page->limit_tensor_bytes.store(100 << 20);
  }
  log_line("attach");
  using SetHook = void (*)(void (*)());
  auto set_hook = reinterpret_cast<SetHook>(dlsym(RTLD_DEFAULT, "memfit_preload_set_thread_hook"));
  if (set_hook != nullptr) set_hook([] { log_line("thread"); });
  using SetLargeHook = void (*)(void (*)(size_t));
  auto set_large_hook = reinterpret_cast<SetLargeHook>(dlsym(RTLD_DEFAULT, "memfit_preload_set_large_alloc_hook"));
  if (set_large_hook != nullptr) {
    set_large_hook([](size_t bytes) {
      free(malloc(4 << 20));  // not announced: this is the engine's own
      char line[64];
      snprintf(line, sizeof line, "large %zu KiB", bytes >> 10);
      log_line(line);
    });
  }
  return 0;
}

extern "C" memfit::trace::RunStatus* memfit_run_status() { return page; }
