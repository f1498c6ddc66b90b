// libmemfit_preload.so: comes into every process under `memfit run` by LD_PRELOAD, waits until libtorch is there, and
// then loads the engine (libmemfit.so, beside this file) and attaches it. In a process without libtorch it does
// nothing. Not here: anything of the engine; starting programs (launch). Threads: any. Cost: without libtorch one look
// at the loaded libraries at start and after each dlopen.
//
// Written to need nothing but libc: compilers, shells and tools that the program starts inherit it.
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <string>

#include "memfit/preload/environment.h"
#include "memfit/trace/run_status.h"

namespace memfit::preload {
namespace {

// What memfit_attach, exported by the engine, returns.
enum Attach { kIsAttached = 0, kStaysPassive = 1, kIsRefused = 2, kDoesNotFit = 3 };
using AttachFunction = int (*)(char* message, size_t capacity);
using StatusFunction = trace::RunStatus* (*)();
// What libmemfit_exit_report.so exports (exit_report.h).
using CheckReportFunction = int (*)(const char* path, bool force, char* message, size_t capacity);
using WriteReportFunction = void (*)(const trace::RunStatus* status, const char* path, bool force, bool quiet);

constexpr char kTorchLibrary[] = "libtorch_cpu.so";
constexpr size_t kMessageBytes = 4096;

// Whether this process still waits for libtorch. Only ever goes to false.
std::atomic<bool> waiting{true};
std::atomic<unsigned long long> libraries_seen{0};
std::atomic<void (*)()> thread_hook{nullptr};
pthread_mutex_t attach_mutex = PTHREAD_MUTEX_INITIALIZER;
__thread bool attaching_here = false;  // the engine's own dlopen calls come through here too

trace::RunStatus* status_page = nullptr;
WriteReportFunction write_report = nullptr;  // without a supervisor that writes it
pid_t attached_pid = 0;

template <typename Function>
Function real(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

using DlopenFunction = void* (*)(const char*, int);
DlopenFunction real_dlopen() {
  static std::atomic<DlopenFunction> found{nullptr};  // constant-initialised: no guard, usable before any constructor
  DlopenFunction function = found.load(std::memory_order_relaxed);
  if (function == nullptr) {
    function = real<DlopenFunction>("dlopen");
    found.store(function, std::memory_order_relaxed);
  }
  return function;
}

const char* base_name(const char* path) {
  const char* slash = strrchr(path, '/');
  return slash != nullptr ? slash + 1 : path;
}

[[noreturn]] void refuse(int status, const char* message) {
  fprintf(stderr, "memfit: %s\n", message);
  // The supervisor must not take this process for one without libtorch.
  if (const char* folder = getenv(kStatusDir)) {
    char path[4096];
    const int n = snprintf(path, sizeof path, "%s/%ld.refused", folder, static_cast<long>(getpid()));
    const int fd =
        n > 0 && n < static_cast<int>(sizeof path) ? open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600) : -1;
    if (fd >= 0) {
      [[maybe_unused]] const ssize_t written = write(fd, message, strlen(message));
      close(fd);
    }
  }
  // Not exit(): we may be inside the constructors of a program that has not begun.
  _exit(status);
}

struct TorchSearch {
  char path[4096];
  unsigned long long libraries;  // ever loaded into this process
};

int look_at_library(dl_phdr_info* info, size_t, void* data) {
  auto* search = static_cast<TorchSearch*>(data);
  search->libraries = info->dlpi_adds;
  if (libraries_seen.load(std::memory_order_relaxed) == info->dlpi_adds) return 1;  // nothing new since the last look
  if (strcmp(base_name(info->dlpi_name), kTorchLibrary) != 0) return 0;
  if (strlen(info->dlpi_name) >= sizeof search->path) return 0;
  strcpy(search->path, info->dlpi_name);
  return 1;
}

/// Whether libtorch has been loaded since the last look, and from where.
bool find_torch(TorchSearch& search) {
  search.path[0] = '\0';
  search.libraries = 0;
  dl_iterate_phdr(look_at_library, &search);
  libraries_seen.store(search.libraries, std::memory_order_relaxed);
  return search.path[0] != '\0';
}

const char* own_rank() {
  const char* rank = getenv("RANK");
  return rank != nullptr && *rank != '\0' ? rank : "-";
}

/// Another process above us is attached for the same rank: then this is its loader worker, compiler or other helper.
bool belongs_to_attached_process() {
  const char* attached = getenv(kAttached);
  if (attached == nullptr) return false;
  char* rest = nullptr;
  const long pid = strtol(attached, &rest, 10);
  if (rest == attached || *rest != ':') return false;
  if (pid == static_cast<long>(getpid())) return false;  // the same process after exec
  const char* rank = own_rank();
  return strcmp(rank, "-") == 0 || strcmp(rank, rest + 1) == 0;
}

/// The parent of a process; 0 when there is none to be seen. Field 4 of /proc/PID/stat, after the name in parentheses.
long parent_of(long pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%ld/stat", pid);
  const int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[512];
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = '\0';
  const char* name_end = strrchr(text, ')');
  long parent = 0;
  if (name_end == nullptr || sscanf(name_end, ") %*c %ld", &parent) != 1) return 0;
  return parent;
}

/// The rank on the status page of a process; false when it has none.
bool page_rank(const char* folder, long pid, long long& rank) {
  char path[4096];
  if (snprintf(path, sizeof path, "%s/%ld.status", folder, pid) >= static_cast<int>(sizeof path)) return false;
  const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0) return false;
  int64_t value = -1;
  const bool ok = pread(fd, &value, sizeof value, offsetof(trace::RunStatus, rank)) == sizeof value;
  close(fd);
  rank = value;
  return ok;
}

/// The same question where a program gave its children an environment of its own making: ask the processes above us.
bool descends_from_attached_process() {
  const char* folder = getenv(kStatusDir);
  if (folder == nullptr) return false;
  const char* own = own_rank();
  long pid = parent_of(getpid());
  for (int depth = 0; pid > 1 && depth < 64; ++depth, pid = parent_of(pid)) {
    long long rank = -1;
    if (!page_rank(folder, pid, rank)) continue;
    if (strcmp(own, "-") == 0 || (rank >= 0 && strtoll(own, nullptr, 10) == rank)) return true;
  }
  return false;
}

/// libtorch's own word for its version ("2.13.0"), empty when it has none.
void torch_version(const char* library, char* version, size_t capacity) {
  *version = '\0';
  void* handle = real_dlopen()(library, RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) return;
  using Options = std::map<std::string, std::string>;
  using GetOptions = const Options& (*)();
  // const std::map<std::string, std::string>& caffe2::GetBuildOptions()
  auto get = reinterpret_cast<GetOptions>(dlsym(handle, "_ZN6caffe215GetBuildOptionsB5cxx11Ev"));
  if (get != nullptr) {
    for (const auto& [key, value] : get()) {
      if (strcmp(key.c_str(), "TORCH_VERSION") == 0) snprintf(version, capacity, "%s", value.c_str());
    }
  }
  dlclose(handle);
}

/// "2.13.0+cpu" and "2.13.0" are one version: what follows the plus is how it was built.
bool same_version(const char* a, const char* b) {
  const size_t n = strcspn(a, "+");
  return n == strcspn(b, "+") && strncmp(a, b, n) == 0;
}

void check_torch_version(const char* library) {
  char version[64];
  torch_version(library, version, sizeof version);
  if (same_version(version, MEMFIT_TORCH_VERSION)) return;
  char message[kMessageBytes];
  snprintf(
      message, sizeof message,
      "this program uses libtorch %s (%s), and this memfit was built for %s: refused. Use torch==%s in the program's "
      "environment, or build memfit with -DTorch_DIR of the program's libtorch.",
      *version != '\0' ? version : "of an unknown version", library, MEMFIT_TORCH_VERSION, MEMFIT_TORCH_VERSION);
  refuse(2, message);
}

/// `name` in the folder of this very library, or of `beside`; false when the path is too long.
bool path_beside(const char* beside, const char* name, char* path, size_t capacity) {
  const auto folder = static_cast<int>(base_name(beside) - beside);
  const int n = snprintf(path, capacity, "%.*s%s", folder, beside, name);
  return n > 0 && static_cast<size_t>(n) < capacity;
}

/// The engine names its libtorch by soname only. Each of those libraries must be in the process before, from the
/// program's own folder, so that the loader never goes looking for one and finds another copy.
void load_torch_companions(const char* library) {
  for (const char* name : {"libc10.so", "libtorch.so"}) {
    if (void* handle = real_dlopen()(name, RTLD_LAZY | RTLD_NOLOAD)) {
      dlclose(handle);
      continue;
    }
    char path[4096];
    if (path_beside(library, name, path, sizeof path)) real_dlopen()(path, RTLD_LAZY | RTLD_GLOBAL);
  }
}

/// A library beside this one. RTLD_LOCAL: nobody else needs its symbols, and a program that links it gets the same copy
/// anyway.
void* load_beside_this(const char* name, char* message) {
  Dl_info self;
  char real_path[4096];
  char path[4096];
  // By the real path: the library may have been preloaded through a link.
  if (dladdr(reinterpret_cast<void*>(&load_beside_this), &self) == 0 ||
      realpath(self.dli_fname, real_path) == nullptr || !path_beside(real_path, name, path, sizeof path)) {
    snprintf(message, kMessageBytes, "cannot find the folder of memfit's libraries.");
    return nullptr;
  }
  void* handle = real_dlopen()(path, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) snprintf(message, kMessageBytes, "%s cannot be loaded: %s", name, dlerror());
  return handle;
}

bool is_on(const char* variable) {
  const char* value = getenv(variable);
  return value != nullptr && *value != '\0' && strcmp(value, "0") != 0;
}

void remember_attached() {
  attached_pid = getpid();
  char value[64];
  snprintf(value, sizeof value, "%ld:%.32s", static_cast<long>(attached_pid), own_rank());
  setenv(kAttached, value, 1);
}

/// Without `memfit run` above it the process writes its report itself. Loaded now: what cannot be written is said at
/// the start.
void prepare_own_report() {
  const char* path = getenv(kReport);
  if (path == nullptr || *path == '\0' || getenv(kStatusDir) != nullptr) return;
  char message[kMessageBytes] = "";
  void* library = load_beside_this("libmemfit_exit_report.so", message);
  if (library == nullptr) refuse(1, message);
  auto check = reinterpret_cast<CheckReportFunction>(dlsym(library, "memfit_check_exit_report"));
  write_report = reinterpret_cast<WriteReportFunction>(dlsym(library, "memfit_write_exit_report"));
  if (check == nullptr || write_report == nullptr) refuse(1, "libmemfit_exit_report.so is not of this build.");
  if (check(path, is_on(kForce), message, sizeof message) != 0) refuse(2, message);
}

void attach_engine(const char* torch_library) {
  if (belongs_to_attached_process() || descends_from_attached_process()) return;
  check_torch_version(torch_library);
  prepare_own_report();
  load_torch_companions(torch_library);
  char message[kMessageBytes] = "";
  void* engine = load_beside_this("libmemfit.so", message);
  if (engine == nullptr) refuse(1, message);
  auto attach = reinterpret_cast<AttachFunction>(dlsym(engine, "memfit_attach"));
  if (attach == nullptr)
    refuse(1, "libmemfit.so has no memfit_attach: it is not of this build. Build or install memfit again.");
  const int outcome = attach(message, sizeof message);
  if (outcome == kStaysPassive) return;
  if (outcome != kIsAttached) refuse(outcome, *message != '\0' ? message : "the engine refused without a reason");
  if (auto status = reinterpret_cast<StatusFunction>(dlsym(engine, "memfit_run_status"))) status_page = status();
  // A limit is held or it is not called a limit.
  const char* memory = getenv(kMemory);
  if (memory != nullptr && *memory != '\0' && status_page != nullptr && status_page->limit_memory_bytes.load() == 0) {
    refuse(2,
           "--memory: this build's engine does not hold resident memory. Use --tensor-memory instead, for example "
           "--tensor-memory 512MiB.");
  }
  remember_attached();
}

/// Attach if libtorch has come. Whoever calls waits until a thread that is attaching is done: no op may run before.
void attach_if_torch_is_here() {
  if (!waiting.load(std::memory_order_acquire) || attaching_here) return;
  pthread_mutex_lock(&attach_mutex);
  TorchSearch search;
  if (waiting.load(std::memory_order_relaxed) && find_torch(search)) {
    attaching_here = true;
    attach_engine(search.path);
    attaching_here = false;
    waiting.store(false, std::memory_order_release);
    dlerror();  // what we asked the loader is none of the program's business
  }
  pthread_mutex_unlock(&attach_mutex);
}

uint64_t peak_resident_bytes() {
  const int fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  char text[4096];
  const ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = '\0';
  const char* line = strstr(text, "VmHWM:");
  return line != nullptr ? strtoull(line + 6, nullptr, 10) * 1024 : 0;
}

__attribute__((constructor)) void at_start() {
  real_dlopen();
  attach_if_torch_is_here();
}

/// Runs after the program's own exit handlers. A forked child that exits is not the attached process.
__attribute__((destructor)) void at_exit() {
  if (status_page == nullptr || attached_pid != getpid()) return;
  const uint64_t peak = peak_resident_bytes();
  if (peak > status_page->peak_rss_bytes.load(std::memory_order_relaxed)) {
    status_page->peak_rss_bytes.store(peak, std::memory_order_relaxed);
  }
  status_page->finished.store(1, std::memory_order_relaxed);
  if (write_report != nullptr) write_report(status_page, getenv(kReport), is_on(kForce), is_on(kQuiet));
}

/// Worker threads of OpenMP and MKL run pieces of kernels, never ops.
bool is_kernel_worker(void* (*routine)(void*)) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(routine), &info) == 0 || info.dli_fname == nullptr) return false;
  const char* name = base_name(info.dli_fname);
  for (const char* prefix : {"libgomp", "libiomp", "libomp", "libmkl"}) {
    if (strncmp(name, prefix, strlen(prefix)) == 0) return true;
  }
  return false;
}

