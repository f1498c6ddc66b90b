// Small programs under limits, in one process of one door: MEMFIT_TEST_DOOR says which ("fake", "generic_mode").
// MEMFIT_TEST_DEVICE=fake: large blocks come from a device that can be made as small as a test likes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fmt/format.h>

#include <barrier>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "memfit/engine/engine.h"
#include "memfit/engine/out_of_budget.h"
#include "memfit/engine/session.h"
#include "memfit/testing/fake_device.h"

namespace memfit::engine {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Bits = std::vector<std::string>;

memory::CpuAllocator& allocator() { return memory::CpuAllocator::instance(); }

std::string door() {
  const char* name = std::getenv("MEMFIT_TEST_DOOR");
  return name == nullptr ? "" : name;
}

/// nullptr when the tests run on the host.
memfit::testing::FakeDevice* fake_device() {
  static memfit::testing::FakeDevice* const device = [] {
    const char* name = std::getenv("MEMFIT_TEST_DEVICE");
    return name != nullptr && std::string_view(name) == "fake" ? new memfit::testing::FakeDevice(std::uint64_t{4} << 30) : nullptr;
  }();
  return device;
}

/// Before the first large block is taken from the host.
class OnDevice final : public ::testing::Environment {
 public:
  void SetUp() override {
    if (fake_device() != nullptr) allocator().set_device(*fake_device());
  }
};
[[maybe_unused]] const auto* const on_device = ::testing::AddGlobalTestEnvironment(new OnDevice);

SessionOptions options(std::uint64_t limit) {
  SessionOptions o;
  o.tensor_memory = Bytes(limit);
  o.door = door();
  return o;
}

std::string bits_of(const Tensor& tensor) {
  const Tensor t = tensor.detach().contiguous();
  const std::string_view bytes(static_cast<const char*>(t.nbytes() == 0 ? nullptr : t.const_data_ptr()), t.nbytes());
  return fmt::format("{} B {:016x}", bytes.size(), std::hash<std::string_view>()(bytes));   // all of it is unreadable
}

Bits bits_of(const Tensors& tensors) {
  Bits out;
  for (const Tensor& t : tensors) out.push_back(t.defined() ? bits_of(t) : "undefined");
  return out;
}

struct Run {
  Bits bits;
  std::uint64_t base = 0;   // live before
  std::uint64_t peak = 0;
  std::uint64_t evictions = 0;
};

/// The program from its seed on, under `limit` bytes (0: none).
Run run(const std::function<Tensors()>& program, std::uint64_t limit) {
  Session session(options(limit));
  allocator().trim(0);
  allocator().reset_peaks();
  Run out;
  out.base = allocator().ledger().live;
  const std::uint64_t evictions = session.stats().evictions;
  at::manual_seed(7);
  const Tensors made = program();
  out.peak = limit == 0 ? allocator().ledger().peak_live : allocator().ledger().peak;
  out.evictions = session.stats().evictions - evictions;
  session.set_tensor_memory(Bytes());   // a raw read pins its tensor; all results together need not fit
  out.bits = bits_of(made);
  Engine::instance().check_invariants();
  return out;
}

/// The same bits at no limit, 0.7 and 0.5 of the program's own peak (or `fractions`), and no byte over the limit.
void expect_exact(const std::function<Tensors()>& program, const std::vector<double>& fractions = {0.7, 0.5}) {
  Bits plain;
  if (!Engine::instance().started()) {
    at::sin(at::zeros({8}));   // sets MKL's vector math up, as the engine does
    at::manual_seed(7);
    plain = bits_of(program());
  }
  const Run idle = run(program, 0);
  if (!plain.empty()) {
    EXPECT_EQ(idle.bits, plain) << "other bits without any limit";
  }
  for (const double fraction : fractions) {
    const auto limit = idle.base + static_cast<std::uint64_t>(fraction * static_cast<double>(idle.peak - idle.base));
    const Run tight = run(program, limit);
    EXPECT_EQ(tight.bits, idle.bits) << "other bits at " << fraction;
    EXPECT_LE(tight.peak, limit) << "over the limit at " << fraction;
    EXPECT_GT(tight.evictions, 0u) << "the limit did not bind at " << fraction;
  }
}

class EngineTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
  void TearDown() override { allocator().fail_after(0, 0); }
};

