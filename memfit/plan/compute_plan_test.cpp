#include "memfit/plan/compute_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <random>

#include "memfit/plan/detail/search.h"
#include "memfit/plan/plan_json.h"
#include "memfit/testing/random_step.h"

namespace memfit::plan {
namespace {

using namespace memfit::literals;
using trace::Op;
using trace::Replay;
using trace::Seconds;
using trace::Step;
using trace::StepBuilder;
using trace::Value;
using trace::ValueId;

/// A chain x0 -> x1 -> ... -> xk whose backward reads the x in reverse: the smallest thing like training. All values have 1 MiB.
Step chain(int length, double op_ms = 1.0) {
  StepBuilder b;
  std::uint32_t storage = 0;
  auto value = [&] {
    Value v;
    v.bytes = 1_MiB;
    v.storage = storage++;
    return v;
  };
  auto op = [&](const char* name, std::vector<ValueId> in, bool out) {
    Op o;
    o.name = b.intern(name);
    o.seconds = Seconds(op_ms / 1e3);
    std::vector<Value> outs;
    if (out) outs.push_back(value());
    ValueId first = 0;
    b.add_op(o, in, outs, &first);
    return first;
  };
  std::vector<ValueId> xs{b.add_source(value())};
  for (int i = 0; i < length; ++i) xs.push_back(op("forward", {xs.back()}, true));
  ValueId g = op("loss", {xs.back()}, true);
  for (int i = length; i >= 1; --i) {
    const ValueId next = op("backward", {g, xs[static_cast<std::size_t>(i)], xs[static_cast<std::size_t>(i) - 1]}, true);
    b.drop(g);
    b.drop(xs[static_cast<std::size_t>(i)]);
    g = next;
  }
  b.step().seconds = Seconds(op_ms / 1e3 * (2 * length + 1));
  return b.take();
}

TEST(ComputePlan, DoesNothingWhenTheStepFits) {
  const Step step = chain(10);
  PlanOptions options;
  options.limit = trace::peak_bytes(step);
  const Plan plan = compute_plan(step, options);
  EXPECT_TRUE(plan.instructions.empty());
  EXPECT_EQ(plan.predicted_peak, trace::peak_bytes(step));
  EXPECT_DOUBLE_EQ(plan.predicted_step.count(), step.seconds.count());
}

TEST(ComputePlan, KeepsAChainUnderEveryLimitDownToItsFloor) {
  const Step step = chain(24);
  const auto peak = trace::peak_bytes(step).count();
  double last = -1;
  for (std::uint64_t mib = peak >> 20; mib >= 8; --mib) {
    PlanOptions options;
    options.effort = 0.1;
    options.limit = Bytes(mib << 20);
    const Plan plan = compute_plan(step, options);
    EXPECT_LE(plan.predicted_peak, options.limit);
    EXPECT_GE(plan.recompute.count(), last - 1e-3) << "less memory must not be cheaper";
    last = plan.recompute.count();
  }
}

TEST(ComputePlan, RefusesALimitUnderTheFloorAndNamesTheOp) {
  const Step step = chain(8);
  PlanOptions options;
  options.effort = 0.1;
  options.limit = 3_MiB;
  try {
    compute_plan(step, options);
    FAIL() << "no plan can fit";
  } catch (const LimitTooLow& error) {
    // An input x(i-1), x(i), the gradient and its successor, and the source.
    EXPECT_EQ(error.floor().bound, 5_MiB);
    EXPECT_GE(error.floor().reached, error.floor().bound);
    EXPECT_NE(std::string(error.what()).find("backward"), std::string::npos) << error.what();
    options.limit = error.floor().reached;
    EXPECT_NO_THROW(compute_plan(step, options));
  }
}

TEST(ComputePlan, PrefersTheCheapOfTwoValues) {
  Step step = chain(6);
  for (Op& op : step.ops) op.seconds = Seconds(0.010);
  step.ops[2].seconds = Seconds(0.001);
  PlanOptions options;
  options.limit = Bytes(trace::peak_bytes(step).count() - (1u << 20));
  const Plan plan = compute_plan(step, options);
  EXPECT_NEAR(plan.recompute.count(), 0.001, 1e-9);
}

TEST(ComputePlan, NeverReplaysWhatMustNotRunAgain) {
  Step step = chain(12);
  step.ops[4].replay = Replay::RandomWithoutGenerator;
  step.ops[7].replay = Replay::SideEffect;
  for (std::uint64_t mib = 13; mib >= 9; --mib) {
    PlanOptions options;
    options.effort = 0.1;
    options.limit = Bytes(mib << 20);
    const Plan plan = compute_plan(step, options);
    for (const Instruction& in : plan.instructions)
      if (in.action == Action::Replay) {
        EXPECT_NE(in.target, 4u);
        EXPECT_NE(in.target, 7u);
      }
  }
}

TEST(ComputePlan, PacksWhatIsDearToMakeAndCheapToPack) {
  Step step = chain(8);
  for (Value& v : step.values)
    if (v.producer != trace::kNone) {
      v.packable = true;
      v.packed_bytes = 32_KiB;
      v.pack_seconds = v.unpack_seconds = 1e-5f;
    }
  PlanOptions options;
  options.limit = 7_MiB;
  const Plan packed = compute_plan(step, options);
  EXPECT_EQ(packed.recompute.count(), 0);
  EXPECT_GT(packed.packing.count(), 0);
  options.pack = false;
  EXPECT_GT(compute_plan(step, options).recompute, packed.packing);
}

constexpr double kMiB = 1 << 20;

OffloadTarget fast_target() { return {1_GiB, Traffic{2000 * kMiB, 2000 * kMiB, Seconds(1e-5)}}; }

TEST(ComputePlan, OffloadsBehindOpsInsteadOfRecomputing) {
  Step step = chain(30, 5.0);
  PlanOptions options;
  options.limit = 16_MiB;
  options.effort = 0.1;
  const double alone = compute_plan(step, options).recompute.count();
  options.offload = fast_target();
  const Plan plan = compute_plan(step, options);
  EXPECT_LE(plan.predicted_peak, options.limit);
  EXPECT_GT(plan.offload_write, Bytes(0));
  EXPECT_LT(plan.recompute.count() + plan.exposed.count(), alone / 4);
}

TEST(ComputePlan, StaysWithinTheRoomOutside) {
  Step step = chain(30, 5.0);
  PlanOptions options;
  options.limit = 16_MiB;
  options.effort = 0.1;
  options.offload = fast_target();
  options.offload->limit = 3_MiB;
  const Plan plan = compute_plan(step, options);
  EXPECT_LE(simulate(step, plan, options.offload->traffic).outside_peak, 3_MiB);
}

/// `count` parameters of 8 MiB with a state of 8 MiB each, used forward, backward, and written by the optimizer.
Step optimizer_step(int count) {
  StepBuilder b;
  std::uint32_t storage = 0;
  auto sized = [&](Bytes bytes) {
    Value v;
    v.bytes = bytes;
    v.storage = storage++;
    return v;
  };
  std::vector<ValueId> params, states, grads;
  for (int i = 0; i < count; ++i) params.push_back(b.add_source(sized(8_MiB))), states.push_back(b.add_source(sized(8_MiB)));
  auto op = [&](std::vector<ValueId> in, std::vector<Value> out, Replay replay = Replay::Yes) {
    Op o;
    o.name = b.intern("op");
    o.seconds = Seconds(0.02);
    o.replay = replay;
    ValueId first = 0;
    b.add_op(o, in, out, &first);
    return first;
  };
  ValueId x = b.add_source(sized(1_MiB));
  for (int i = 0; i < count; ++i) x = op({x, params[static_cast<std::size_t>(i)]}, {sized(1_MiB)});
  for (int i = count; i-- > 0;) {
    grads.push_back(op({x, params[static_cast<std::size_t>(i)]}, {sized(8_MiB)}));
    Value p = b.value(params[static_cast<std::size_t>(i)]), s = b.value(states[static_cast<std::size_t>(i)]);
    p.overwrites = params[static_cast<std::size_t>(i)];
    s.overwrites = states[static_cast<std::size_t>(i)];
    op({grads.back(), p.overwrites, s.overwrites}, {p, s}, Replay::WritesSource);
    b.drop(grads.back());
  }
  b.step().seconds = Seconds(0.02 * 3 * count);
  return b.take();
}

TEST(ComputePlan, MovesParametersAndOptimizerStateOutBetweenTheirUses) {
  const Step step = optimizer_step(8);
  ASSERT_EQ(trace::find_fault(step), std::nullopt);
  PlanOptions options;
  options.effort = 0.05;
  options.limit = 80_MiB;  // parameters and state alone are 128
  EXPECT_THROW(compute_plan(step, options), LimitTooLow);
  options.offload = fast_target();
  const Plan plan = compute_plan(step, options);
  EXPECT_LE(plan.predicted_peak, options.limit);
  EXPECT_FALSE(plan.starts_offloaded.empty());
  EXPECT_LT(plan.exposed.count(), 0.1 * step.seconds.count());
}

TEST(ComputePlan, WaitsForASlowDiskWhenThereIsNoOtherWay) {
  const Step step = optimizer_step(6);
  PlanOptions options;
  options.effort = 0.05;
  options.limit = 70_MiB;
  options.offload = OffloadTarget{1_GiB, Traffic{100 * kMiB, 100 * kMiB, Seconds(1e-4)}};
  const Plan plan = compute_plan(step, options);
  EXPECT_LE(plan.predicted_peak, options.limit);
  EXPECT_GT(plan.exposed.count(), 0);
}

TEST(ComputePlan, IsTheSameEveryTime) {
  const Step step = chain(30);
  PlanOptions options;
  options.limit = 14_MiB;
  EXPECT_EQ(compute_plan(step, options), compute_plan(step, options));
}

TEST(ComputePlan, FindsPossiblePlansForRandomStepsAtAllLimits) {
  int planned = 0, refused = 0;
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    Step step = memfit::testing::random_step(random, 10 + static_cast<int>(seed % 50));
    for (Op& op : step.ops)
      if (random() % 4) op.replay = Replay::Yes;
    ASSERT_EQ(trace::find_fault(step), std::nullopt);
    for (double fraction : {0.95, 0.85, 0.7, 0.5}) {
      PlanOptions options;
      options.effort = 0.003;
      options.limit = Bytes(static_cast<std::uint64_t>(static_cast<double>(trace::peak_bytes(step).count()) * fraction));
      try {
        const Plan plan = compute_plan(step, options);  // simulates the plan and throws logic_error if it is impossible
        EXPECT_LE(simulate(step, plan).peak, options.limit);
        EXPECT_EQ(plan_from_json(plan_to_json(plan).dump(), "plan").instructions, plan.instructions);
        ++planned;
      } catch (const LimitTooLow& error) {
        EXPECT_GT(error.floor().reached, options.limit);
        ++refused;
      }
    }
  }
  EXPECT_GT(planned, 30);
  EXPECT_GT(refused, 30);
}

TEST(ComputePlan, ALongChainIsCutIntoStretches) {
  const Step step = chain(12000);
  ASSERT_GT(step.ops.size(), 20000u);
  const std::uint64_t peak = trace::peak_bytes(step).count();
  for (const double part : {0.5, 0.1}) {
    PlanOptions options;
    options.effort = 0.01;
    options.limit = Bytes(static_cast<std::uint64_t>(part * static_cast<double>(peak)));
    const Plan plan = compute_plan(step, options);
    EXPECT_LE(plan.predicted_peak, options.limit);
    // Segments that are dropped and made again once cost at most one more forward, 12,000 ops of 1 ms.
    EXPECT_LE(plan.recompute.count(), 12.0);
  }
}

TEST(Schedule, ManyChangesAtOnceAreTheSameAsOneAfterTheOther) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    Step step = memfit::testing::random_step(random, 400);
    for (Op& op : step.ops) op.replay = random() % 8 ? Replay::Yes : Replay::SideEffect;
    const detail::Problem p = detail::make_problem(step);
    const std::int64_t limit = static_cast<std::int64_t>(trace::peak_bytes(step).count() / 2);
    detail::Schedule together(p, limit), apart(p, limit);
    detail::Schedule::Changes changes;
    for (std::size_t g = 0; g < p.gaps.size(); ++g) {
      const detail::Gap& gap = p.gaps[g];
      const std::int32_t op = p.producer[gap.value];
      if (op < 0 || !p.replayable[op] || (!changes.empty() && changes.back().first == gap.value)) continue;
      changes.emplace_back(gap.value, std::vector<detail::Absence>{detail::Schedule::recompute(gap.a, gap.b)});
      if (!apart.assign(gap.value, changes.back().second)) changes.pop_back();
    }
    ASSERT_GT(changes.size(), 70u) << "few changes are not put off";
    const double cost = together.cost();
    const std::int64_t violation = together.violation();
    ASSERT_TRUE(together.assign_all(changes)) << "seed " << seed;
    ASSERT_TRUE(together.check_invariants()) << "seed " << seed;
    EXPECT_EQ(together.violation(), apart.violation());
    EXPECT_NEAR(together.cost(), apart.cost(), 1e-9);
    EXPECT_TRUE(std::ranges::equal(together.profile(), apart.profile()));
    together.rollback(0);
    EXPECT_EQ(together.violation(), violation);
    EXPECT_NEAR(together.cost(), cost, 1e-9);
    ASSERT_TRUE(together.check_invariants()) << "after the rollback, seed " << seed;
  }
}

