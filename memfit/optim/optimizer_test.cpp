#include "memfit/optim/optimizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/engine/session.h"
#include "memfit/memory/cpu_allocator.h"
#include "memfit/optim/adafactor.h"
#include "memfit/optim/adam.h"
#include "memfit/optim/autocast.h"
#include "memfit/optim/lion.h"
#include "memfit/optim/sgd.h"

namespace memfit::optim {
namespace {

using at::Tensor;
using testing::HasSubstr;
using namespace literals;

using Make = std::function<std::unique_ptr<Optimizer>(std::vector<ParameterGroup>)>;

std::map<std::string, Make> all_kinds(CommonOptions common = {}) {
  return {
      {"SGD", [=](auto g) { return std::make_unique<Sgd>(g, SgdOptions{.momentum = 0.9, .common = common}); }},
      {"Adam", [=](auto g) { return std::make_unique<Adam>(g, AdamOptions{.amsgrad = true, .common = common}); }},
      {"AdamW", [=](auto g) { return std::make_unique<AdamW>(g, AdamOptions{.common = common}); }},
      {"Lion", [=](auto g) { return std::make_unique<Lion>(g, LionOptions{.weight_decay = 0.1, .common = common}); }},
      {"Adafactor", [=](auto g) { return std::make_unique<Adafactor>(g, AdafactorOptions{.weight_decay = 0.1}); }},
  };
}

struct Net {
  std::vector<NamedTensor> parameters;
  Net() {
    at::manual_seed(3);
    for (const auto& [name, shape] : std::map<std::string, std::vector<std::int64_t>>{{"a", {40, 30}}, {"b", {30}}, {"c", {17, 9, 5}}}) {
      parameters.push_back({name, at::randn(shape).set_requires_grad(true)});
    }
  }
  void set_gradients(int step) {
    at::manual_seed(static_cast<std::uint64_t>(100 + step));
    for (NamedTensor& p : parameters) p.tensor.mutable_grad() = at::randn(p.tensor.sizes());
  }
  std::vector<Tensor> values() const {
    std::vector<Tensor> out;
    for (const NamedTensor& p : parameters) out.push_back(p.tensor.detach().clone());
    return out;
  }
};

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

std::string message(const std::function<void()>& run) {
  try {
    run();
  } catch (const UsageError& e) {
    return e.what();
  }
  return "no UsageError";
}

std::function<Tensor(const std::string&)> lookup(std::vector<NamedTensor> tensors) {
  return [tensors = std::move(tensors)](const std::string& name) {
    for (const NamedTensor& t : tensors) {
      if (t.name == name) return t.tensor;
    }
    return Tensor();
  };
}

class OptimizerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }  // threads that wait for each other are slow on a busy machine
};

TEST_F(OptimizerTest, StateGoesOnBitwiseInAnotherOptimizer) {
  for (const StatePrecision precision : {StatePrecision::Full, StatePrecision::BFloat16Stochastic, StatePrecision::Int8Blockwise}) {
    for (const auto& [kind, make] : all_kinds({.state = precision})) {
      Net straight, first;
      const auto whole = make({{"all", straight.parameters}});
      for (int i = 0; i < 6; ++i) straight.set_gradients(i), whole->step();
      const auto before = make({{"all", first.parameters}});
      for (int i = 0; i < 3; ++i) first.set_gradients(i), before->step();
      const auto after = make({{"all", first.parameters}});
      after->load_state(nlohmann::json::parse(before->state().dump()), lookup(before->state_tensors()));
      for (int i = 3; i < 6; ++i) first.set_gradients(i), after->step();
      EXPECT_TRUE(same(straight.values(), first.values())) << kind << " " << static_cast<int>(precision);
    }
  }
}

