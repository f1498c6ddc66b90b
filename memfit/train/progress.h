// How a run goes, for people and for programs: a bar on a terminal, plain lines elsewhere, JSON lines on request.
// Not here: when it is called (trainer.h). Threads: one. Cost: a line at most every 100 ms (bar) or 10 s (lines); JSON each step.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "memfit/core/bytes.h"

namespace memfit::train {

/// One effective step. As a JSON line, which pandas.read_json(lines=True) reads: {"step", "epoch", "loss", "lr", "grad_norm", "rows",
/// "seconds", "used_bytes", "peak_bytes", "limit_bytes", "micro_batches", "skipped", "retries"}; bytes are null where memfit does not
/// count, grad_norm where it is not asked for; a number that is none is null.
struct StepReport {
  std::int64_t step = 0;  // from 1
  std::int64_t epoch = 0;
  double loss = 0;
  double learning_rate = 0;
  std::optional<double> gradient_norm;  // before clipping
  std::int64_t rows = 0;
  std::int64_t micro_batches = 1;
  double seconds = 0;
  std::optional<Bytes> used, peak;  // where memfit counts: under a limit, or with TrainerOptions::count
  std::optional<Bytes> limit;
  bool skipped = false;  // by the gradient scaler
  int retries = 0;       // after allocations that failed
};

/// `report` as one line of JSON, without the newline.
std::string json_line(const StepReport& report);

enum class ProgressStyle { Auto, Bar, Lines, Json, Off };

class Progress {
 public:
  /// `out` outlives this. Auto: a bar where standard error is a terminal, lines otherwise. `steps`: of the whole run, where known.
  Progress(std::ostream& out, ProgressStyle style, std::optional<std::int64_t> steps);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void step(const StepReport& report);
  /// A line of its own: a validation, a checkpoint, a retry.
  void say(const std::string& line);

 private:
  std::string line_of(const StepReport& report) const;

  std::ostream& out_;
  ProgressStyle style_;
  std::optional<std::int64_t> steps_;
  std::chrono::steady_clock::time_point start_, last_;
  std::int64_t first_step_ = -1;
  std::int64_t said_ = 0;
  StepReport newest_;
  bool bar_open_ = false;
};

}  // namespace memfit::train
