#include "memfit/train/trainer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <ATen/CPUGeneratorImpl.h>

#include <filesystem>
#include <random>

#include "memfit/memory/cpu_allocator.h"
#include "memfit/optim/adam.h"
#include "memfit/optim/sgd.h"

namespace memfit::train {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using at::Tensor;
using testing::HasSubstr;
using namespace literals;

/// Random rows in an order that the epoch decides.
class Rows : public BatchSource {
 public:
  Rows(std::int64_t rows, std::int64_t batch, std::int64_t width) : batch_(batch) {
    at::Generator g = at::detail::createCPUGenerator(11);
    x_ = at::randn({rows, width}, g);
    y_ = at::randint(0, 4, {rows}, g);
    Rows::reset(0);
  }
  std::optional<Batch> next() override {
    const std::int64_t rows = std::min(batch_, x_.size(0) - at_);
    if (rows <= 0) return std::nullopt;
    const Tensor which = order_.narrow(0, at_, rows);
    Batch out{{x_.index_select(0, which)}, {y_.index_select(0, which)}, rows};
    at_ += rows;
    return out;
  }
  void reset(std::int64_t epoch) override {
    epoch_ = epoch;
    at_ = 0;
    order_ = at::randperm(x_.size(0), at::detail::createCPUGenerator(static_cast<std::uint64_t>(epoch)), at::kLong);
  }
  nlohmann::json state() const override { return {{"epoch", epoch_}, {"at", at_}}; }
  void load_state(const nlohmann::json& state) override {
    reset(state.at("epoch"));
    at_ = state.at("at");
  }

 private:
  Tensor x_, y_, order_;
  std::int64_t batch_, epoch_ = 0, at_ = 0;
};

Loss cross_entropy() {
  return Loss::mean_over_rows([](const Tensor& out, const Batch& b) { return at::cross_entropy_loss(out, b.targets[0]); });
}

nn::Sequential net(bool norm = false, std::int64_t width = 16) {
  at::manual_seed(3);
  nn::Sequential out(nn::Linear(width, 64));
  if (norm) out->push_back(nn::BatchNorm1d(64));
  out->push_back(nn::ReLU());
  out->push_back(nn::Dropout(0.2));
  out->push_back(nn::Linear(64, 4));
  return out;
}

struct Outcome {
  std::vector<double> losses;
  std::vector<Tensor> values;
  FitResult result;
  std::int64_t micro_batch = 0;
  std::uint64_t allocations = 0;   // of fit()
};

bool same(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (!at::equal(a[i], b[i])) return false;
  }
  return a.size() == b.size();
}

FitOptions quiet(FitOptions o = {}) {
  o.progress = ProgressStyle::Off;
  return o;
}

/// `failures` allocations in a row are refused, after the first `after` of fit().
struct Fault {
  std::uint64_t after = 0, failures = 0;
};

Outcome train(nn::Sequential model, BatchSource& source, const Loss& loss, TrainerOptions options, FitOptions fit, Fault fault = {}) {
  auto& allocator = memory::CpuAllocator::instance();
  Trainer trainer(model_of(model), std::make_shared<optim::AdamW>(*model, optim::AdamOptions{.learning_rate = 1e-2}), options);
  Outcome out;
  fit = quiet(fit);
  fit.on_step = [&](const StepReport& r) { out.losses.push_back(r.loss); };
  const std::uint64_t before = allocator.ledger().allocations;
  allocator.fail_after(fault.after, fault.failures);
  try {
    out.result = trainer.fit(source, loss, fit);
  } catch (...) {
    allocator.fail_after(0, 0);
    throw;
  }
  allocator.fail_after(0, 0);
  out.allocations = allocator.ledger().allocations - before;
  for (const Tensor& p : model->parameters()) out.values.push_back(p.detach().clone());
  for (const Tensor& b : model->buffers()) out.values.push_back(b.clone());
  out.micro_batch = trainer.micro_batch();
  return out;
}

