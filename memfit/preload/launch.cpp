#include "memfit/preload/launch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>

#include "memfit/preload/environment.h"

extern char** environ;

namespace memfit::preload {
namespace {

namespace fs = std::filesystem;
using std::chrono::steady_clock;

Error system_error(const std::string& what, int error) {
  return Error(ExitStatus::Failed, fmt::format("{}: {}", what, std::strerror(error)));
}

/// The private folder of status pages; gone with everything in it at the end of its scope.
class StatusFolder {
 public:
  StatusFolder() {
    std::string tried;
    for (const char* name : {"XDG_RUNTIME_DIR", "TMPDIR", ""}) {
      const char* base = *name != '\0' ? std::getenv(name) : "/tmp";
      if (base == nullptr || *base != '/') continue;
      path_ = std::string(base) + "/memfit-XXXXXX";
      if (::mkdtemp(path_.data()) != nullptr) return;  // mode 0700
      tried += fmt::format("{}{} ({})", tried.empty() ? "" : ", ", base, std::strerror(errno));
    }
    throw Error(ExitStatus::Failed, "no folder for the status of the program could be made in " + tried +
                                        ". Set TMPDIR to a folder that can be written.");
  }
  StatusFolder(const StatusFolder&) = delete;
  StatusFolder& operator=(const StatusFolder&) = delete;
  ~StatusFolder() {
    std::error_code ignored;  // a folder left behind does no harm
    fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

bool executable_file(const std::string& path, int& error) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    error = errno;
  } else if (S_ISDIR(info.st_mode)) {
    error = EISDIR;
  } else if (::access(path.c_str(), X_OK) != 0) {
    error = errno;
  } else {
    return true;
  }
  return false;
}

/// LD_PRELOAD splits its value at these.
bool can_be_preloaded(const std::string& path) { return path.find_first_of(" :") == std::string::npos; }

/// `library` by a name that LD_PRELOAD can say.
std::string preloadable(const fs::path& library, const StatusFolder& folder) {
  if (can_be_preloaded(library.string())) return library.string();
  // The library finds its neighbours by its real path, so a link with a plain name will do.
  const std::string link = folder.path() + "/" + library.filename().string();
  if (!can_be_preloaded(link) || ::symlink(library.c_str(), link.c_str()) != 0) {
    throw Error(ExitStatus::Failed,
                fmt::format("\"{}\" has a blank or a colon in its name, which LD_PRELOAD cannot say. "
                            "Move memfit to another folder.",
                            library.string()));
  }
  return link;
}

std::string preload_value(const LaunchOptions& options, const StatusFolder& folder) {
  const fs::path library = find_preload_library();
  std::string value = preloadable(library, folder);
  // Only a limit of resident memory needs to see what is no tensor; otherwise the program's heap is left as it is.
  if (options.memory) value += ":" + preloadable(library.parent_path() / "libmemfit_heap.so", folder);
  const char* before = std::getenv("LD_PRELOAD");
  return before != nullptr && *before != '\0' ? value + ":" + before : value;
}

/// This process's environment with memfit's variables set or taken out.
std::vector<std::string> program_environment(const LaunchOptions& options, const StatusFolder& folder) {
  std::map<std::string, std::optional<std::string>> ours;
  auto size = [](const std::optional<Bytes>& bytes) {
    return bytes ? std::optional(fmt::format("{}B", bytes->count())) : std::nullopt;
  };
  auto flag = [](bool on) { return on ? std::optional<std::string>("1") : std::nullopt; };
  ours[kMemory] = size(options.memory);
  ours[kTensorMemory] = size(options.tensor_memory);
  ours[kVerify] = flag(options.verify);
  ours[kQuiet] = flag(options.quiet);
  ours[kNoPlan] = flag(!options.plan);
  ours[kOffload] = options.offload;
  ours[kOffloadLimit] = size(options.offload_limit);
  ours[kRecord] = options.record;
  if (options.record) ours[kForce] = flag(options.replace_record);
  ours[kReport] = std::nullopt;    // reports are ours to write
  ours[kAttached] = std::nullopt;  // a memfit inside a memfit starts anew
  ours[kStatusDir] = folder.path();
  ours["LD_PRELOAD"] = preload_value(options, folder);
  std::vector<std::string> result;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    if (ours.find(text.substr(0, text.find('='))) == ours.end()) result.push_back(text);
  }
  for (const auto& [name, value] : ours) {
    if (value) result.push_back(name + "=" + *value);
  }
  return result;
}

std::vector<char*> pointers(std::vector<std::string>& words) {
  std::vector<char*> result;
  for (std::string& word : words) result.push_back(word.data());
  result.push_back(nullptr);
  return result;
}

/// The signals this process takes while the program runs, to pass them on or to act on them.
/// Those that mean an error of this very process stay with it.
sigset_t watched_signals() {
  sigset_t set;
  sigfillset(&set);
  for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT, SIGSYS}) sigdelset(&set, own);
  return set;
}

