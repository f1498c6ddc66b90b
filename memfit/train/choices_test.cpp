#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "memfit/core/error.h"
#include "memfit/data/array_dataset.h"
#include "memfit/data/checked_dataset.h"
#include "memfit/data/data_loader.h"
#include "memfit/train/choice.h"
#include "memfit/train/loader_source.h"
#include "memfit/train/losses.h"
#include "memfit/train/metrics.h"
#include "memfit/train/optimizers.h"
#include "memfit/train/trainer.h"

namespace memfit::train {
namespace {

namespace fs = std::filesystem;
namespace F = torch::nn::functional;
using at::Tensor;
using testing::HasSubstr;

template <class Run>
std::string message(Run run) {
  try {
    run();
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

double value(const NamedLoss& loss, const Tensor& output, const Batch& batch) {
  const WeightedSum one = loss.loss(output, batch);
  return one.sum.item<double>() / (loss.loss.gives_mean() ? 1 : one.weight);
}

TEST(ChoiceTest, NamesTheNearestOfWhatIsUnknown) {
  EXPECT_THAT(message([] { make_loss("cros_entropy"); }), HasSubstr("Did you mean cross_entropy?"));
  EXPECT_THAT(message([] { make_loss("huber,dela=1"); }), HasSubstr("Did you mean delta?"));
  EXPECT_THAT(message([] { make_loss("mse,delta=1"); }), HasSubstr("mse has no settings"));
  EXPECT_THAT(message([] { make_loss("huber,delta"); }), HasSubstr("KEY=VALUE"));
  EXPECT_THAT(message([] { make_loss("huber,delta=1,delta=2"); }), HasSubstr("twice"));
  EXPECT_THAT(message([] { make_loss("huber,delta=x"); }), HasSubstr("it is a number"));
  EXPECT_THAT(message([] { make_loss("huber,delta=nan"); }), HasSubstr("it is a number"));
  EXPECT_THAT(message([] { make_schedule("cosin", 10); }), HasSubstr("Did you mean cosine?"));
  EXPECT_THAT(message([] { make_schedule("staircase", 10); }), HasSubstr("every=STEPS"));
  const Tensor w = at::zeros({2}).set_requires_grad(true);
  EXPECT_THAT(message([&] { make_optimizer("adamv", {{"w", w}}); }), HasSubstr("Did you mean adam"));
  EXPECT_THAT(message([&] { make_optimizer("adamw,state=int9", {{"w", w}}); }), HasSubstr("Did you mean int8?"));
  EXPECT_EQ(make_optimizer("adamw,lr=0.5", {{"w", w}})->learning_rate(), 0.5);
  EXPECT_EQ(make_optimizer("sgd,lr=0.25,momentum=0.9", {{"w", w}})->kind(), "SGD");
}

TEST(ScheduleTest, WarmsUpAndFallsToItsFloorInTheStepsThereAre) {
  const Schedule s = make_schedule("linear,warmup=2,floor=0.5", 6);
  EXPECT_EQ(s(0), 0.5);
  EXPECT_EQ(s(1), 1);
  EXPECT_EQ(s(2), 1);
  EXPECT_EQ(s(4), 0.75);
  EXPECT_EQ(s(6), 0.5);
  EXPECT_EQ(s(60), 0.5);
}

TEST(NamedLossTest, HasTheBitsOfPyTorchInEachLayout) {
  torch::manual_seed(1);
  const Tensor second = at::randn({4, 5, 3}), classes = at::randint(0, 5, {4, 3});
  const Batch batch{{}, {classes}, 4};
  const NamedLoss loss = make_loss("cross_entropy");
  const double wanted = at::cross_entropy_loss(second, classes).item<double>();
  EXPECT_EQ(value(loss, second, batch), wanted);
  const Tensor last = second.transpose(1, 2).contiguous();
  const double flat = at::cross_entropy_loss(last.flatten(0, 1), classes.flatten()).item<double>();
  EXPECT_EQ(value(loss, last, batch), flat);
  EXPECT_EQ(value(loss, last.flatten(0, 1), batch), flat);
  const Tensor same = at::randn({4, 3, 3}), three = at::randint(0, 3, {4, 3});
  EXPECT_THAT(message([&] { loss.loss(same, {{}, {three}, 4}); }), HasSubstr("class_dim=1 or class_dim=-1"));
  EXPECT_EQ(value(make_loss("cross_entropy,class_dim=1"), same, {{}, {three}, 4}), at::cross_entropy_loss(same, three).item<double>());
  EXPECT_THAT(message([&] { loss.loss(same, {{}, {at::randint(0, 3, {5})}, 4}); }), HasSubstr("Float [4, 3, 3] and the target Long [5]"));
  const Tensor x = at::randn({6, 1}), y = at::randn({6});
  EXPECT_EQ(value(make_loss("mse"), x, {{}, {y}, 6}), at::mse_loss(x, y.reshape({6, 1})).item<double>());
  EXPECT_EQ(value(make_loss("huber,delta=0.5"), x, {{}, {y}, 6}), at::huber_loss(x, y.reshape({6, 1}), at::Reduction::Mean, 0.5).item<double>());
  EXPECT_EQ(value(make_loss("l1"), x, {{}, {y}, 6}), at::l1_loss(x, y.reshape({6, 1})).item<double>());
  EXPECT_THAT(message([&] { make_loss("mse").loss(at::randn({6, 6}), {{}, {y}, 6}); }), HasSubstr("nothing is broadcast"));
  const Tensor likely = at::rand({6, 1});
  EXPECT_EQ(value(make_loss("bce_with_logits,pos_weight=2"), x, {{}, {likely}, 6}),
            at::binary_cross_entropy_with_logits(x, likely, {}, at::full({1}, 2.0)).item<double>());
  EXPECT_TRUE(make_loss("model").loss.needs_whole_batch());
  EXPECT_FALSE(make_loss("model,mean=true").loss.needs_whole_batch());
  EXPECT_THAT(message([&] { make_loss("model").loss(x, {{}, {}, 6}); }), HasSubstr("a loss is a single number"));
}

TEST(NamedLossTest, WeighsClassesAndLeavesOutWhatIsIgnored) {
  torch::manual_seed(2);
  const Tensor output = at::randn({7, 3}), classes = at::tensor({0, 1, 2, -100, 1, -100, 0}, at::kLong);
  EXPECT_NEAR(value(make_loss("cross_entropy,ignore_index=-100,label_smoothing=0.1"), output, {{}, {classes}, 7}),
              at::cross_entropy_loss(output, classes, {}, at::Reduction::Mean, -100, 0.1).item<double>(), 1e-6);
  const fs::path path = fs::temp_directory_path() / ("choices_test_" + std::to_string(::getpid()) + ".npy");
  {
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }";
    header.resize(117, ' ');
    std::FILE* file = std::fopen(path.c_str(), "wb");
    const float weights[] = {1, 2, 0.5F};
    std::fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file);
    std::fwrite((header + "\n").data(), 1, 118, file);
    std::fwrite(weights, 1, sizeof weights, file);
    std::fclose(file);
  }
  const NamedLoss weighted = make_loss("cross_entropy,ignore_index=-100,class_weights=" + path.string());
  fs::remove(path);
  EXPECT_NEAR(value(weighted, output, {{}, {classes}, 7}), at::cross_entropy_loss(output, classes, at::tensor({1.0F, 2.0F, 0.5F})).item<double>(), 1e-6);
  EXPECT_THAT(message([&] { weighted.loss(at::randn({7, 4}), {{}, {classes}, 7}); }), HasSubstr("holds 3 weights"));
}

TEST(NamedLossTest, CtcTakesLengthsFromPaddingAndASecondTarget) {
  torch::manual_seed(3);
  const Tensor output = at::randn({2, 8, 5}), labels = at::tensor({1, 2, 3, 4, 1, -1}, at::kLong).reshape({2, 3}), steps = at::tensor({8, 6}, at::kLong);
  const Tensor likely = at::log_softmax(output, -1).transpose(0, 1);
  const Tensor wanted = at::ctc_loss(likely, labels, steps, at::tensor({3, 2}, at::kLong));
  EXPECT_EQ(value(make_loss("ctc"), output, {{}, {labels, steps}, 2}), wanted.item<double>());
  EXPECT_NE(value(make_loss("ctc"), output, {{}, {labels}, 2}), wanted.item<double>());
}

TEST(MetricTest, CountsWhatTheLossCounts) {
  const Tensor output = at::tensor({0.1F, 0.9F, 0.0F, 0.8F, 0.1F, 0.2F, 0.3F, 0.1F, 0.6F}).reshape({3, 3});
  const Batch batch{{}, {at::tensor({1, 2, -1}, at::kLong)}, 3};
  const NamedLoss loss = make_loss("cross_entropy,ignore_index=-1");
  const auto measure = [&](const char* text) {
    const Metric metric = make_metric(text, loss);
    const WeightedSum one = metric.add(output, batch);
    return metric.finish(one.sum.item<double>() / one.weight);
  };
  EXPECT_EQ(measure("accuracy"), 0.5);
  EXPECT_EQ(measure("topk,k=2"), 1);
  EXPECT_NEAR(measure("perplexity"), std::exp(value(loss, output, batch)), 1e-6);
  EXPECT_THAT(message([&] { measure("topk,k=9"); }), HasSubstr("k=9 of 3 classes"));
  EXPECT_THAT(message([&] { make_metric("acuracy", loss); }), HasSubstr("Did you mean accuracy?"));
  EXPECT_THAT(message([&] { make_metric("accuracy", make_loss("mse")); }), HasSubstr("goes with --loss cross_entropy"));
  const Metric error = make_metric("mae", make_loss("mse"));
  EXPECT_EQ(error.add(at::tensor({1.0, 2.0}), {{}, {at::tensor({2.0, 4.0})}, 2}).sum.item<double>(), 3);
}

std::shared_ptr<data::Dataset> rows_of(std::vector<data::NamedArray> arrays) { return std::make_shared<data::ArrayDataset>(std::move(arrays), "rows.npz"); }

TEST(CheckedDatasetTest, NamesTheRowOfWhatCannotBeTrainedOn) {
  Tensor x = at::randn({6, 2});
  x[4][1] = std::nan("");
  const auto read = [](std::shared_ptr<data::Dataset> rows, std::vector<data::FieldCheck> checks) {
    data::DataLoader loader(std::make_shared<data::CheckedDataset>(std::move(rows), std::move(checks)), {.batch = 3});
    std::vector<data::Batch> out;
    while (auto batch = loader.next()) out.push_back(std::move(*batch));
    return out;
  };
  const std::string text = message([&] { read(rows_of({{"x", x}}), {}); });
  EXPECT_THAT(text, HasSubstr("Row 4 of rows.npz: x holds nan, at element 1"));
  const Tensor labels = at::tensor({0, 2, 1, 0, 3, 1}, at::kByte);
  EXPECT_THAT(message([&] { read(rows_of({{"y", labels}}), {{.field = 0, .classes = 3}}); }), HasSubstr("Row 4 of rows.npz: y holds class 3"));
  const std::vector<data::Batch> batches = read(rows_of({{"y", labels}}), {{.field = 0, .classes = 3, .ignored = 3}});
  EXPECT_TRUE(at::equal(batches[1].fields[0], at::tensor({0, 3, 1}, at::kLong)));
  const Tensor far = at::full({2}, INFINITY);
  EXPECT_EQ(read(rows_of({{"mask", far}}), {}).size(), 1u);
  EXPECT_THAT(message([&] { read(rows_of({{"y", far}}), {{.field = 0, .finite = true}}); }), HasSubstr("inf"));
  EXPECT_THAT(message([&] { read(rows_of({{"y", far}}), {{.field = 0, .classes = 3}}); }), HasSubstr("whole numbers"));
}

/// A linear model and rows for it.
struct Fixture {
  torch::nn::Linear net{nullptr};
  Model model;
  std::unique_ptr<LoaderSource> source;