template <class Run>
std::string message(Run run) {
  try {
    run();
  } catch (const Error& e) {
    return e.what();
  }
  return "no memfit::Error";
}

std::string new_folder(const std::string& name) {
  const std::string path = testing::TempDir() + "memfit-" + name + "-" + std::to_string(::getpid());
  fs::remove_all(path);
  return path;
}

class TrainerTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
};

TEST_F(TrainerTest, DoesWhatALoopByHandDoesBitForBit) {
  Rows source(40, 8, 16);
  const Outcome ours = train(net(true), source, cross_entropy(), {}, {.epochs = 3});
  nn::Sequential model = net(true);
  optim::AdamW optimizer(*model, {.learning_rate = 1e-2});
  std::vector<double> losses;
  for (int epoch = 0; epoch < 3; ++epoch) {
    source.reset(epoch);
    while (const auto b = source.next()) {
      optimizer.zero_grad();
      const Tensor loss = at::cross_entropy_loss(model->forward(b->inputs[0]), b->targets[0]);
      loss.backward();
      optimizer.step();
      losses.push_back(loss.item<double>());
    }
  }
  EXPECT_EQ(ours.losses, losses);
  EXPECT_TRUE(at::equal(ours.values[0], model->parameters()[0]));
}

TEST_F(TrainerTest, SplitBatchesFollowTheUnsplitRun) {
  auto model = [] {
    at::manual_seed(3);
    return nn::Sequential(nn::Linear(16, 64), nn::Tanh(), nn::Linear(64, 4));
  };
  Rows source(50, 25, 16);
  const Outcome whole = train(model(), source, cross_entropy(), {}, {.epochs = 10});
  const Outcome split = train(model(), source, cross_entropy(), {.micro_batch = 7}, {.epochs = 10});
  Rows small(50, 5, 16);
  const Outcome gathered = train(model(), small, cross_entropy(), {.batch = 25}, {.epochs = 10});
  ASSERT_EQ(whole.losses.size(), split.losses.size());
  ASSERT_EQ(whole.losses.size(), gathered.losses.size());
  for (std::size_t i = 0; i < whole.losses.size(); ++i) {
    EXPECT_NEAR(split.losses[i], whole.losses[i], 1e-6 * whole.losses[i]) << i;
    EXPECT_NEAR(gathered.losses[i], whole.losses[i], 1e-6 * whole.losses[i]) << i;
  }
}

TEST_F(TrainerTest, UnderALimitItSplitsByPredictionAndKeepsTheLosses) {
  auto model = [] {
    at::manual_seed(3);
    return nn::Sequential(nn::Linear(128, 128), nn::Tanh(), nn::Linear(128, 128), nn::Tanh(), nn::Linear(128, 4));
  };
  Rows source(16384, 8192, 128);
  const Outcome plain = train(model(), source, cross_entropy(), {}, {.epochs = 2});
  std::vector<Bytes> peaks;
  const Bytes limit = 16_MiB;
  nn::Sequential limited = model();
  Trainer trainer(model_of(limited), std::make_shared<optim::AdamW>(*limited, optim::AdamOptions{.learning_rate = 1e-2}), {.memory = limit});
  std::vector<double> losses;
  FitOptions fit = quiet({.epochs = 2});
  fit.on_step = [&](const StepReport& r) {
    losses.push_back(r.loss);
    EXPECT_LE(*r.peak, limit);
  };
  EXPECT_EQ(trainer.fit(source, cross_entropy(), fit).retries, 0);
  EXPECT_GT(trainer.micro_batch(), 0);
  EXPECT_LT(trainer.micro_batch(), 8192);
  ASSERT_EQ(losses.size(), plain.losses.size());
  for (std::size_t i = 0; i < losses.size(); ++i) EXPECT_NEAR(losses[i], plain.losses[i], 1e-6 * plain.losses[i]) << i;
}

