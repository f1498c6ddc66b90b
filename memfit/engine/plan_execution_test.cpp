// Steps that run by plan, in one process of one door: MEMFIT_TEST_DOOR says which ("fake", "generic_mode").
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/core/error.h"
#include "memfit/engine/engine.h"
#include "memfit/engine/session.h"

namespace memfit::engine {
namespace {

using at::Tensor;
namespace fs = std::filesystem;

memory::CpuAllocator& allocator() { return memory::CpuAllocator::instance(); }

std::uint64_t hash_of(const Tensor& tensor) {
  const Tensor t = tensor.detach().contiguous();
  return std::hash<std::string_view>()({static_cast<const char*>(t.const_data_ptr()), t.nbytes()});
}

struct Outcome {
  std::vector<std::uint64_t> bits;
  std::uint64_t base = 0, peak = 0;
  SessionStats stats;
};

using Program = std::function<std::vector<Tensor>()>;

Outcome run(const Program& program, std::uint64_t limit, const std::string& folder = "", bool plan = true) {
  SessionOptions options;
  options.tensor_memory = Bytes(limit);
  options.plan = plan;
  options.offload = folder;
  const char* door = std::getenv("MEMFIT_TEST_DOOR");
  options.door = door == nullptr ? "" : door;
  Session session(options);
  allocator().trim(0);
  allocator().reset_peaks();
  Outcome out;
  out.base = allocator().ledger().live;
  const SessionStats before = session.stats();
  at::manual_seed(7);
  const std::vector<Tensor> made = program();
  out.peak = limit == 0 ? allocator().ledger().peak_live : allocator().ledger().peak;
  out.stats = session.stats();
  out.stats.planned_steps -= before.planned_steps;
  out.stats.packed -= before.packed;
  session.set_tensor_memory(Bytes());
  for (const Tensor& t : made) out.bits.push_back(hash_of(t));
  Engine::instance().check_invariants();
  return out;
}

std::uint64_t limit_at(double fraction, const Outcome& idle) {
  return idle.base + static_cast<std::uint64_t>(fraction * static_cast<double>(idle.peak - idle.base));
}

/// Equal bits and no byte over the limit. Returns the run under it.
Outcome expect_exact(const Program& program, double fraction, const std::string& folder = "") {
  const Outcome idle = run(program, 0);
  const std::uint64_t limit = limit_at(fraction, idle);
  const Outcome tight = run(program, limit, folder);
  EXPECT_EQ(tight.bits, idle.bits);
  EXPECT_LE(tight.peak, limit);
  return tight;
}

struct Net : torch::nn::Module {
  explicit Net(double dropout = 0.2) {
    for (int i = 0; i < 6; ++i) {
      layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(64, 64)));
      drops.push_back(register_module("d" + std::to_string(i), torch::nn::Dropout(dropout)));
    }
    norm = register_module("norm", torch::nn::BatchNorm1d(64));
  }
  Tensor forward(Tensor x, int depth = 6) {
    for (int i = 0; i < depth; ++i) x = drops[static_cast<std::size_t>(i)](torch::gelu(layers[static_cast<std::size_t>(i)](x)));
    return norm(x);
  }
  std::vector<torch::nn::Linear> layers;
  std::vector<torch::nn::Dropout> drops;
  torch::nn::BatchNorm1d norm{nullptr};
};

/// Trains for `steps`; `loss_of(net, step)`.
Program training(int steps, std::function<Tensor(Net&, int)> loss_of) {
  return [=] {
    Net net;
    torch::optim::AdamW adam(net.parameters(), 1e-3);
    std::vector<Tensor> out;
    for (int i = 0; i < steps; ++i) {
      adam.zero_grad();
      Tensor loss = loss_of(net, i);
      loss.backward();
      adam.step();
      out.push_back(loss.detach().clone());
    }
    for (const Tensor& p : net.parameters()) out.push_back(p);
    for (const Tensor& b : net.buffers()) out.push_back(b);
    return out;
  };
}

Tensor batch(std::int64_t rows) { return at::ones({rows, 64}).mul_(0.3).add_(at::linspace(0, 1, 64)); }

class PlanExecution : public testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("memfit_plan_" + std::to_string(getpid()));
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path folder_;
};

TEST_F(PlanExecution, StepsThatComeAgainRunByPlan) {
  const Outcome out = expect_exact(training(12, [](Net& net, int) { return net.forward(batch(512)).square().mean(); }), 0.6);
  EXPECT_GE(out.stats.planned_steps, 7u);
}

