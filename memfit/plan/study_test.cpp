#include "memfit/plan/study.h"

#include <gtest/gtest.h>

#include "memfit/plan/extrapolate.h"

namespace memfit::plan {
namespace {

using namespace memfit::literals;
using trace::Op;
using trace::Seconds;
using trace::Step;
using trace::StepBuilder;
using trace::Trace;
using trace::Value;
using trace::ValueId;

/// Activations and their times grow with the batch, the parameter does not.
Step step_of(std::uint64_t batch, int layers = 10) {
  StepBuilder b;
  std::uint32_t storage = 0;
  auto sized = [&](std::uint64_t bytes) {
    Value v;
    v.bytes = Bytes(bytes);
    v.storage = storage++;
    return v;
  };
  const ValueId w = b.add_source(sized(5 << 20));
  std::vector<ValueId> xs{b.add_source(sized(batch * 1000))};
  auto op = [&](const char* name, std::vector<ValueId> in, std::uint64_t bytes) {
    Op o;
    o.name = b.intern(name);
    o.seconds = Seconds(0.001 + 1e-5 * static_cast<double>(batch));
    ValueId first = 0;
    b.add_op(o, in, std::vector<Value>{sized(bytes)}, &first);
    return first;
  };
  for (int i = 0; i < layers; ++i) xs.push_back(op("forward", {xs.back(), w}, batch * (500u << (i % 3)) * 40));
  ValueId g = op("loss", {xs.back()}, batch * 4);
  for (std::size_t i = xs.size() - 1; i >= 1; --i) {
    const ValueId next = op("backward", {g, xs[i], xs[i - 1]}, batch * 1000);
    b.drop(g);
    b.drop(xs[i]);
    g = next;
  }
  b.step().batch = batch;
  b.step().seconds = Seconds((0.001 + 1e-5 * static_cast<double>(batch)) * static_cast<double>(b.step().ops.size()));
  return b.take();
}

TEST(Extrapolate, FollowsTheLineThroughTwoBatchSizes) {
  const std::vector<Step> steps{step_of(32), step_of(8)};
  const auto two = find_two_batches(steps);
  ASSERT_TRUE(two);
  EXPECT_EQ(*two->first->batch, 8u);
  const Step guess = extrapolate(*two->first, *two->second, 128), truth = step_of(128);
  EXPECT_EQ(trace::find_fault(guess), std::nullopt);
  EXPECT_EQ(trace::peak_bytes(guess), trace::peak_bytes(truth));
  EXPECT_NEAR(guess.seconds.count(), truth.seconds.count(), 1e-9);
}

TEST(Extrapolate, RefusesStepsOfOtherOps) {
  const std::vector<Step> steps{step_of(32, 10), step_of(8, 9)};
  EXPECT_FALSE(find_two_batches(steps));
}

TEST(Study, CurveFallsWithMemoryAndHoldsEveryLimit) {
  Trace trace;
  trace.steps.push_back(step_of(64));
  StudyOptions options;
  options.effort = 0.1;
  const Study s = study(trace, options);
  ASSERT_GE(s.curve.size(), 10u);
  EXPECT_EQ(s.curve.back().limit, s.recorded_peak);
  EXPECT_DOUBLE_EQ(s.curve.back().step.count(), s.recorded_step.count());
  for (std::size_t i = 0; i < s.curve.size(); ++i) {
    EXPECT_LE(s.curve[i].peak, s.curve[i].limit);
    if (i > 0) EXPECT_LE(s.curve[i].step.count(), s.curve[i - 1].step.count());
  }
}

TEST(Study, FindsTheLargestBatchThatFits) {
  Trace trace;
  trace.steps = {step_of(8), step_of(32)};
  StudyOptions options;
  options.effort = 0.1;
  options.curve_points = 0;
  options.limit = trace::peak_bytes(step_of(60));
  options.batches = {8, 512};
  const Study s = study(trace, options);
  ASSERT_TRUE(s.largest_batch);
  EXPECT_GT(*s.largest_batch, 60u);  // eager would stop at 60
  EXPECT_LT(*s.largest_batch, 512u);
  for (const BatchPoint& b : s.batches)
    if (b.fits) EXPECT_LE(b.peak, *options.limit);
}

TEST(Study, NeedsTwoBatchSizes) {
  Trace trace;
  trace.steps = {step_of(8)};
  StudyOptions options;
  options.batches = {8, 16};
  options.effort = 0.01;
  EXPECT_THROW(study(trace, options), UsageError);
  EXPECT_THROW(study(Trace{}, StudyOptions{}), UsageError);
}

TEST(Study, GroupsOfAPlanAddUpToItsCost) {
  Trace trace;
  trace.steps.push_back(step_of(64));
  StudyOptions options;
  options.effort = 0.1;
  options.limit = Bytes(trace::peak_bytes(trace.steps[0]).count() / 10 * 7);
  const Study s = study(trace, options);
  Seconds sum{0};
  std::size_t count = 0;
  for (const FateGroup& g : s.groups) sum += g.seconds, count += g.count;
  EXPECT_NEAR(sum.count(), (s.plan->recompute + s.plan->packing).count(), 1e-9);
  EXPECT_EQ(count, s.plan->values.size());
}

}  // namespace
}  // namespace memfit::plan