/// Losses and gradients after `steps` of training.
template <class Optimizer, class Module>
Tensors train(Module& module, Optimizer& optimizer, int steps, const std::function<Tensor()>& loss_of) {
  Tensors out;
  for (int i = 0; i < steps; ++i) {
    optimizer.zero_grad();
    Tensor loss = loss_of();
    loss.backward();
    optimizer.step();
    out.push_back(loss.detach().clone());
  }
  for (const auto& p : module->parameters()) {
    out.push_back(p);
    out.push_back(p.grad());
  }
  for (const auto& b : module->buffers()) out.push_back(b);
  return out;
}

torch::nn::Sequential mlp(int layers, double dropout = 0) {
  torch::nn::Sequential net;
  for (int i = 0; i < layers; ++i) {
    net->push_back(torch::nn::Linear(32, 32));
    net->push_back(torch::nn::Tanh());
    if (dropout > 0) net->push_back(torch::nn::Dropout(dropout));
  }
  return net;
}

torch::nn::Sequential cnn(int blocks) {
  torch::nn::Sequential net;
  for (int i = 0; i < blocks; ++i) {
    net->push_back(torch::nn::Conv2d(torch::nn::Conv2dOptions(i == 0 ? 3 : 8, 8, 3).padding(1)));
    net->push_back(torch::nn::BatchNorm2d(8));
    net->push_back(torch::nn::ReLU(torch::nn::ReLUOptions(true)));
  }
  return net;
}

TEST_F(EngineTest, AnMlpWithAdamKeepsItsBits) {
  expect_exact([] {
    auto net = mlp(12);
    torch::optim::Adam adam(net->parameters(), 1e-3);
    const Tensor x = at::randn({512, 32});
    return train(net, adam, 3, [&] { return net->forward(x).pow(2).mean(); });
  });
}

TEST_F(EngineTest, DropoutDrawsTheSameMaskWhenItIsMadeAgain) {
  expect_exact([] {
    auto net = mlp(10, 0.3);
    torch::optim::SGD sgd(net->parameters(), 0.1);
    const Tensor x = at::randn({512, 32});
    Tensors out = train(net, sgd, 2, [&] { return net->forward(x).pow(2).mean(); });
    out.push_back(at::globalContext().defaultGenerator(at::kCPU).get_state());
    return out;
  });
}

TEST_F(EngineTest, BatchNormMovesItsStatisticsOncePerStep) {
  expect_exact([] {
    auto net = cnn(8);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    const Tensor x = at::randn({8, 3, 20, 20});
    Tensors out = train(net, sgd, 2, [&] { return net->forward(x).mean(); });
    const auto norm = net[1]->as<torch::nn::BatchNorm2d>();
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 2);
    out.push_back(norm->running_mean.clone());
    out.push_back(norm->running_var.clone());
    return out;
  });
}

