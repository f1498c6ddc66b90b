#include "memfit/plan/study.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "memfit/plan/extrapolate.h"

namespace memfit::plan {
namespace {

using trace::Seconds;
using trace::Step;
using trace::Trace;

constexpr double kCurveEffort = 0.2;

PlanOptions plan_options(const StudyOptions& options, Bytes limit, double effort) {
  PlanOptions out;
  out.limit = limit;
  out.offload = options.offload;
  out.pack = options.pack;
  out.effort = options.effort * effort;
  return out;
}

/// A point is a knee when the last MiB below it cost much more time than those above it.
void mark_knees(std::vector<CurvePoint>& curve, Seconds base) {
  auto slope = [&](std::size_t i) {  // seconds saved per byte from point i to i+1
    return (curve[i].step - curve[i + 1].step).count() / static_cast<double>((curve[i + 1].limit - curve[i].limit).count());
  };
  for (std::size_t i = 1; i + 1 < curve.size(); ++i) {
    const double below = slope(i - 1), above = slope(i);
    const bool matters = curve[i - 1].step - curve[i].step > 0.02 * base;
    if (matters && below > 2.5 * std::max(above, 0.0)) curve[i].knee = true;
  }
  for (std::size_t i = 2; i < curve.size(); ++i)  // of two neighbours, the upper one bends first
    if (curve[i].knee && curve[i - 1].knee) curve[i - 1].knee = false;
}

std::vector<CurvePoint> compute_curve(const Step& step, const StudyOptions& options, Bytes floor, Bytes peak) {
  std::vector<CurvePoint> curve;
  if (options.curve_points <= 0) return curve;
  const int points = std::max(2, options.curve_points);
  for (int i = 0; i < points; ++i) {
    CurvePoint point;
    const auto range = static_cast<double>((peak - floor).count());
    point.limit = i + 1 == points ? peak : Bytes(floor.count() + static_cast<std::uint64_t>(range * i / (points - 1)));
    if (!curve.empty() && point.limit == curve.back().limit) continue;
    try {
      const Plan plan = compute_plan(step, plan_options(options, point.limit, kCurveEffort));
      point.peak = plan.predicted_peak;
      point.step = plan.predicted_step;
    } catch (const LimitTooLow&) {
      continue;  // the floor was reached by a search with other luck
    }
    // What fits under less memory fits here too.
    if (!curve.empty() && curve.back().step < point.step) {
      point.peak = curve.back().peak;
      point.step = curve.back().step;
    }
    curve.push_back(point);
  }
  mark_knees(curve, step.seconds);
  return curve;
}

BatchPoint try_batch(const Step& small, const Step& large, std::uint64_t batch, const StudyOptions& options) {
  const Step step = extrapolate(small, large, batch);
  BatchPoint point;
  point.batch = batch;
  point.peak = trace::peak_bytes(step);
  point.step = step.seconds;
  if (!options.limit || point.peak <= *options.limit) return point;
  try {
    const Plan plan = compute_plan(step, plan_options(options, *options.limit, kCurveEffort));
    point.peak = plan.predicted_peak;
    point.step = plan.predicted_step;
  } catch (const LimitTooLow&) {
    point.fits = false;
  }
  return point;
}

void study_batches(const Trace& trace, const StudyOptions& options, Study& out) {
  const auto two = find_two_batches(trace.steps);
  if (!two)
    throw UsageError("--batch: the trace has no two steps of the same ops at different batch sizes. Record one with both, for example by running "
                     "the program with a data set whose last batch is smaller.");
  const auto [first, last] = *options.batches;
  std::vector<std::uint64_t> sizes;
  for (std::uint64_t b = first; b < last; b = std::max(b + 1, b * 2)) sizes.push_back(b);
  sizes.push_back(last);
  for (std::uint64_t b : sizes) out.batches.push_back(try_batch(*two->first, *two->second, b, options));
  std::uint64_t fits = 0, fails = 0;
  for (const BatchPoint& p : out.batches) {
    if (p.fits) fits = std::max(fits, p.batch);
    if (!p.fits && fails == 0) fails = p.batch;
  }
  if (fits > 0 && fails > fits)
    while (fails - fits > std::max<std::uint64_t>(1, fits / 64)) {
      const BatchPoint middle = try_batch(*two->first, *two->second, fits + (fails - fits) / 2, options);
      (middle.fits ? fits : fails) = middle.batch;
      if (middle.fits) out.batches.push_back(middle);
    }
  std::sort(out.batches.begin(), out.batches.end(), [](const BatchPoint& a, const BatchPoint& b) { return a.batch < b.batch; });
  if (fits > 0) out.largest_batch = fits;
}

}  // namespace

std::vector<FateGroup> group_by_fate(const Step& step, const Plan& plan) {
  std::map<std::pair<Fate, std::string>, FateGroup> groups;
  for (const ValueSummary& s : plan.values) {
    const trace::Value& value = step.values[s.value];
    const std::string op = value.producer == trace::kNone ? std::string(trace::category_name(value.category)) : std::string(step.op_name(value.producer));
    FateGroup& group = groups[{s.fate, op}];
    group.fate = s.fate;
    group.op = op;
    ++group.count;
    group.bytes += value.bytes;
    group.seconds += s.seconds;
  }
  std::vector<FateGroup> out;
  for (auto& [key, group] : groups) out.push_back(group);
  std::sort(out.begin(), out.end(), [](const FateGroup& a, const FateGroup& b) {
    return a.seconds != b.seconds ? a.seconds > b.seconds : a.bytes > b.bytes;
  });
  return out;
}

Study study(const Trace& trace, const StudyOptions& options) {
  if (trace.steps.empty()) throw UsageError("The trace holds no step: the program ended before one repeated.");
  Study out;
  out.info = trace.info;
  out.steps_in_file = trace.steps.size();
  out.step = *std::max_element(trace.steps.begin(), trace.steps.end(),
                               [](const Step& a, const Step& b) { return trace::peak_bytes(a) < trace::peak_bytes(b); });
  out.recorded_peak = trace::peak_bytes(out.step);
  out.recorded_step = out.step.seconds;
  out.limit = options.limit;
  const PlanOptions base = plan_options(options, out.recorded_peak, kCurveEffort);
  if (options.curve_points > 0 || !options.limit) out.floor = compute_floor(out.step, base);
  else out.floor.bound = out.floor.reached = Bytes(0);  // asked only for one plan: do not search for the floor
  if (options.limit) {
    out.plan = compute_plan(out.step, plan_options(options, *options.limit, 1.0));
    out.groups = group_by_fate(out.step, *out.plan);
  }
  out.curve = compute_curve(out.step, options, out.floor.reached, out.recorded_peak);
  if (options.batches) study_batches(trace, options, out);
  return out;
}

}  // namespace memfit::plan