TEST(Schedule, IsExactAfterRandomChangesAndRollbacks) {
  for (std::uint32_t seed = 0; seed < 60; ++seed) {
    std::mt19937 random(seed);
    Step step = memfit::testing::random_step(random, 40);
    for (Op& op : step.ops) op.replay = random() % 8 ? Replay::Yes : Replay::SideEffect;
    const auto problem = detail::make_problem(step);
    if (problem.gaps.empty()) continue;
    detail::Schedule s(problem, static_cast<std::int64_t>(trace::peak_bytes(step).count() * 0.7));
    const std::vector<std::int64_t> empty(s.profile().begin(), s.profile().end());
    for (int round = 0; round < 60; ++round) {
      const auto mark = s.mark();
      const auto& gap = problem.gaps[random() % problem.gaps.size()];
      if (problem.producer[gap.value] < 0) continue;
      std::vector<detail::Absence> list;
      if (random() % 4) list.push_back(detail::Schedule::recompute(gap.a, gap.b));
      s.assign(gap.value, list);
      if (random() % 3 == 0) s.rollback(mark);
      ASSERT_TRUE(s.check_invariants()) << "seed " << seed << " round " << round;
    }
    s.rollback(0);
    EXPECT_TRUE(std::equal(empty.begin(), empty.end(), s.profile().begin()));
    EXPECT_NEAR(s.cost(), 0, 1e-9);
  }
}

}  // namespace
}  // namespace memfit::plan
