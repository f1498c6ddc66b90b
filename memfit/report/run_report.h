// The report of one process that ran under memfit: as JSON for a file (docs/formats/run-report.md) and as the one line
// that `memfit run` prints when the program has ended. Not here: who counts (engine/), where files go
// (core/output_file), who starts the program (preload/launch). Threads: pure functions. Cost: microseconds.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/trace/run_status.h"

namespace memfit::report {

/// What the process's own status page does not know of it.
struct RunFacts {
  std::vector<std::string> program;  // the words that started it
  std::optional<int> exit_status;    // as a shell gives it: 128 + the signal's number when a signal ended it
  std::optional<int> signal;         // that signal
  std::optional<Bytes> peak_rss;     // highest resident bytes as the operating system saw them
  std::optional<std::chrono::nanoseconds> wall;  // from start to end
  // The limits asked for, where no page says them (no libtorch in the program).
  std::optional<Bytes> memory_limit;
  std::optional<Bytes> tensor_memory_limit;
  std::string refusal;  // why memfit did not let the process start; empty = it did
};

/// The report. `status` is nullptr for a program that used no libtorch; what is then unknown is null.
nlohmann::ordered_json run_report_json(const trace::RunStatus* status, const RunFacts& facts);

/// "tensor memory limit 150.0 MiB, peak 149.7 MiB, 812 evictions, 4.1 % of the time recomputing". No newline, no path.
std::string run_report_line(const trace::RunStatus* status, const RunFacts& facts);

/// Whether a refusal (out of budget) is what ended the program: it failed, by an exit status or by the signal of an
/// uncaught C++ exception, right after the last refusal.
bool ended_by_refusal(const trace::RunStatus& status, const RunFacts& facts);

/// "run.json" for no rank, "run.rank3.json" for rank 3.
std::string rank_report_path(const std::string& path, std::int64_t rank);
/// "run.2.json": of the second process without a rank.
std::string numbered_report_path(const std::string& path, std::size_t number);

}  // namespace memfit::report