struct Block : torch::nn::Module {
  explicit Block(int d)
      : norm1(register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        qkv(register_module("qkv", torch::nn::Linear(d, 3 * d))),
        out(register_module("out", torch::nn::Linear(d, d))),
        norm2(register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({d})))),
        up(register_module("up", torch::nn::Linear(d, 4 * d))),
        down(register_module("down", torch::nn::Linear(4 * d, d))) {}
  Tensor forward(Tensor x) {
    const auto b = x.size(0), t = x.size(1), d = x.size(2);
    const auto parts = qkv(norm1(x)).view({b, t, 3, 4, d / 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    Tensor weights = at::softmax(parts[0].matmul(parts[1].transpose(-1, -2)) / 4 + mask(t), -1);
    weights = at::dropout(weights, 0.1, is_training());
    x = x + out(weights.matmul(parts[2]).transpose(1, 2).reshape({b, t, d}));
    return x + at::dropout(down(at::gelu(up(norm2(x)))), 0.1, is_training());
  }
  static Tensor mask(std::int64_t t) { return at::triu(at::full({t, t}, -1e9), 1); }
  torch::nn::LayerNorm norm1;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm norm2;
  torch::nn::Linear up, down;
};

TEST_F(EngineTest, ATransformerKeepsItsBits) {
  expect_exact([] {
    torch::nn::Sequential net(torch::nn::Embedding(50, 32));
    for (int i = 0; i < 4; ++i) net->push_back(std::make_shared<Block>(32));
    net->push_back(torch::nn::Linear(32, 50));
    torch::optim::AdamW adam(net->parameters(), 1e-3);
    const Tensor tokens = at::randint(50, {8, 49}, at::kLong);
    return train(net, adam, 2, [&] {
      const Tensor logits = net->forward(tokens.slice(1, 0, 48));
      return torch::nn::functional::cross_entropy(logits.reshape({-1, 50}), tokens.slice(1, 1, 49).reshape({-1}));
    });
  });
}

TEST_F(EngineTest, ChainsOfInPlaceOpsAreMadeAgainFromTheirOldVersions) {
  expect_exact([] {
    const Tensor x = at::randn({256, 64}).requires_grad_();
    Tensor y = x * 1.5;
    Tensors kept;
    for (int i = 0; i < 12; ++i) {
      y = y.sin();
      y.mul_(1.25).add_(0.5).sub_(x.detach(), 0.1);
      kept.push_back(y * y);
      y = y.clone();
      y.relu_();
    }
    Tensor sum = y.sum();
    for (const Tensor& k : kept) sum = sum + (k * k.sigmoid()).sum();
    sum.backward();
    return Tensors{sum, x.grad()};
  });
}

TEST_F(EngineTest, WritesIntoSlicesAndViewsLandWhereTheyBelong) {
  expect_exact([] {
    Tensors kept;
    for (int i = 0; i < 10; ++i) {
      Tensor a = at::zeros({64, 128});
      const Tensor source = at::randn({64, 64});
      a.slice(1, 0, 64).copy_(source);
      a.slice(1, 64, 128).add_(source.t(), 2);
      a.select(0, i).fill_(i);
      a.t().narrow(0, 3, 2).mul_(3);
      a.view({128, 64}).select(1, 5).zero_();
      kept.push_back(a);
      kept.push_back(a.unfold(1, 4, 4).sum(-1));
    }
    Tensors out;
    for (Tensor& k : kept) {
      out.push_back(k.sum(0));
      k = Tensor();
    }
    return out;
  });
}

TEST_F(EngineTest, RandomOpsUseTheGeneratorTheyWereGiven) {
  expect_exact([] {
    auto mine = at::make_generator<at::CPUGeneratorImpl>(99);
    Tensors kept;
    for (int i = 0; i < 6; ++i) {
      kept.push_back(at::rand({4096}, mine, at::kFloat));
      kept.push_back(at::empty({4096}).normal_(0, 2, mine));
      kept.push_back(at::bernoulli(kept[0].reciprocal().reciprocal().clamp(0, 1), mine));
      kept.push_back(at::randn({4096}));
      kept.push_back(at::empty({4096}).uniform_(-1, 1).exp());
      kept.push_back(at::randperm(2048, mine, at::kLong));
      kept.push_back(at::empty({4096}).exponential_(2));
    }
    Tensors out;
    for (Tensor& k : kept) {
      out.push_back(k.to(at::kDouble).sum());
      k = Tensor();
    }
    out.push_back(mine.get_state());
    out.push_back(at::globalContext().defaultGenerator(at::kCPU).get_state());
    return out;
  });
}

TEST_F(EngineTest, ARetainedGraphRunsTwiceAndTwiceDifferentiated) {
  expect_exact([] {
    auto net = mlp(8);
    const Tensor x = at::randn({256, 32}).requires_grad_();
    Tensor loss = net->forward(x).pow(2).mean();
    loss.backward({}, /*retain_graph=*/true);
    Tensor first = x.grad().clone();
    loss.backward({}, /*retain_graph=*/true);
    const Tensor gradient = torch::autograd::grad({loss}, {x}, {}, true, /*create_graph=*/true)[0];
    gradient.pow(2).sum().backward();
    Tensors out{loss, first, x.grad()};
    for (const auto& p : net->parameters()) out.push_back(p.grad());
    return out;
  });
}

TEST_F(EngineTest, AnOpThatThrowsInMidStepLeavesTheStepIntact) {
  expect_exact([] {
    auto net = mlp(10);
    const Tensor x = at::randn({512, 32});
    Tensor h = net->forward(x);
    int caught = 0;
    for (int i = 0; i < 3; ++i) {
      try {
        h.mm(h);
      } catch (const c10::Error&) {
        ++caught;
      }
      try {
        Tensor y = h * 2;
        y.mul_(at::ones({3, 5}));
      } catch (const c10::Error&) {
        ++caught;
      }
    }
    EXPECT_EQ(caught, 6);
    h.pow(2).mean().backward();
    Tensors out{h.sum()};
    for (const auto& p : net->parameters()) out.push_back(p.grad());
    return out;
  });
}

TEST_F(EngineTest, WhatIsWrittenThroughAHeldPointerIsNotLost) {
  expect_exact([] {
    Tensor written = at::randn({64, 256}).sin();
    const Tensor before = written.cos();      // made from the old content
    float* raw = written.data_ptr<float>();
    Tensors kept;
    Tensor h = written.detach().clone();
    for (int i = 0; i < 12; ++i) {
      h = (h * 1.01).tanh();
      kept.push_back(h);
      raw[i] = static_cast<float>(i);
    }
    Tensor after = written.exp().sum();
    raw[3] = 17;
    Tensors out{after, before.sum(), written.sum(0)};
    for (Tensor& k : kept) {
      out.push_back(k.sum());
      k = Tensor();
    }
    return out;
  });
}

TEST_F(EngineTest, WhatIsWrittenThroughAPointerTakenBeforeAnyOpReadTheTensorIsNotLost) {
  expect_exact([] {
    Tensors kept;
    Tensor small = at::ones({16}), large = at::ones({4096});
    auto* s = small.mutable_data_ptr<float>();
    auto* l = large.mutable_data_ptr<float>();
    for (int i = 0; i < 12; ++i) {
      Tensor y = at::randn({256, 16}) * small;
      kept.push_back(y);
      kept.push_back((large + y.flatten()).tanh());
      kept.push_back(kept.back() * 2);
      s[i] = static_cast<float>(i);
      l[i] = static_cast<float>(2 * i);
    }
    Tensors out{small, large};
    for (Tensor& k : kept) {
      out.push_back(k.to(at::kDouble).sum());
      k = Tensor();
    }
    return out;
  });
}

TEST_F(EngineTest, ReadingEvictedBytesDirectlyFindsThem) {
  expect_exact([] {
    Tensors kept;
    for (int i = 0; i < 24; ++i) kept.push_back((at::randn({64, 64}) + i).cos());
    Tensors out;
    for (Tensor& k : kept) {
      const auto* p = static_cast<const float*>(k.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
      double sum = 0;
      for (int j = 0; j < 64 * 64; ++j) sum += p[j];
      out.push_back(at::scalar_tensor(sum, at::kDouble));
      k = Tensor();
    }
    return out;
  });
}

TEST_F(EngineTest, ThreadsOfTheProgramKeepTheirBits) {
  expect_exact([] {
    constexpr int kThreads = 3;
    std::vector<Tensors> results(kThreads);
    std::vector<std::string> errors(kThreads);
    std::vector<std::thread> threads;
    std::barrier together(kThreads);   // the peak is where all forwards have ended
    for (int n = 0; n < kThreads; ++n) {
      threads.emplace_back([&, n] {
        try {
          if (Engine::instance().started()) Session::cover_this_thread();
          auto mine = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(n));
          Tensor w = at::randn({32, 32}, mine, at::kFloat).div_(6).requires_grad_();
          for (int step = 0; step < 3; ++step) {
            Tensor h = at::randn({256, 32}, mine, at::kFloat);
            for (int i = 0; i < 8; ++i) h = h.mm(w).tanh();
            const Tensor loss = h.pow(2).mean();
            together.arrive_and_wait();
            loss.backward();
            together.arrive_and_wait();
            at::NoGradGuard no_grad;
            w.sub_(w.grad(), 0.1);
            results[n].push_back(loss.detach());
          }
          results[n].push_back(w.detach());
        } catch (const std::exception& error) {
          errors[n] = error.what();
        }
        together.arrive_and_drop();
      });
    }
    for (auto& t : threads) t.join();
    Tensors out;
    for (int n = 0; n < kThreads; ++n) {
      EXPECT_EQ(errors[n], "");
      for (const Tensor& t : results[n]) out.push_back(t);
    }
    return out;
  }, {0.8});
}

TEST_F(EngineTest, ALimitThatCannotBeMetIsRefusedWithTheFactsAndTheProgramGoesOn) {
  Session session(options(1 << 20));
  auto net = mlp(4);
  const Tensor x = at::randn({512, 32});
  std::string text;
  try {
    Tensor big = at::ones({1024, 1024});
    FAIL() << "4 MiB fitted in 1 MiB";
  } catch (const c10::OutOfMemoryError& error) {
    text = error.what();
    const auto* ours = dynamic_cast<const OutOfBudget*>(&error);
    ASSERT_NE(ours, nullptr);
    EXPECT_GE(ours->least_limit().count(), 4u << 20);
  }
  for (const char* fact : {"4.0 MiB", "1.0 MiB", "aten::", "live", "headroom", "--tensor-memory", "Largest holders"}) {
    EXPECT_NE(text.find(fact), std::string::npos) << fact << " is not in: " << text;
  }
  Engine::instance().check_invariants();
  EXPECT_EQ(session.set_tensor_memory(Bytes(8 << 20)), Bytes(1 << 20));
  const Tensor big = at::ones({1024, 1024});
  EXPECT_EQ(big.sum().item<float>(), 1024.f * 1024.f);
  net->forward(x).sum().backward();
  EXPECT_TRUE(net->parameters()[0].grad().defined());
}

TEST_F(EngineTest, AStepThatNeedsTheSmallestLimitItWasToldPassesTheSamePoint) {
  Session session(options(1 << 20));
  const Tensor parameter = at::ones({64, 1024});   // 256 KiB, and a raw pointer keeps it
  static_cast<void>(parameter.mutable_data_ptr());
  std::uint64_t least = 0;
  try {
    at::ones({512, 1024});
  } catch (const OutOfBudget& error) {
    least = error.least_limit().count();
  }
  ASSERT_GT(least, 0u);
  session.set_tensor_memory(Bytes(least));
  EXPECT_NO_THROW(at::ones({512, 1024}));
}

TEST_F(EngineTest, ADeviceSmallerThanTheLimitIsEnoughToo) {
  if (fake_device() == nullptr) GTEST_SKIP() << "the host cannot be made small: engine.fake_device runs this";
  auto program = [] {
    torch::nn::Sequential net;
    for (int i = 0; i < 12; ++i) {
      net->push_back(torch::nn::Linear(64, 64));
      net->push_back(torch::nn::Tanh());
    }
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1));
    const Tensor x = torch::randn({1024, 64});
    return train(net, optimizer, 3, [&] { return net->forward(x).square().mean(); });
  };
  const std::uint64_t roomy = std::uint64_t{4} << 30;
  allocator().trim(0);
  const std::uint64_t before = fake_device()->committed();
  const engine::Run idle = run(program, roomy);
  EXPECT_EQ(idle.evictions, 0u);
  const std::uint64_t peak = idle.peak - idle.base;
  const std::uint64_t refused = fake_device()->refused();
  fake_device()->set_bytes(before + peak * 6 / 10);
  const engine::Run tight = run(program, roomy);
  EXPECT_EQ(tight.bits, idle.bits);
  EXPECT_GT(tight.evictions, 0u);
  EXPECT_GT(fake_device()->refused(), refused);
  EXPECT_LE(fake_device()->committed(), before + peak * 6 / 10);
  fake_device()->set_bytes(before + peak / 20);
  try {
    run(program, roomy);
    ADD_FAILURE() << "no op fits";
  } catch (const OutOfBudget& error) {
    EXPECT_NE(std::string(error.what()).find("the device (fake) has not so much left"), std::string::npos) << error.what();
  }
  fake_device()->set_bytes(roomy);
  EXPECT_EQ(run(program, roomy).bits, idle.bits) << "the program goes on when there is room again";
}

