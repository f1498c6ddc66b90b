// Starts a program with the preload library in it, waits for it as a shell's child would be waited for, and gathers
// what the processes said on their status pages. Not here: flags (cli/run), the text and JSON of reports
// (report/run_report), the library itself (preload/shim). Threads: the calling process has one; signals are blocked in
// it while the program runs. Cost: one fork and exec.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/trace/run_status.h"

namespace memfit::preload {

struct LaunchOptions {
  std::optional<Bytes> memory;
  std::optional<Bytes> tensor_memory;
  bool verify = false;
  bool quiet = false;
  bool plan = true;
  std::optional<std::string> offload;  // folder, an absolute path
  std::optional<Bytes> offload_limit;
  std::optional<std::string> record;  // file for the recorded step, an absolute path
  bool replace_record = false;
};

/// The program could not be started. status is 127 (not found) or 126 (found, but it cannot be run), as a shell has it.
class CannotStart : public std::runtime_error {
 public:
  CannotStart(int status, const std::string& text) : std::runtime_error(text), status_(status) {}
  int status() const { return status_; }

 private:
  int status_;
};

/// What is known when the program has ended.
struct LaunchResult {
  int exit_status = 0;  // 128 + signal when a signal ended it
  std::optional<int> signal;
  std::int64_t pid = 0;
  Bytes largest_rss;  // of the program and the children it waited for, whichever was largest
  std::chrono::nanoseconds wall{};
  std::vector<std::unique_ptr<trace::RunStatus>> pages;  // one for each process that attached; by rank, then by pid
  std::vector<std::string> refusals;                     // why a process was not let start
  std::vector<std::string> complaints;                   // pages that could not be read
};

/// Where a shell would find `program`. Throws: CannotStart.
std::string find_program(const std::string& program);

/// The preload library beside this executable. Throws: Error saying how to build it.
std::string find_preload_library();

/// Run `words` (program and arguments) to its end. Signals sent to this process are passed on, those of a terminal
/// reach the program by the process group; stopping and continuing works as in a shell. Throws:   CannotStart; Error
/// when no private folder, pipe or process could be made.
LaunchResult launch(const std::vector<std::string>& words, const LaunchOptions& options);

/// End this process as the program did: with its exit status or by its signal (without a second core file).
[[noreturn]] void end_as(const LaunchResult& result);

}  // namespace memfit::preload