TEST_F(OptimizerTest, AFailedAllocationAnywhereInAStepLeavesItToBeCalledAgain) {
  engine::Session session({});
  auto& allocator = memory::CpuAllocator::instance();
  for (const StatePrecision precision : {StatePrecision::Full, StatePrecision::BFloat16Stochastic, StatePrecision::Int8Blockwise}) {
    for (const auto& [kind, make] : all_kinds({.temporaries = 8_KiB, .state = precision})) {
      Net calm;
      const auto quiet = make({{"all", calm.parameters}});
      for (int i = 0; i < 2; ++i) calm.set_gradients(i), quiet->step();
      int failures = 0;
      for (std::uint64_t at = 0; at < 2000; at += 1 + at / 5) {
        Net net;
        const auto optimizer = make({{"all", net.parameters}});
        bool failed = false;
        for (int i = 0; i < 2; ++i) {
          net.set_gradients(i);
          if (i == 1) allocator.fail_after(at, 1);
          try {
            optimizer->step();
          } catch (const std::exception&) {
            failed = true;
            EXPECT_TRUE(optimizer->unfinished());
            optimizer->step();
          }
          allocator.fail_after(0, 0);
        }
        failures += failed;
        ASSERT_TRUE(same(calm.values(), net.values())) << kind << " at allocation " << at;
        if (!failed) break;
      }
      if (kind != "SGD") EXPECT_GT(failures, 0) << kind;
    }
  }
}

TEST_F(OptimizerTest, PiecesGiveTheSameBitsAsWholeParameters) {
  Net whole, pieces;
  Lion one({{"all", whole.parameters}}, {.weight_decay = 0.1});
  Lion other({{"all", pieces.parameters}}, {.weight_decay = 0.1, .common = {.temporaries = 4_KiB}});
  for (int i = 0; i < 4; ++i) {
    whole.set_gradients(i), one.step();
    pieces.set_gradients(i), other.step();
  }
  EXPECT_TRUE(same(whole.values(), pieces.values()));
}

TEST_F(OptimizerTest, TemporariesStayWithinTheOption) {
  engine::Session session({});
  auto& allocator = memory::CpuAllocator::instance();
  for (const StatePrecision precision : {StatePrecision::Full, StatePrecision::BFloat16Stochastic, StatePrecision::Int8Blockwise}) {
    for (const auto& [kind, make] : all_kinds({.temporaries = 256_KiB, .state = precision})) {
      if (kind == "Adafactor") continue;  // takes parameters whole, as its header says
      const Tensor large = at::zeros({1000, 1000}).set_requires_grad(true);
      const auto optimizer = make({{"all", {{"large", large}}}});
      large.mutable_grad() = at::ones({1000, 1000});
      optimizer->step();  // makes the state
      allocator.trim(0);
      allocator.reset_peaks();
      const std::uint64_t before = allocator.ledger().live;
      optimizer->step();
      EXPECT_LE(allocator.ledger().peak_live - before, 256 * 1024u) << kind << " " << static_cast<int>(precision);
    }
  }
}

TEST_F(OptimizerTest, LowPrecisionTakesLessAndStaysNear) {
  Net full, half, byte;
  AdamW a({{"all", full.parameters}}, {}), b({{"all", half.parameters}}, {.common = {.state = StatePrecision::BFloat16Stochastic}}),
      c({{"all", byte.parameters}}, {.common = {.state = StatePrecision::Int8Blockwise}});
  const std::vector<Tensor> start = full.values();
  for (int i = 0; i < 20; ++i) {
    full.set_gradients(i), a.step();
    half.set_gradients(i), b.step();
    byte.set_gradients(i), c.step();
  }
  EXPECT_EQ(b.state_bytes().count() * 2, a.state_bytes().count());
  EXPECT_LT(c.state_bytes().count() * 3.8, static_cast<double>(a.state_bytes().count()));
  const double way = (full.values()[0] - start[0]).norm().item<double>();
  EXPECT_LT((half.values()[0] - full.values()[0]).norm().item<double>(), 0.02 * way);
  EXPECT_LT((byte.values()[0] - full.values()[0]).norm().item<double>(), 0.25 * way);
  EXPECT_FALSE(same(half.values(), full.values()));
}