TEST_F(TrainerTest, BatchNormalizationIsNotSplitAndKeepsItsBits) {
  Rows source(1024, 512, 64);
  const Outcome plain = train(net(true, 64), source, cross_entropy(), {}, {.epochs = 2});
  const Outcome limited = train(net(true, 64), source, cross_entropy(), {.memory = 2_MiB}, {.epochs = 2});
  EXPECT_EQ(limited.losses, plain.losses);
  EXPECT_TRUE(same(limited.values, plain.values));
  EXPECT_EQ(limited.micro_batch, 0);
  EXPECT_THAT(message([&] { train(net(true, 64), source, cross_entropy(), {.micro_batch = 64}, {}); }),
              HasSubstr("the model has batch normalization, whose result depends on the whole batch"));
}

TEST_F(TrainerTest, FailedAllocationsAreTakenBackBitForBit) {
  Rows source(64, 16, 16);
  auto& allocator = memory::CpuAllocator::instance();
  for (const Precision precision : {Precision::FP32, Precision::FP16}) {
    TrainerOptions options{.memory = 64_MiB, .precision = precision, .clip_norm = 1.0, .ema_decay = 0.9};
    const Outcome calm = train(net(true), source, cross_entropy(), options, {.epochs = 2});
    std::uint64_t live = 0;
    std::int64_t retries = 0;
    std::mt19937_64 random(17);
    for (int i = 0; i < 100; ++i) {
      const Outcome hit = train(net(true), source, cross_entropy(), options, {.epochs = 2}, {random() % calm.allocations, 1});
      ASSERT_TRUE(same(hit.values, calm.values)) << "fault " << i;
      ASSERT_EQ(hit.losses, calm.losses) << "fault " << i;
      retries += hit.result.retries;
      if (i == 0) live = allocator.ledger().live;
      EXPECT_EQ(allocator.ledger().live, live);
    }
    EXPECT_GT(retries, 20);
  }
}

TEST_F(TrainerTest, WhenNothingHelpsItStopsWithACheckpointToGoOnFrom) {
  Rows source(64, 16, 16);
  const std::string folder = new_folder("stop");
  const TrainerOptions options{.memory = 64_MiB};
  const Outcome calm = train(net(), source, cross_entropy(), options, {.epochs = 2});
  std::string checkpoint;
  try {
    train(net(), source, cross_entropy(), options, {.epochs = 2, .checkpoint_dir = folder}, {calm.allocations / 2, 1000000});
  } catch (const TrainingStopped& e) {
    checkpoint = e.checkpoint();
    EXPECT_THAT(e.what(), HasSubstr("fit() with the same checkpoint_dir goes on there"));
  }
  ASSERT_FALSE(checkpoint.empty());
  nn::Sequential other = net();
  for (const Tensor& p : other->parameters()) p.variable_data().fill_(7);  // all of it must come from the checkpoint
  const Outcome rest = train(other, source, cross_entropy(), options, {.epochs = 2, .checkpoint_dir = folder});
  EXPECT_TRUE(rest.result.resumed_at.has_value());
  EXPECT_TRUE(same(rest.values, calm.values));
}

TEST_F(TrainerTest, AResumedRunIsTheSameRun) {
  Rows source(40, 8, 16);
  const TrainerOptions options{.precision = Precision::FP16, .schedule = linear_warmup(3, cosine(20)), .ema_decay = 0.9,
                               .scaler = {.scale = 8, .growth_interval = 3}};
  const Outcome straight = train(net(true), source, cross_entropy(), options, {.epochs = 4});
  const std::string folder = new_folder("resume");
  std::vector<double> losses;
  for (const std::int64_t steps : {3, 11, 20}) {
    at::manual_seed(static_cast<std::uint64_t>(steps));
    const Outcome some = train(net(true), source, cross_entropy(), options, {.epochs = 4, .steps = steps, .checkpoint_dir = folder});
    losses.insert(losses.end(), some.losses.begin(), some.losses.end());
    if (steps == 20) EXPECT_TRUE(same(some.values, straight.values));
  }
  EXPECT_EQ(losses, straight.losses);
  EXPECT_THAT(message([&] { train(net(), source, cross_entropy(), options, {.checkpoint_dir = folder}); }), HasSubstr("Extra: "));
}