/// Blocks the watched signals, and lets the program's exit be seen even where SIGCHLD came ignored.
class SignalWatch {
 public:
  SignalWatch() : watched_(watched_signals()) {
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    ::sigaction(SIGCHLD, &plain, &child_action_);
    ::sigprocmask(SIG_BLOCK, &watched_, &mask_);
  }
  SignalWatch(const SignalWatch&) = delete;
  SignalWatch& operator=(const SignalWatch&) = delete;
  ~SignalWatch() { restore(); }
  void restore() const {
    ::sigaction(SIGCHLD, &child_action_, nullptr);
    ::sigprocmask(SIG_SETMASK, &mask_, nullptr);
  }
  const sigset_t& watched() const { return watched_; }

 private:
  sigset_t watched_;
  sigset_t mask_{};
  struct sigaction child_action_ {};
};

/// Fork and exec. Returns the pid; when exec fails its errno comes through a pipe.
pid_t start(const std::string& path, std::vector<std::string> words, std::vector<std::string> environment,
            const SignalWatch& watch) {
  std::vector<char*> argv = pointers(words);
  std::vector<char*> envp = pointers(environment);
  // A file that exec does not know is a shell script without a first line, as execvp and shells have it.
  std::string shell = "/bin/sh";
  std::string script = path;
  std::vector<char*> shell_argv = {shell.data(), script.data()};
  shell_argv.insert(shell_argv.end(), argv.begin() + 1, argv.end());

  int channel[2];
  if (::pipe2(channel, O_CLOEXEC) != 0) throw system_error("cannot make a pipe", errno);
  const pid_t pid = ::fork();
  if (pid < 0) {
    const int error = errno;
    ::close(channel[0]);
    ::close(channel[1]);
    throw system_error("cannot start a process", error);
  }
  if (pid == 0) {
    watch.restore();
    ::execve(path.c_str(), argv.data(), envp.data());
    if (errno == ENOEXEC) ::execve(shell.c_str(), shell_argv.data(), envp.data());
    const int error = errno;
    [[maybe_unused]] const ssize_t written = ::write(channel[1], &error, sizeof error);
    ::_exit(126);
  }
  ::close(channel[1]);
  int error = 0;
  ssize_t got = 0;
  do got = ::read(channel[0], &error, sizeof error);
  while (got < 0 && errno == EINTR);
  ::close(channel[0]);
  if (got == sizeof error) {
    ::waitpid(pid, nullptr, 0);
    throw CannotStart(126, fmt::format("{}: cannot be run ({})", path, std::strerror(error)));
  }
  return pid;
}

/// Whether the process is stopped at this moment.
bool is_stopped(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string line;
  if (!std::getline(file, line)) return false;
  const auto name_end = line.rfind(')');  // the name may hold anything, a blank or a parenthesis too
  return name_end != std::string::npos && line.substr(name_end + 2, 1) == "T";
}

/// The program was stopped: stop too, so that the shell sees its job stopped, and go on together.
void stop_with(pid_t pid) {
  // After Ctrl-Z and `fg` the program may be about to be continued by the same signal that continued us: only a program
  // that stays stopped stops us.
  for (int i = 0; i < 5; ++i) {
    if (!is_stopped(pid)) return;
    ::usleep(10'000);
  }
  ::raise(SIGSTOP);
  ::kill(pid, SIGCONT);
}

/// Pass on a signal that a process sent us. Those of the terminal come from the kernel and reached the whole process
/// group, the program too. A stop signal is passed on like any other: whether we stop is up to what the program makes
/// of it.
void take_signal(const siginfo_t& info, pid_t pid) {
  const bool sent_by_process = info.si_code <= 0 && info.si_pid != pid;
  if (!sent_by_process || info.si_signo == SIGCHLD) return;
  if (info.si_code == SI_QUEUE) {
    ::sigqueue(pid, info.si_signo, info.si_value);
  } else {
    ::kill(pid, info.si_signo);
  }
}

/// Wait until the program has ended; nullopt as long as it has not.
std::optional<int> reap(pid_t pid, rusage& usage) {
  for (;;) {
    int status = 0;
    const pid_t got = ::wait4(pid, &status, WNOHANG | WUNTRACED, &usage);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw system_error("cannot wait for the program", errno);
    if (got == 0) return std::nullopt;
    if (!WIFSTOPPED(status)) return status;
    // SIGSTOP to the program alone is somebody who will continue it; a stop by the terminal's rules is the job's.
    if (WSTOPSIG(status) != SIGSTOP) stop_with(pid);
  }
}

int wait_for(pid_t pid, const SignalWatch& watch, rusage& usage) {
  for (;;) {
    if (const auto status = reap(pid, usage)) return *status;
    siginfo_t info{};
    if (::sigwaitinfo(&watch.watched(), &info) > 0) take_signal(info, pid);
  }
}

std::string read_refusal(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text(4096, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<std::size_t>(file.gcount()));
  return text;
}

void read_pages(const StatusFolder& folder, LaunchResult& result) {
  for (const fs::directory_entry& entry : fs::directory_iterator(folder.path())) {
    const fs::path& path = entry.path();
    if (path.extension() == ".refused") {
      result.refusals.push_back(read_refusal(path));
    } else if (path.extension() == ".status") {
      try {
        result.pages.push_back(trace::open_run_status(path.string()));
      } catch (const BadInput& error) {
        result.complaints.emplace_back(error.what());
      }
    }
  }
  std::ranges::sort(result.pages, [](const auto& a, const auto& b) {
    return std::pair(a->rank, a->pid) < std::pair(b->rank, b->pid);
  });
}

}  // namespace