TEST_F(OptimizerTest, StepInBackwardGivesTheSameBitsAndNoGradients) {
  for (const auto& [kind, make] : all_kinds()) {
    Net plain, fused;
    auto loss = [](Net& net, int i) {
      at::manual_seed(static_cast<std::uint64_t>(i));
      Tensor y = at::tanh(at::randn({8, 40}).matmul(net.parameters[0].tensor) + net.parameters[1].tensor);
      return y.square().mean() + net.parameters[2].tensor.pow(3).mean();
    };
    const auto a = make({{"all", plain.parameters}});
    const auto b = make({{"all", fused.parameters}});
    b->step_in_backward(true);
    for (int i = 0; i < 3; ++i) {
      a->zero_grad();
      loss(plain, i).backward();
      a->step();
      loss(fused, i).backward();
      for (const NamedTensor& p : fused.parameters) EXPECT_FALSE(p.tensor.grad().defined()) << kind;
    }
    EXPECT_TRUE(same(plain.values(), fused.values())) << kind;
    EXPECT_THAT(message([&] { b->step(); }), HasSubstr("backward has made the step already"));
    EXPECT_TRUE(b->step_in_backward(false));
    loss(fused, 9).backward();
    EXPECT_TRUE(fused.parameters[0].tensor.grad().defined());
  }
}

TEST_F(OptimizerTest, GradientsLaidOutOtherwiseCountByPosition) {
  Net plain, turned;
  AdamW a({{"all", plain.parameters}}, {}), b({{"all", turned.parameters}}, {});
  plain.set_gradients(0), turned.set_gradients(0);
  Tensor& gradient = turned.parameters[0].tensor.mutable_grad();
  gradient = gradient.t().contiguous().t();
  a.step(), b.step();
  EXPECT_TRUE(same(plain.values(), turned.values()));
}

TEST_F(OptimizerTest, GroupsHaveTheirOwnRates) {
  Net net;
  Sgd sgd({{"slow", {net.parameters[0]}, 0.0}, {"fast", {net.parameters[1], net.parameters[2]}}}, {.learning_rate = 1});
  const std::vector<Tensor> before = net.values();
  net.set_gradients(0);
  sgd.step();
  EXPECT_TRUE(at::equal(before[0], net.values()[0]));
  EXPECT_TRUE(at::equal(before[1] - net.parameters[1].tensor.grad(), net.values()[1]));
  EXPECT_EQ(sgd.set_learning_rate(0.5, "fast"), 1);
  EXPECT_EQ(sgd.learning_rate("fast"), 0.5);
  EXPECT_EQ(sgd.learning_rate("slow"), 0);
  EXPECT_THAT(message([&] { sgd.set_learning_rate(1, "quick"); }), HasSubstr("no group \"quick\"; the groups are \"slow\", \"fast\""));
}