TEST_F(TrainerTest, ValidationIsExactAndLeavesTheRunAlone) {
  Rows source(40, 8, 16), held_out(30, 8, 16), whole(30, 30, 16);
  const Outcome without = train(net(true), source, cross_entropy(), {}, {.epochs = 2});
  const Outcome with = train(net(true), source, cross_entropy(), {}, {.epochs = 2, .validate = &held_out});
  EXPECT_TRUE(same(with.values, without.values));
  nn::Sequential model = net();
  Trainer trainer(model_of(model), std::make_shared<optim::Sgd>(*model, optim::SgdOptions{}));
  const double parts = trainer.evaluate(held_out, cross_entropy()).loss;
  model->eval();
  const Batch all = *whole.next();
  const double once = at::cross_entropy_loss(model->forward(all.inputs[0]), all.targets[0]).item<double>();
  EXPECT_NEAR(parts, once, 1e-6 * once);
}

TEST_F(TrainerTest, ANumberThatIsNoneStopsTheRun) {
  Rows source(16, 8, 16);
  const Loss broken = Loss::mean_over_rows([](const Tensor& out, const Batch&) { return (out.sum() * 0).log(); });
  EXPECT_THAT(message([&] { train(net(), source, broken, {}, {}); }), HasSubstr("step 1: the loss is -inf"));
}

TEST_F(TrainerTest, WrongUsesAreNamedBeforeTheFirstStep) {
  Rows source(16, 8, 16);
  auto make = [&](const TrainerOptions& options) {
    nn::Sequential m = net();
    return message([&] { Trainer(model_of(m), std::make_shared<optim::Sgd>(*m, optim::SgdOptions{}), options); });
  };
  EXPECT_THAT(message([&] { train(net(), source, Loss(), {}, {}); }), HasSubstr("does not say how it reduces"));
  const Loss whole = Loss::whole_batch([](const Tensor& out, const Batch&) { return out.std(); });
  EXPECT_THAT(message([&] { train(net(), source, whole, {.micro_batch = 4}, {}); }), HasSubstr("the loss needs the whole batch"));
  EXPECT_THAT(make({.batch = 8, .micro_batch = 16}), HasSubstr("a micro_batch of 16 rows is larger than the batch of 8"));
  EXPECT_THAT(make({.batch = -1}), HasSubstr("0 or more"));
  EXPECT_THAT(make({.tries = 0}), HasSubstr("tries is 0"));
  EXPECT_THAT(make({.clip_norm = 0.0}), HasSubstr("a clip_norm of 0"));
  EXPECT_THAT(message([&] { train(net(), source, cross_entropy(), {.batch = 12}, {}); }), HasSubstr("batches of 8 rows do not add up to a batch of 12"));
  EXPECT_THAT(message([&] { train(net(), source, cross_entropy(), {}, {.epochs = 0}); }), HasSubstr("0 epochs"));
  nn::Sequential one = net(), other = net();
  EXPECT_THAT(message([&] { Trainer(model_of(one), std::make_shared<optim::Sgd>(*other, optim::SgdOptions{})); }),
              HasSubstr("tensors that are not the model's: 0.weight, 0.bias"));
  EXPECT_THAT(message([&] { Trainer(model_of(one), nullptr); }), HasSubstr("there is no optimizer"));
  auto fused = std::make_shared<optim::Sgd>(*one, optim::SgdOptions{});
  fused->step_in_backward(true);
  EXPECT_THAT(message([&] { Trainer(model_of(one), fused, {.clip_norm = 1.0}); }), HasSubstr("steps in backward and clip_norm contradict each other"));
  Rows nothing(0, 8, 16);
  Trainer trainer(model_of(other), std::make_shared<optim::Sgd>(*other, optim::SgdOptions{}));
  EXPECT_THAT(message([&] { trainer.evaluate(nothing, cross_entropy()); }), HasSubstr("the validation set is empty"));
}

}  // namespace
}  // namespace memfit::train
