// Everything `memfit plan` finds out about a trace: floor, memory/time curve with its knees, the plan for one limit, other batch sizes.
// Not here: how it is printed (report/plan_report.h).
// Threads: pure. Cost: a dozen plans of reduced effort, one of full effort when a limit is given, a few per batch size.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "memfit/plan/compute_plan.h"
#include "memfit/trace/mft.h"

namespace memfit::plan {

struct StudyOptions {
  std::optional<Bytes> limit;
  std::optional<OffloadTarget> offload;
  std::optional<std::pair<std::uint64_t, std::uint64_t>> batches;  // first and last
  bool pack = true;
  int curve_points = 12;
  double effort = 1.0;
};

struct CurvePoint {
  Bytes limit;
  Bytes peak;
  trace::Seconds step{0};
  bool knee = false;  // below it, memory gets much dearer
};

struct BatchPoint {
  std::uint64_t batch = 0;
  Bytes peak;  // under the limit when there is one and it fits; eager's otherwise
  trace::Seconds step{0};
  bool fits = true;
};

/// Values that a plan treats alike.
struct FateGroup {
  Fate fate = Fate::Keep;
  std::string op;  // that makes them
  std::size_t count = 0;
  Bytes bytes;
  trace::Seconds seconds{0};
};

struct Study {
  trace::TraceInfo info;
  trace::Step step;  // the one of the trace with the highest peak
  std::size_t steps_in_file = 0;
  Bytes recorded_peak;
  trace::Seconds recorded_step{0};
  Floor floor;
  std::vector<CurvePoint> curve;     // rising limits
  std::optional<Bytes> limit;
  std::optional<Plan> plan;
  std::vector<FateGroup> groups;     // of the plan, the dearest first
  std::vector<BatchPoint> batches;   // rising
  std::optional<std::uint64_t> largest_batch;  // that fits, in the range asked for
};

/// Throws:   LimitTooLow for a limit under the floor; UsageError for an empty trace, or batch sizes that the trace cannot tell about.
Study study(const trace::Trace& trace, const StudyOptions& options);

std::vector<FateGroup> group_by_fate(const trace::Step& step, const Plan& plan);

}  // namespace memfit::plan