TEST_F(PlanExecution, WithoutPlansNoStepRunsByOne) {
  const Program program = training(12, [](Net& net, int) { return net.forward(batch(512)).square().mean(); });
  const Outcome idle = run(program, 0);
  const Outcome tight = run(program, limit_at(0.6, idle), "", false);
  EXPECT_EQ(tight.bits, idle.bits);
  EXPECT_EQ(tight.stats.planned_steps, 0u);
}

TEST_F(PlanExecution, MasksAreKeptAsBits) {
  const Outcome out = expect_exact(training(12, [](Net& net, int) { return net.forward(batch(2048)).square().mean(); }), 0.5);
  EXPECT_GT(out.stats.packed, 0u);
}

TEST_F(PlanExecution, ABranchTakenEveryThirdStepKeepsItsBits) {
  const Outcome out = expect_exact(training(24, [](Net& net, int step) {
    Tensor y = net.forward(batch(512));
    if (step % 3 == 2) y = torch::tanh(y) * y;
    return y.square().mean();
  }), 0.65);
  EXPECT_GT(out.stats.planned_steps, 0u);
}

TEST_F(PlanExecution, ChangingLengthsKeepTheirBits) {
  const Outcome out = expect_exact(training(30, [](Net& net, int step) { return net.forward(batch(256 + 64 * (step * 7 % 4))).square().mean(); }), 0.65);
  EXPECT_GT(out.stats.planned_steps, 0u);
}

TEST_F(PlanExecution, AStepThatEndsElsewhereFallsBackToTheOnlinePolicy) {
  expect_exact(training(20, [](Net& net, int step) { return net.forward(batch(512), step < 10 || step % 2 == 0 ? 6 : 3).square().mean(); }), 0.65);
}

TEST_F(PlanExecution, EvaluationInBetweenKeepsItsBits) {
  const Outcome out = expect_exact(training(24, [](Net& net, int step) {
    if (step % 5 == 4) {
      torch::NoGradGuard no_grad;
      net.eval();
      for (int i = 0; i < 3; ++i) net.forward(batch(700));
      net.train();
    }
    return net.forward(batch(512)).square().mean();
  }), 0.65);
  EXPECT_GT(out.stats.planned_steps, 0u);
}

TEST_F(PlanExecution, AnOpThatThrowsInAPlannedStepLeavesItIntact) {
  expect_exact(training(16, [](Net& net, int step) {
    Tensor y = net.forward(batch(512));
    if (step > 8) {
      try {
        y = y + at::ones({3, 5});
      } catch (const c10::Error&) {
      }
    }
    return y.square().mean();
  }), 0.65);
}

TEST_F(PlanExecution, GradientsOfSeveralBatchesAddUp) {
  const Outcome out = expect_exact([] {
    Net net;
    torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    std::vector<Tensor> made;
    for (int step = 0; step < 16; ++step) {
      sgd.zero_grad();
      for (int i = 0; i < 3; ++i) {
        Tensor loss = net.forward(batch(400)).square().mean() / 3;
        loss.backward();
        made.push_back(loss.detach().clone());
      }
      sgd.step();
    }
    for (const Tensor& p : net.parameters()) made.push_back(p);
    return made;
  }, 0.65);
  EXPECT_GT(out.stats.planned_steps, 0u);
}

/// Parameters, gradients and state are most of what it needs.
Program wide() {
  return [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 6; ++i) {
      net->push_back(torch::nn::Linear(256, 256));
      net->push_back(torch::nn::Tanh());
    }
    torch::optim::AdamW adam(net->parameters(), 1e-3);
    std::vector<Tensor> out;
    for (int i = 0; i < 12; ++i) {
      adam.zero_grad();
      Tensor loss = net->forward(at::ones({32, 256}).mul_(0.1)).square().mean();
      loss.backward();
      adam.step();
      out.push_back(loss.detach().clone());
    }
    for (const Tensor& p : net->parameters()) out.push_back(p);
    return out;
  };
}

TEST_F(PlanExecution, WhatCannotBeMadeAgainGoesToAFileWithoutAName) {
  const Outcome out = expect_exact(wide(), 0.6, folder_.string());
  EXPECT_GT(out.stats.offload_written, Bytes());
  EXPECT_GT(out.stats.offload_read, Bytes());
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(PlanExecution, OffloadingKeepsBitsWhereStepsChange) {
  expect_exact(training(24, [](Net& net, int step) {
    Tensor y = net.forward(batch(512));
    if (step % 3 == 2) y = torch::tanh(y) * y;
    return y.square().mean();
  }), 0.5, folder_.string());
}

TEST_F(PlanExecution, AFolderThatCannotServeIsNamed) {
  SessionOptions options;
  options.offload = (folder_ / "missing").string();
  try {
    Session session(options);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("missing"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace memfit::engine