TEST_F(OptimizerTest, WrongUsesAreNamed) {
  Net net;
  auto refuse = [&](std::vector<ParameterGroup> groups) { return message([&] { AdamW(std::move(groups), {}); }); };
  const NamedTensor& a = net.parameters[0];
  EXPECT_THAT(refuse({}), HasSubstr("no parameters to train"));
  EXPECT_THAT(refuse({{"x", {a}}, {"x", {}}}), HasSubstr("two groups are called \"x\""));
  EXPECT_THAT(refuse({{"x", {a, {"twin", a.tensor}}}}), HasSubstr("\"a\" and \"twin\" are one tensor"));
  EXPECT_THAT(refuse({{"x", {a, {"a", at::zeros({1})}}}}), HasSubstr("two parameters are called \"a\""));
  EXPECT_THAT(refuse({{"x", {{"p", a.tensor * 2}}}}), HasSubstr("\"p\" is the result of an operation"));
  EXPECT_THAT(refuse({{"x", {{"p", at::zeros({4}, at::kLong)}}}}), HasSubstr("\"p\" is no dense floating-point tensor"));
  EXPECT_THAT(refuse({{"x", {a}, -1.0}}), HasSubstr("neither may be negative"));
  EXPECT_THAT(message([&] { Sgd({{"x", {a}}}, {.nesterov = true}); }), HasSubstr("nesterov needs a momentum"));
  EXPECT_THAT(message([&] { Adam({{"x", {a}}}, {.beta1 = 1}); }), HasSubstr("betas of 1 and 0.999"));
  EXPECT_THAT(message([&] { Lion({{"x", {a}}}, {.beta2 = -1}); }), HasSubstr("Lion: betas"));
  EXPECT_THAT(message([&] { Adafactor({{"x", {a}}}, {.common = {.state = StatePrecision::Int8Blockwise}}); }), HasSubstr("use StatePrecision::Full"));
  EXPECT_THAT(message([&] { Adam({{"x", {{"d", at::zeros({4}, at::kDouble)}}}}, {.common = {.state = StatePrecision::Int8Blockwise}}); }),
              HasSubstr("\"d\" is Double"));
  EXPECT_THAT(message([&] { Adam({{"x", {a}}}, {.common = {.temporaries = 0_B}}); }), HasSubstr("temporaries is 0 bytes"));

  Tensor table = at::zeros({4, 2}).set_requires_grad(true);
  AdamW sparse({{"x", {{"table", table}}}}, {});
  at::embedding(table, at::ones({1}, at::kLong), -1, false, true).sum().backward();
  EXPECT_THAT(message([&] { sparse.step(); }), HasSubstr("gradient of \"table\" is sparse"));

  AdamW whole({{"x", net.parameters}}, {}), part({{"x", {a}}}, {});
  EXPECT_THAT(message([&] { part.load_state(whole.state(), lookup({})); }), HasSubstr("Saved, but not here: x: b, x: c"));
  EXPECT_THAT(message([&] { Sgd({{"x", {a}}}, {}).load_state(part.state(), lookup({})); }), HasSubstr("the saved optimizer is AdamW"));
  net.set_gradients(0);
  part.step();
  EXPECT_THAT(message([&] { part.load_state(part.state(), lookup({})); }), HasSubstr("lacks \"a/exp_avg\""));
  EXPECT_THAT(message([&] { part.load_state(part.state(), [](auto&) { return at::zeros({2}); }); }), HasSubstr("\"a/exp_avg\" is Float[40, 30] here and Float[2]"));
}

TEST(AutocastTest, WeightsAreCastAnewAfterAStep) {
  Tensor weight = at::ones({4, 4}).set_requires_grad(true);
  Sgd sgd({{"all", {{"weight", weight}}}}, {.learning_rate = 1});
  const Tensor x = at::ones({1, 4});
  Autocast scope(at::kBFloat16);
  Tensor y = at::linear(x, weight);
  EXPECT_EQ(y.scalar_type(), at::kBFloat16);
  y.sum().backward();
  sgd.step();
  EXPECT_EQ(at::linear(x, weight).sum().item<float>(), 0.0f);  // 1 - 1 everywhere; the old copy would give 16
}

TEST(AutocastTest, ScopesNestAndLeaveNothing) {
  const Tensor x = at::ones({2, 2});
  {
    Autocast outer(at::kBFloat16);
    {
      Autocast inner(at::kHalf, c10::DeviceType::CPU, false);
      EXPECT_EQ(at::matmul(x, x).scalar_type(), at::kFloat);
    }
    EXPECT_EQ(at::matmul(x, x).scalar_type(), at::kBFloat16);
  }
  EXPECT_EQ(at::matmul(x, x).scalar_type(), at::kFloat);
  EXPECT_THAT(message([] { Autocast scope(at::kFloat); }), HasSubstr("Float is not bfloat16 or float16"));
}

}  // namespace
}  // namespace memfit::optim
