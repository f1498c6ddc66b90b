#include "memfit/plan/simulate.h"

#include <gtest/gtest.h>

#include "memfit/core/error.h"
#include "memfit/plan/plan_json.h"

namespace memfit::plan {
namespace {

using namespace memfit::literals;
using trace::Op;
using trace::Seconds;
using trace::Step;
using trace::StepBuilder;
using trace::Value;
using trace::ValueId;

/// a (source, 1 MiB); op 0: b = f(a) 2 MiB; op 1: c = g(b) in place; op 2: d = h(a) 1 MiB; op 3: reads c, d and drops them.
Step small_step() {
  StepBuilder b;
  Value a;
  a.bytes = 1_MiB;
  const ValueId va = b.add_source(a);
  auto op = [&](const char* name, std::vector<ValueId> in, std::vector<Value> out) {
    Op o;
    o.name = b.intern(name);
    o.seconds = Seconds(0.010);
    ValueId first = 0;
    b.add_op(o, in, out, &first);
    return first;
  };
  Value v;
  v.bytes = 2_MiB;
  v.storage = 1;
  const ValueId vb = op("f", {va}, {v});
  v.overwrites = vb;
  const ValueId vc = op("g", {vb}, {v});
  Value d;
  d.bytes = 1_MiB;
  d.storage = 2;
  const ValueId vd = op("h", {va}, {d});
  op("use", {vc, vd}, {});
  b.drop(vc);
  b.drop(vd);
  b.step().seconds = Seconds(0.050);
  return b.take();
}

Plan schedule(const std::string& instructions) {
  return plan_from_json(R"({"version": 1, "ops": 4, "instructions": [)" + instructions + "]}", "s.json");
}

TEST(Simulate, CountsAnInPlaceValueOnce) {
  const Step step = small_step();
  EXPECT_EQ(trace::find_fault(step), std::nullopt);
  const Simulation s = simulate(step, keep_everything(step));
  EXPECT_TRUE(s.possible) << s.fault;
  EXPECT_EQ(s.peak, 4_MiB);
  EXPECT_DOUBLE_EQ(s.step.count(), 0.050);  // by the clock, not the sum over ops
}

TEST(Simulate, ReplaysAnInPlaceOpFromItsFirstVersion) {
  const Step step = small_step();
  const Simulation s = simulate(step, schedule(R"(["after", 1, "drop", 2], ["before", 3, "replay", 0], ["before", 3, "replay", 1])"));
  EXPECT_TRUE(s.possible) << s.fault;
  EXPECT_EQ(s.replays, 2u);
  EXPECT_NEAR(s.recompute.count(), 0.020, 1e-12);
  EXPECT_NEAR(s.step.count(), 0.070, 1e-12);
}

TEST(Simulate, KeepsTheOlderVersionWhenToldToAndCountsBoth) {
  const Step step = small_step();
  const Simulation s = simulate(step, schedule(
      R"(["after", 1, "drop", 2], ["before", 3, "replay", 0], ["before", 3, "replay", 1, "preserve"], ["before", 3, "drop", 1])"));
  EXPECT_TRUE(s.possible) << s.fault;
  EXPECT_EQ(s.peak, 6_MiB);  // a, d, b and c
}

TEST(Simulate, RefusesAnOpWhoseInputIsGone) {
  const Simulation s = simulate(small_step(), schedule(R"(["after", 1, "drop", 2])"));
  EXPECT_FALSE(s.possible);
  EXPECT_EQ(s.fault_op, 3u);
  EXPECT_NE(s.fault.find("value 2"), std::string::npos) << s.fault;
}

TEST(Simulate, RefusesAReplayOfTheFuture) { EXPECT_FALSE(simulate(small_step(), schedule(R"(["before", 1, "replay", 2])")).possible); }

TEST(Simulate, RefusesOffloadWithoutATarget) { EXPECT_FALSE(simulate(small_step(), schedule(R"(["after", 1, "start_offload", 2])")).possible); }

TEST(Simulate, HidesTrafficBehindOpsAndShowsTheRest) {
  const Step step = small_step();
  const Plan plan = schedule(
      R"(["after", 1, "start_offload", 2], ["before", 2, "finish_offload", 2], ["before", 3, "start_fetch", 2], ["before", 3, "finish_fetch", 2])");
  Traffic traffic{200.0 * (1 << 20), 400.0 * (1 << 20), Seconds(0)};  // 10 ms out, 5 ms back, nothing in between to hide them
  const Simulation s = simulate(step, plan, traffic);
  EXPECT_TRUE(s.possible) << s.fault;
  EXPECT_NEAR(s.exposed.count(), 0.015, 1e-9);
  EXPECT_EQ(s.offload_write, 2_MiB);
  EXPECT_EQ(s.offload_read, 2_MiB);
  const Plan later = schedule(
      R"(["after", 1, "start_offload", 2], ["before", 3, "finish_offload", 2], ["before", 3, "start_fetch", 2], ["before", 3, "finish_fetch", 2])");
  EXPECT_NEAR(simulate(step, later, traffic).exposed.count(), 0.005, 1e-9);  // op 2 takes 12.5 ms by the clock
}

TEST(PlanJson, RefusesWhatIsNoSchedule) {
  for (const char* text : {"", "[]", "{}", R"({"version": 2, "ops": 1, "instructions": []})", R"({"version": 1, "ops": -1, "instructions": []})",
                           R"({"version": 1, "ops": 1, "instructions": [["after", 2, "drop", 0]]})",
                           R"({"version": 1, "ops": 1, "instructions": [["after", 0, "explode", 0]]})",
                           R"({"version": 1, "ops": 2, "instructions": [["after", 1, "drop", 0], ["after", 0, "drop", 0]]})",
                           R"({"version": 1, "ops": 99999999999, "instructions": []})"})
    EXPECT_THROW(plan_from_json(text, "s.json"), BadInput) << text;
}

}  // namespace
}  // namespace memfit::plan
