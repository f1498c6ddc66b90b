// The trainer's parts, each alone.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "memfit/core/error.h"
#include "memfit/optim/sgd.h"
#include "memfit/train/checkpoint.h"
#include "memfit/train/checkpoint_folder.h"
#include "memfit/train/evaluation.h"
#include "memfit/train/gradients.h"
#include "memfit/train/per_batch.h"
#include "memfit/train/progress.h"
#include "memfit/train/schedule.h"
#include "memfit/train/tensor_file.h"

namespace memfit::train {
namespace {

namespace fs = std::filesystem;
namespace nn = torch::nn;
using at::Tensor;
using testing::HasSubstr;
using testing::StartsWith;

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
  fs::create_directories(path);
  return path;
}

std::vector<Tensor> gradients(const nn::Module& m) {
  std::vector<Tensor> out;
  for (const Tensor& p : m.parameters()) out.push_back(p.grad().clone());
  return out;
}

class TrainPartsTest : public testing::Test {
 protected:
  static void SetUpTestSuite() { at::set_num_threads(1); }
};

using AccumulatorTest = TrainPartsTest;
using CheckpointTest = TrainPartsTest;
using TensorFileTest = TrainPartsTest;
using CheckpointFolderTest = TrainPartsTest;

TEST_F(AccumulatorTest, UnequalTokenWeightsGiveTheWholeBatchsGradient) {
  at::manual_seed(1);
  nn::Linear model(6, 5);
  const Tensor x = at::randn({12, 6}), y = at::randint(0, 5, {12});
  const Tensor class_weights = at::tensor({1.0, 0.1, 3.0, 0.0, 2.0}, at::kFloat);
  auto part = [&](std::int64_t begin, std::int64_t rows) {
    const Tensor t = y.narrow(0, begin, rows);
    const Tensor sum = at::cross_entropy_loss(model(x.narrow(0, begin, rows)), t, class_weights, at::Reduction::Sum);
    return WeightedSum{sum, class_weights.index({t}).sum().item<double>()};
  };
  at::cross_entropy_loss(model(x), y, class_weights).backward();
  const double whole = at::cross_entropy_loss(model(x), y, class_weights).item<double>();
  const std::vector<Tensor> wanted = gradients(*model);
  for (const bool known : {true, false}) {
    Accumulator a(optim::named_parameters(*model));
    a.begin(4, known ? std::optional(class_weights.index({y}).sum().item<double>()) : std::nullopt);
    a.add(part(0, 7));
    a.add(part(7, 0));  // an empty part
    a.add(part(7, 4));
    a.add(part(11, 1));
    EXPECT_NEAR(*a.finish(), whole, 1e-6 * whole);
    const std::vector<Tensor> got = gradients(*model);
    for (std::size_t i = 0; i < got.size(); ++i) EXPECT_TRUE(at::allclose(got[i], wanted[i], 1e-5, 1e-7)) << known;
  }
}

TEST_F(AccumulatorTest, AnUnsplitMeanKeepsItsBits) {
  nn::Linear model(6, 1);
  const Tensor x = at::randn({12, 6});
  model(x).square().mean().backward();
  const std::vector<Tensor> wanted = gradients(*model);
  Accumulator a(optim::named_parameters(*model));
  a.begin(1, 12);
  a.add({model(x).square().mean(), 12}, true);
  a.finish();
  EXPECT_TRUE(at::equal(gradients(*model)[0], wanted[0]));
}

TEST_F(AccumulatorTest, WrongUsesAreNamed) {
  nn::Linear model(2, 1);
  Accumulator a(optim::named_parameters(*model));
  const Tensor one = model(at::ones({1, 2})).sum();
  EXPECT_THAT(message([&] { a.add({one, 1}); }), HasSubstr("add() before begin()"));
  EXPECT_THAT(message([&] { a.finish(); }), HasSubstr("finish() before begin()"));
  EXPECT_THAT(message([&] { a.begin(0); }), HasSubstr("a batch of 0 parts"));
  a.begin(1);
  EXPECT_THAT(message([&] { a.add({one, -1}); }), HasSubstr("the weight -1"));
  EXPECT_THAT(message([&] { a.add({model(at::ones({2, 2})), 1}); }), HasSubstr("not a single number"));
  EXPECT_FALSE(a.finish().has_value());
  EXPECT_THAT(message([] { Accumulator({}); }), HasSubstr("no parameters"));
}

TEST_F(TrainPartsTest, ClippingScalesAllGradientsToTheNorm) {
  Tensor a = at::ones({3}).set_requires_grad(true), b = at::ones({1}).set_requires_grad(true);
  optim::Sgd sgd({{"all", {{"a", a}, {"b", b}}}}, {});
  a.mutable_grad() = at::full({3}, 4.0);
  b.mutable_grad() = at::full({1}, 1.0);
  EXPECT_DOUBLE_EQ(clip_gradient_norm(sgd, 1.0), 7.0);
  EXPECT_NEAR(a.grad()[0].item<double>(), 4.0 / 7, 1e-6);
  clip_gradient_norm(sgd, 100.0);
  EXPECT_NEAR(b.grad()[0].item<double>(), 1.0 / 7, 1e-6);
  EXPECT_THAT(message([&] { clip_gradient_norm(sgd, 0); }), HasSubstr("max_norm of 0"));
  sgd.step_in_backward(true);
  EXPECT_THAT(message([&] { clip_gradient_norm(sgd, 1); }), HasSubstr("SGD steps in backward"));
}

TEST_F(TrainPartsTest, AveragesFollowAndSwap) {
  Tensor w = at::zeros({2});
  Ema ema({{"w", w}}, 0.75);
  w.fill_(4);
  ema.update();
  EXPECT_EQ(ema.averages()[0].tensor[0].item<float>(), 1);
  ema.swap();
  EXPECT_EQ(w[0].item<float>(), 1);
  ema.swap();
  EXPECT_EQ(w[0].item<float>(), 4);
  EXPECT_THAT(message([&] { Ema({{"w", w}}, 1); }), HasSubstr("a decay of 1"));
}

TEST_F(TrainPartsTest, SchedulesGiveTheirFactors) {
  const Schedule s = linear_warmup(4, cosine(10, 0.1));
  EXPECT_DOUBLE_EQ(s(0), 0.25);
  EXPECT_DOUBLE_EQ(s(3), 1);
  EXPECT_DOUBLE_EQ(s(4), 1);
  EXPECT_DOUBLE_EQ(s(9), 0.55);
  EXPECT_DOUBLE_EQ(s(99), 0.1);
  EXPECT_DOUBLE_EQ(staircase(2, 0.5)(5), 0.25);
  EXPECT_THAT(message([] { cosine(0); }), HasSubstr("cosine: 0 steps"));
  EXPECT_THAT(message([] { linear_warmup(1, {}); }), HasSubstr("no schedule follows"));
}

/// Dropout, batch normalization and a weight that is used twice.
struct NetImpl : nn::Module {
  nn::Linear in{nullptr}, out{nullptr};
  nn::BatchNorm1d norm{nullptr};
  NetImpl() {
    in = register_module("in", nn::Linear(8, 8));
    norm = register_module("norm", nn::BatchNorm1d(8));
    out = register_module("out", nn::Linear(8, 8));
  }
  Tensor forward(const Tensor& x) { return out(at::dropout(norm(in(in(x))), 0.5, true)); }
};
TORCH_MODULE(Net);

TEST_F(CheckpointTest, GradientsBuffersAndGeneratorAreThoseOfThePlainRun) {
  for (const bool input_needs_gradient : {false, true}) {
    for (const bool nested : {false, true}) {
      std::vector<std::vector<Tensor>> results;
      for (const bool on : {false, true}) {
        at::manual_seed(5);
        Net net;
        Tensor x = at::randn({4, 8}).set_requires_grad(input_needs_gradient);
        auto part = [&](const Tensor& t) { return on && nested ? checkpoint(net, t) : net(t); };
        const Tensor y = on ? checkpoint([&](const std::vector<Tensor>& in) { return std::vector<Tensor>{part(in[0]).tanh()}; }, {x},
                                         {.buffers = net->buffers()})[0]
                            : net(x).tanh();
        y.square().sum().backward();
        std::vector<Tensor> all = gradients(*net);
        for (const Tensor& b : net->buffers()) all.push_back(b.clone());
        if (input_needs_gradient) all.push_back(x.grad());
        all.push_back(at::rand({3}));
        results.push_back(all);
      }
      for (std::size_t i = 0; i < results[0].size(); ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i << nested;
    }
  }
}

TEST_F(CheckpointTest, SequentialInPartsGivesTheSameBits) {
  std::vector<std::vector<Tensor>> results;
  for (const std::int64_t parts : {0, 1, 2, 4}) {
    at::manual_seed(5);
    nn::Sequential net(nn::Linear(8, 8), nn::BatchNorm1d(8), nn::Dropout(0.3), nn::Linear(8, 2));
    const Tensor x = at::randn({4, 8});
    (parts == 0 ? net->forward(x) : checkpoint_sequential(net, parts, x)).square().sum().backward();
    results.push_back(gradients(*net));
    for (const Tensor& b : net->buffers()) results.back().push_back(b.clone());
  }
  for (const auto& r : results) {
    for (std::size_t i = 0; i < r.size(); ++i) EXPECT_TRUE(at::equal(r[i], results[0][i]));
  }
  nn::Sequential two(nn::Linear(2, 2), nn::ReLU());
  EXPECT_THAT(message([&] { checkpoint_sequential(two, 3, at::ones({1, 2})); }), HasSubstr("3 parts of 2 modules"));
}

TEST_F(CheckpointTest, ManyTensorsAndOtherArgumentsPass) {
  Tensor a = at::ones({2}).set_requires_grad(true);
  const Tensor b = at::full({2}, 3.0);
  const double factor = 2;
  checkpoint([factor](const Tensor& x, const Tensor& y) { return x * y * factor; }, a, b).sum().backward();
  EXPECT_EQ(a.grad()[0].item<float>(), 6);
  EXPECT_THAT(message([&] { checkpoint([](const std::vector<Tensor>&) { return std::vector<Tensor>{}; }, {a}); }), HasSubstr("gave no tensor"));
}

TEST_F(TrainPartsTest, EvaluationLeavesNoTraceAndNoGradientsOnOtherThreads) {
  Net net;
  net->norm->eval();  // frozen on its own
  const Model model = model_of(net);
  at::manual_seed(9);
  const std::vector<Tensor> before = {net->norm->running_mean.clone(), at::rand({2})};
  at::manual_seed(9);
  {
    EvaluationScope scope(model);
    EXPECT_FALSE(net->is_training());
    net->norm->running_mean.add_(1);
    at::rand({7});
    std::thread([&] { EXPECT_FALSE(net(at::ones({2, 8})).requires_grad()); }).join();
  }
  EXPECT_TRUE(net->is_training());
  EXPECT_FALSE(net->norm->is_training());
  EXPECT_TRUE(net->in->weight.requires_grad());
  EXPECT_TRUE(at::equal(net->norm->running_mean, before[0]));
  EXPECT_TRUE(at::equal(at::rand({2}), before[1]));
}

TEST_F(TrainPartsTest, BatchNormalizationIsSeenAndInstanceNormalizationIsNone) {
  auto seen = [](auto module, const Tensor& x, bool training = true) {
    module->train(training);
    PerBatchWatch watch;
    module->forward(x);
    return watch.found();
  };
  EXPECT_EQ(seen(nn::BatchNorm2d(3), at::ones({2, 3, 4, 4})), "batch normalization");
  EXPECT_EQ(seen(nn::BatchNorm2d(3), at::ones({2, 3, 4, 4}), false), "");
  EXPECT_EQ(seen(nn::InstanceNorm2d(3), at::rand({2, 3, 4, 4})), "");
  EXPECT_EQ(seen(nn::LayerNorm(nn::LayerNormOptions({4})), at::rand({2, 4})), "");
}

TEST_F(TensorFileTest, TensorsComeBackByNameWithTheirBits) {
  const std::string path = new_folder("tensors") + "/a.safetensors";
  const Tensor turned = at::arange(6, at::kLong).view({2, 3}).t();
  save_tensors(path, {{"turned", turned}, {"half", at::ones({3}, at::kBFloat16)}, {"none", at::empty({0, 4})}, {"bit", at::ones({}, at::kBool)}});
  const TensorFile file(path);
  EXPECT_TRUE(at::equal(file.load("turned"), turned));
  EXPECT_EQ(file.load("half").scalar_type(), at::kBFloat16);
  EXPECT_EQ(file.load("none").sizes().vec(), (std::vector<std::int64_t>{0, 4}));
  EXPECT_TRUE(file.load("bit").item<bool>());
  EXPECT_FALSE(file.load("other").defined());
}

TEST_F(TensorFileTest, AnotherModelsTensorsAreListedAndNothingChanges) {
  const std::string path = new_folder("other") + "/a.safetensors";
  save_tensors(path, {{"a", at::ones({2})}, {"b", at::ones({3})}, {"c", at::ones({1})}});
  Tensor a = at::zeros({2}), b = at::zeros({4});
  const std::string text = message([&] { load_tensors(TensorFile(path), {{"a", a}, {"b", b}, {"d", at::zeros({1})}}); });
  EXPECT_THAT(text, HasSubstr("Missing: d. Extra: c. Different: b (Float[3] in the file, Float[4] here)."));
  EXPECT_EQ(a.sum().item<float>(), 0);
  EXPECT_THAT(message([&] { save_tensors(path, {{"a", a}, {"a", b}}); }), HasSubstr("two tensors are called \"a\""));
  EXPECT_THAT(message([&] { save_tensors(path, {{"z", at::ones({1}, at::kComplexFloat)}}); }), HasSubstr("\"z\" is ComplexFloat"));
}

TEST_F(TensorFileTest, DamagedFilesAreRefusedAtEveryLength) {
  const std::string folder = new_folder("damaged"), path = folder + "/a.safetensors";
  save_tensors(path, {{"a", at::ones({8})}, {"b", at::ones({4})}});
  const auto size = fs::file_size(path);
  for (std::uintmax_t length = 0; length < size; length += 5) {
    const std::string cut = folder + "/cut";
    fs::copy_file(path, cut, fs::copy_options::overwrite_existing);
    fs::resize_file(cut, length);
    EXPECT_THAT(message([&] { TensorFile file(cut); }), StartsWith(cut + ": at byte ")) << length;
  }
  EXPECT_THAT(message([&] { TensorFile(folder + "/none"); }), HasSubstr("cannot be read"));
}

TEST_F(CheckpointFolderTest, TheLastGoodOneIsUsedAndTheBadOneNamed) {
  const std::string path = new_folder("folder");
  CheckpointFolder folder(path);
  EXPECT_FALSE(folder.latest().has_value());
  for (const int step : {1, 2, 3}) folder.save(step, {{"w", at::full({4}, step)}}, {{"note", step}});
  EXPECT_FALSE(fs::exists(path + "/step-000000001"));
  EXPECT_EQ(folder.latest()->state["note"], 3);
  std::fstream(path + "/step-000000003/tensors.safetensors", std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('x');
  fs::create_directory(path + "/.writing-4-1");  // of a run that was killed
  const SavedRun run = *folder.latest();
  EXPECT_EQ(run.step, 2);
  EXPECT_EQ(run.tensors->load("w")[0].item<float>(), 2);
  ASSERT_EQ(run.passed_over.size(), 1u);
  EXPECT_THAT(run.passed_over[0], HasSubstr("step-000000003/tensors.safetensors: at byte 0"));
  folder.save(4, {}, {});
  EXPECT_FALSE(fs::exists(path + "/.writing-4-1"));
  fs::resize_file(path + "/step-000000004/state.json", 10);
  fs::remove(path + "/step-000000003/state.json");
  EXPECT_THAT(message([&] { folder.latest(); }), HasSubstr("no checkpoint can be used"));
  EXPECT_THAT(message([&] { CheckpointFolder(path, 1); }), HasSubstr("keep is 1"));
  EXPECT_THAT(message([&] { CheckpointFolder("/proc/none"); }), HasSubstr("cannot be made a folder"));
}

TEST_F(TrainPartsTest, ProgressWritesJsonThatParsesAndLinesThatRead) {
  std::ostringstream json, lines;
  StepReport r{.step = 1, .epoch = 0, .loss = 0.5, .learning_rate = 0.1, .rows = 8, .seconds = 0.25};
  {
    Progress a(json, ProgressStyle::Json, 2), b(lines, ProgressStyle::Lines, 2);
    a.step(r), b.step(r);
    r.step = 2, r.loss = std::nan(""), r.limit = Bytes(1024), r.used = Bytes(512);
    a.step(r), b.step(r);
    b.say("a word");
  }
  std::istringstream read(json.str());
  std::string line;
  std::getline(read, line);
  EXPECT_EQ(nlohmann::json::parse(line)["loss"], 0.5);
  EXPECT_TRUE(nlohmann::json::parse(line)["limit_bytes"].is_null());
  std::getline(read, line);
  EXPECT_TRUE(nlohmann::json::parse(line)["loss"].is_null());
  EXPECT_EQ(nlohmann::json::parse(line)["used_bytes"], 512);
  EXPECT_THAT(lines.str(), HasSubstr("step 1/2  epoch 0  loss 0.5"));
  EXPECT_THAT(lines.str(), HasSubstr("512 B of 1.0 KiB"));
}

}  // namespace
}  // namespace memfit::train