std::string find_program(const std::string& program) {
  int error = ENOENT;
  if (program.find('/') != std::string::npos) {
    if (executable_file(program, error)) return program;
    if (error == ENOENT || error == ENOTDIR) throw CannotStart(127, program + ": not found");
    throw CannotStart(126, fmt::format("{}: cannot be run ({})", program, std::strerror(error)));
  }
  const char* variable = std::getenv("PATH");
  const std::string search = variable != nullptr ? variable : "/usr/local/bin:/usr/bin:/bin";
  std::optional<std::pair<std::string, int>> found_but;
  for (std::size_t begin = 0; !program.empty() && begin <= search.size();) {
    const std::size_t end = std::min(search.find(':', begin), search.size());
    const std::string folder = end == begin ? "." : search.substr(begin, end - begin);
    const std::string candidate = folder + "/" + program;
    if (executable_file(candidate, error)) return candidate;
    if (error == EACCES && !found_but && fs::is_regular_file(candidate)) found_but = {candidate, error};
    begin = end + 1;
  }
  if (found_but) {
    throw CannotStart(126, fmt::format("{}: cannot be run ({})", found_but->first, std::strerror(found_but->second)));
  }
  throw CannotStart(127, fmt::format("\"{}\": not found in PATH", program));
}

std::string find_preload_library() {
  const fs::path folder = fs::read_symlink("/proc/self/exe").parent_path();
  for (const fs::path& candidate :
       {folder / "../lib/libmemfit_preload.so", fs::path(MEMFIT_LIBDIR) / "libmemfit_preload.so"}) {
    std::error_code missing;
    const fs::path library = fs::canonical(candidate, missing);
    if (missing) continue;
    if (!fs::exists(library.parent_path() / "libmemfit.so", missing)) {
      throw Error(ExitStatus::Failed,
                  fmt::format("{} has no libmemfit.so beside it: this memfit was built without LibTorch. "
                              "Build it with -DMEMFIT_TORCH=ON.",
                              library.string()));
    }
    return library.string();
  }
  throw Error(ExitStatus::Failed,
              "libmemfit_preload.so is not where memfit was built or installed. Build or install memfit again.");
}

LaunchResult launch(const std::vector<std::string>& words, const LaunchOptions& options) {
  const std::string path = find_program(words.at(0));
  const StatusFolder folder;
  const std::vector<std::string> environment = program_environment(options, folder);
  const SignalWatch watch;
  const auto begin = steady_clock::now();
  LaunchResult result;
  const pid_t pid = start(path, words, environment, watch);
  rusage usage{};
  const int status = wait_for(pid, watch, usage);
  result.wall = steady_clock::now() - begin;
  result.pid = pid;
  result.largest_rss = Bytes(static_cast<std::uint64_t>(usage.ru_maxrss) * 1024);
  if (WIFSIGNALED(status)) result.signal = WTERMSIG(status);
  result.exit_status = result.signal ? 128 + *result.signal : WEXITSTATUS(status);
  read_pages(folder, result);
  return result;
}

void end_as(const LaunchResult& result) {
  std::fflush(nullptr);
  if (result.signal) {
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    struct sigaction plain {};
    plain.sa_handler = SIG_DFL;
    ::sigaction(*result.signal, &plain, nullptr);
    sigset_t only;
    sigemptyset(&only);
    sigaddset(&only, *result.signal);
    ::sigprocmask(SIG_UNBLOCK, &only, nullptr);
    ::raise(*result.signal);
  }
  ::_exit(result.exit_status);
}

}  // namespace memfit::preload