struct ThreadStart {
  void* (*routine)(void*);
  void* argument;
};

void* run_hooked_thread(void* data) {
  const ThreadStart start = *static_cast<ThreadStart*>(data);
  free(data);
  if (auto hook = thread_hook.load(std::memory_order_acquire)) hook();
  return start.routine(start.argument);
}

}  // namespace
}  // namespace memfit::preload

// ---- what the engine calls and what the program's calls meet
// ----------------------------------------------------------

#define MEMFIT_EXPORT extern "C" __attribute__((visibility("default")))

/// The engine's hook, called at the start of every thread that the program makes from now on, before the thread's own
/// routine.
MEMFIT_EXPORT void memfit_preload_set_thread_hook(void (*hook)()) {
  memfit::preload::thread_hook.store(hook, std::memory_order_release);
}

/// Note [dlopen must not be seen]
/// The loader takes the caller from the return address: a bare name is searched in the RUNPATH of the library that
/// called dlopen. So a bare name (or one with $ORIGIN, or none) is passed on by a jump, with the caller's return
/// address still on the stack, and libtorch is looked for before the jump (what an earlier call brought). With a path
/// the caller does not matter, and libtorch is looked for after the call: that is how Python imports its extensions.
MEMFIT_EXPORT void* dlopen(const char* file, int mode) {
  using namespace memfit::preload;
  const bool caller_matters = file == nullptr || strchr(file, '/') == nullptr || strchr(file, '$') != nullptr;
  if (caller_matters) {
    attach_if_torch_is_here();
    return real_dlopen()(file, mode);  // a jump at -O2, which preload/CMakeLists.txt sets for this file in every build
  }
  void* handle = real_dlopen()(file, mode);
  if (handle != nullptr) attach_if_torch_is_here();
  return handle;
}

MEMFIT_EXPORT int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*routine)(void*),
                                 void* argument) {
  using namespace memfit::preload;
  using CreateFunction = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static std::atomic<CreateFunction> found{nullptr};
  CreateFunction create = found.load(std::memory_order_relaxed);
  if (create == nullptr) {
    create = real<CreateFunction>("pthread_create");
    found.store(create, std::memory_order_relaxed);
  }
  attach_if_torch_is_here();
  if (thread_hook.load(std::memory_order_acquire) == nullptr || is_kernel_worker(routine)) {
    return create(thread, attributes, routine, argument);
  }
  auto* start = static_cast<ThreadStart*>(malloc(sizeof(ThreadStart)));
  if (start == nullptr) return EAGAIN;
  *start = {routine, argument};
  const int error = create(thread, attributes, run_hooked_thread, start);
  if (error != 0) free(start);
  return error;
}
