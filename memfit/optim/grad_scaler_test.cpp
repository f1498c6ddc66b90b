#include "memfit/optim/grad_scaler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/optim/sgd.h"

namespace memfit::optim {
namespace {

using at::Tensor;
using testing::HasSubstr;

struct One {
  Tensor weight = at::ones({2}).set_requires_grad(true);
  Sgd sgd{{{"all", {{"weight", weight}}}}, {.learning_rate = 1}};
  void backward(GradScaler& scaler, float gradient) {
    sgd.zero_grad();
    scaler.scale((weight * gradient).sum()).backward();
  }
};

template <class Run>
std::string message(Run run) {
  try {
    run();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no UsageError";
}

TEST(GradScalerTest, GrowsAfterTheIntervalAndBacksOffAtInfinity) {
  One one;
  GradScaler scaler({.scale = 4, .growth_interval = 2});
  one.backward(scaler, 1);
  EXPECT_TRUE(scaler.step(one.sgd));
  scaler.update();
  EXPECT_EQ(scaler.scale_factor(), 4);
  EXPECT_EQ(one.weight[0].item<float>(), 0);
  one.backward(scaler, 1);
  EXPECT_TRUE(scaler.step(one.sgd));
  scaler.update();
  EXPECT_EQ(scaler.scale_factor(), 8);
  one.backward(scaler, std::numeric_limits<float>::infinity());
  EXPECT_FALSE(scaler.step(one.sgd));
  scaler.update();
  EXPECT_EQ(scaler.scale_factor(), 4);
  EXPECT_EQ(one.weight[0].item<float>(), -1);
  EXPECT_EQ(scaler.skipped_steps(), 1);
}

TEST(GradScalerTest, OneOptimizerIsSkippedAndTheOtherSteps) {
  One good, bad;
  GradScaler scaler({.scale = 4});
  good.backward(scaler, 1);
  bad.backward(scaler, std::nanf(""));
  EXPECT_TRUE(scaler.step(good.sgd));
  EXPECT_FALSE(scaler.step(bad.sgd));
  scaler.update();
  EXPECT_EQ(scaler.scale_factor(), 2);
}

TEST(GradScalerTest, StateGoesOn) {
  One one;
  GradScaler first({.scale = 4, .growth_interval = 2});
  one.backward(first, 1);
  first.step(one.sgd);
  first.update();
  GradScaler second;
  second.load_state(nlohmann::json::parse(first.state().dump()));
  one.backward(second, 1);
  second.step(one.sgd);
  second.update();
  EXPECT_EQ(second.scale_factor(), 8);
}

TEST(GradScalerTest, OptimizersOfLibTorchStepToo) {
  Tensor weight = at::ones({2}).set_requires_grad(true);
  torch::optim::SGD sgd({weight}, 1.0);
  GradScaler scaler({.scale = 4});
  scaler.scale(weight.sum()).backward();
  EXPECT_TRUE(scaler.step(sgd));
  EXPECT_EQ(weight[0].item<float>(), 0);
}

TEST(GradScalerTest, DisabledItLetsThrough) {
  One one;
  GradScaler off({.enabled = false});
  one.backward(off, 1);
  EXPECT_TRUE(off.step(one.sgd));
  off.update();
  EXPECT_EQ(off.scale_factor(), 1);
  EXPECT_TRUE(off.state().empty());
  EXPECT_THAT(message([&] { GradScaler().load_state(off.state()); }), HasSubstr("was not enabled"));
}

TEST(GradScalerTest, WrongUsesAreNamed) {
  EXPECT_THAT(message([] { GradScaler({.growth_factor = 1}); }), HasSubstr("growth_factor of 1; it must be above 1"));
  EXPECT_THAT(message([] { GradScaler({.backoff_factor = 1}); }), HasSubstr("backoff_factor of 1; it must be below 1"));
  EXPECT_THAT(message([] { GradScaler({.growth_interval = 0}); }), HasSubstr("growth_interval of 0"));
  One one;
  GradScaler scaler;
  EXPECT_THAT(message([&] { scaler.unscale(one.sgd); }), HasSubstr("nothing was scaled yet"));
  EXPECT_THAT(message([&] { scaler.update(); }), HasSubstr("before anything was scaled"));
  const Tensor loss = scaler.scale(one.weight.sum());
  EXPECT_THAT(message([&] { scaler.update(); }), HasSubstr("update() without step()"));
  EXPECT_THAT(message([&] { scaler.unscale(one.sgd); }), HasSubstr("no parameter of the optimizer has a gradient"));
  loss.backward();
  scaler.unscale(one.sgd);
  EXPECT_THAT(message([&] { scaler.unscale(one.sgd); }), HasSubstr("called twice"));
  scaler.step(one.sgd);
  EXPECT_THAT(message([&] { scaler.step(one.sgd); }), HasSubstr("step() was called twice"));
  EXPECT_THAT(message([&] { scaler.unscale(one.sgd); }), HasSubstr("after step()"));
  One half;
  half.weight = at::ones({2}, at::kHalf).set_requires_grad(true);
  Sgd sgd({{"all", {{"weight", half.weight}}}}, {});
  scaler.scale(half.weight.sum()).backward();
  EXPECT_THAT(message([&] { scaler.unscale(sgd); }), HasSubstr("a gradient is float16"));
  One fused;
  fused.sgd.step_in_backward(true);
  EXPECT_THAT(message([&] { scaler.step(fused.sgd); }), HasSubstr("steps in backward"));
}

}  // namespace
}  // namespace memfit::optim