TEST_F(EngineTest, BookkeepingGoesWithTheTensorsItIsAbout) {
  Engine& engine = Engine::instance();
  Session session(options(1 << 20));
  const std::size_t values = engine.live_values();
  const std::size_t recipes = engine.live_recipes();
  {
    auto net = mlp(10, 0.2);
    torch::optim::Adam adam(net->parameters(), 1e-3);
    const Tensor x = at::randn({256, 32});
    auto steps = [&](int count) {
      for (int i = 0; i < count; ++i) {
        adam.zero_grad();
        net->forward(x).pow(2).mean().backward();
        adam.step();
      }
    };
    steps(10);
    const std::size_t values_early = engine.live_values();
    const std::size_t recipes_early = engine.live_recipes();
    steps(100);
    engine.check_invariants();
    EXPECT_LE(engine.live_values(), values_early + values_early / 10);
    EXPECT_LE(engine.live_recipes(), recipes_early + recipes_early / 10);
    EXPECT_GT(session.stats().evictions, 0u);
  }
  EXPECT_EQ(engine.live_values(), values);
  EXPECT_EQ(engine.live_recipes(), recipes);
  engine.check_invariants();
}

TEST_F(EngineTest, ALongChainOfOneTensorIsBoundedInBookkeeping) {
  Engine& engine = Engine::instance();
  Session session(options(4 << 20));
  const std::size_t recipes = engine.live_recipes();
  Tensor state = at::ones({1024});
  for (int i = 0; i < 6000; ++i) state = state * 0.999;
  EXPECT_LE(engine.live_recipes(), recipes + 4096);
  engine.check_invariants();
  state = Tensor();
  EXPECT_EQ(engine.live_recipes(), recipes);
}