  Fixture() {
    torch::manual_seed(5);
    net = torch::nn::Linear(4, 3);
    model = model_of(net);
    const auto rows = rows_of({{"x", at::randn({64, 4})}, {"y", at::randint(0, 3, {64})}});
    source = std::make_unique<LoaderSource>(std::make_unique<data::DataLoader>(rows, data::LoaderOptions{.batch = 16, .order = {.shuffle = true}}),
                                            std::vector<std::size_t>{0}, std::vector<std::size_t>{1});
  }
  std::shared_ptr<optim::Optimizer> optimizer() const { return make_optimizer("adamw,lr=0.1", model.parameters); }
};

TEST(TrainerNeedsTest, SaysWhatAStepTakesAndLeavesNoTrace) {
  Fixture f;
  Trainer trainer(f.model, f.optimizer(), {.count = true, .gradient_norm = true});
  const NamedLoss loss = make_loss("cross_entropy");
  const Tensor before = f.net->weight.detach().clone();
  f.source->reset(0);
  const MemoryNeeds needs = trainer.needs(*f.source->next(), loss.loss);
  EXPECT_TRUE(at::equal(f.net->weight, before));
  EXPECT_EQ(needs.parameters, Bytes(60));
  EXPECT_EQ(needs.gradients, Bytes(60));
  EXPECT_GE(needs.optimizer_state, Bytes(120));
  EXPECT_EQ(needs.inputs, Bytes(16 * 4 * 4 + 16 * 8));
  EXPECT_GT(needs.activations, Bytes(0));
  FitOptions fit{.progress = ProgressStyle::Off};
  fit.validate = f.source.get();
  fit.metrics = {make_metric("accuracy", loss)};
  fit.validate = nullptr;
  std::int64_t steps = 0;
  fit.on_step = [&](const StepReport& r) {
    ++steps;
    EXPECT_TRUE(r.peak && r.peak->count() > 0);
    EXPECT_TRUE(r.gradient_norm && *r.gradient_norm > 0);
  };
  trainer.fit(*f.source, loss.loss, fit);
  EXPECT_EQ(steps, 4);
  const Evaluation value = trainer.evaluate(*f.source, loss.loss, fit.metrics);
  EXPECT_EQ(value.rows, 64);
  ASSERT_EQ(value.metrics.size(), 1u);
  EXPECT_EQ(value.metrics[0].first, "accuracy");
  Fixture g;
  Trainer blind(g.model, g.optimizer());
  EXPECT_THAT(message([&] { blind.needs({{at::zeros({2, 4})}, {at::zeros({2}, at::kLong)}, 2}, loss.loss); }), HasSubstr("counted"));
}

TEST(TrainerStopTest, SavesWhenAskedToStopAndRefusesOtherSettings) {
  const std::string folder = (fs::temp_directory_path() / ("choices_test_stop_" + std::to_string(::getpid()))).string();
  fs::remove_all(folder);
  const NamedLoss loss = make_loss("cross_entropy");
  const auto run = [&](const std::string& where, std::int64_t stop_after, double rate, std::int64_t epochs) {
    Fixture f;
    Trainer trainer(f.model, make_optimizer("adamw,lr=0.1", f.model.parameters));
    FitOptions fit{.epochs = epochs, .checkpoint_dir = where, .progress = ProgressStyle::Off};
    fit.description = {{"optimizer", "adamw"}, {"lr", rate}};
    fit.stop = [&] { return trainer.step() == stop_after; };
    const FitResult result = trainer.fit(*f.source, loss.loss, fit);
    return std::pair(result, f.net->weight.detach().clone());
  };
  const auto [whole, wanted] = run("", -1, 0.1, 2);
  EXPECT_FALSE(whole.interrupted);
  const auto [stopped, some] = run(folder, 3, 0.1, 2);
  EXPECT_TRUE(stopped.interrupted);
  EXPECT_EQ(stopped.steps, 3);
  EXPECT_THAT(message([&] { run(folder, -1, 0.2, 2); }), HasSubstr("lr was 0.1 and is 0.2"));
  const auto [rest, got] = run(folder, -1, 0.1, 2);
  EXPECT_EQ(rest.resumed_at, 3);
  EXPECT_EQ(rest.steps, 8);
  EXPECT_TRUE(at::equal(wanted, got));
  fs::remove_all(folder);
}

}  // namespace
}  // namespace memfit::train