/// Every allocation of a step fails once, or all from there on. What comes after must be as if nothing had happened.
void fail_every_allocation(std::uint64_t failures, double fraction) {
  at::manual_seed(3);
  torch::nn::Sequential net = cnn(4);
  net->push_back(torch::nn::Flatten());
  net->push_back(torch::nn::Linear(8 * 8 * 8, 32));
  net->push_back(torch::nn::Dropout(0.2));
  net->push_back(torch::nn::Linear(32, 4));
  const Tensor x = at::randn({16, 3, 8, 8});
  auto step = [&] {
    at::manual_seed(11);
    net->zero_grad();
    Tensor loss = net->forward(x).pow(2).mean();
    loss.backward();
    Tensors out{loss};
    for (const auto& p : net->parameters()) out.push_back(p.grad());
    return out;
  };
  run(step, 0);
  const Run idle = run(step, 0);
  const auto limit = fraction == 0 ? 0 : idle.base + static_cast<std::uint64_t>(fraction * static_cast<double>(idle.peak - idle.base));
  Session session(options(limit));
  EXPECT_EQ(bits_of(step()), idle.bits);
  int thrown = 0;
  int recovered = 0;
  std::uint64_t k = 0;
  for (;; ++k) {
    const std::uint64_t injected = allocator().injected_failures();
    allocator().fail_after(k, failures);
    try {
      const Tensors out = step();
      allocator().fail_after(0, 0);
      if (allocator().injected_failures() == injected) break;
      ++recovered;
      ASSERT_EQ(bits_of(out), idle.bits) << "allocation " << k << " failed and the step went on";
    } catch (const c10::OutOfMemoryError&) {
      ++thrown;
    }
    allocator().fail_after(0, 0);
    ASSERT_NO_THROW(Engine::instance().check_invariants()) << "after allocation " << k << " failed";
    ASSERT_EQ(bits_of(step()), idle.bits) << "the step after allocation " << k << " failed";
    ASSERT_NO_THROW(Engine::instance().check_invariants()) << "in the step after allocation " << k << " failed";
  }
  std::printf("%llu allocations failed in turn: %d steps threw, %d recovered\n", static_cast<unsigned long long>(k), thrown, recovered);
  EXPECT_GT(k, 50u);
  EXPECT_GT(thrown, 50);
}

TEST_F(EngineTest, AnyAllocationMayFailWithoutALimit) { fail_every_allocation(1, 0); }
TEST_F(EngineTest, AnyAllocationMayFailOnceUnderALimit) { fail_every_allocation(1, 0.7); }
TEST_F(EngineTest, AllAllocationsFromAnyPointOnMayFailUnderALimit) { fail_every_allocation(1u << 30, 0.7); }

}  // namespace
}  // namespace memfit::engine
