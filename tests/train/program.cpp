// What the tests of this folder run: parity with Python, and a run that is killed.
//   train_program optimizer KIND FOLDER    steps on given gradients: FOLDER/in.safetensors to FOLDER/out.safetensors
//   train_program scaler FOLDER            gradients with inf and nan; prints scale, tracker and whether it stepped
//   train_program model NAME FOLDER SPLIT  trains MLP, CNN, GPT or LSTM 50 steps on given weights and data
//   train_program run FOLDER CHECKPOINTS   50 steps with dropout and shuffling, a checkpoint every other step
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdio>
#include <map>
#include <string>

#include "memfit/optim/adafactor.h"
#include "memfit/optim/adam.h"
#include "memfit/optim/grad_scaler.h"
#include "memfit/optim/sgd.h"
#include "memfit/train/tensor_file.h"
#include "memfit/train/trainer.h"

namespace {

namespace nn = torch::nn;
using at::Tensor;
using namespace memfit;
using memfit::train::Batch;
using memfit::train::TensorFile;

struct MlpImpl : nn::Module {
  nn::Linear a{nullptr}, b{nullptr}, c{nullptr};
  MlpImpl() {
    a = register_module("a", nn::Linear(32, 64));
    b = register_module("b", nn::Linear(64, 64));
    c = register_module("c", nn::Linear(64, 10));
  }
  Tensor forward(const Tensor& x) { return c(at::relu(b(at::relu(a(x))))); }
};

struct CnnImpl : nn::Module {
  nn::Conv2d a{nullptr}, b{nullptr};
  nn::BatchNorm2d na{nullptr}, nb{nullptr};
  nn::Linear c{nullptr};
  CnnImpl() {
    a = register_module("a", nn::Conv2d(nn::Conv2dOptions(3, 16, 3).padding(1)));
    na = register_module("na", nn::BatchNorm2d(16));
    b = register_module("b", nn::Conv2d(nn::Conv2dOptions(16, 32, 3).padding(1).stride(2)));
    nb = register_module("nb", nn::BatchNorm2d(32));
    c = register_module("c", nn::Linear(32, 10));
  }
  Tensor forward(const Tensor& x) { return c(at::relu(nb(b(at::relu(na(a(x)))))).mean({2, 3})); }
};

struct BlockImpl : nn::Module {
  nn::LayerNorm n1{nullptr}, n2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
  explicit BlockImpl(std::int64_t d) {
    n1 = register_module("n1", nn::LayerNorm(nn::LayerNormOptions({d})));
    qkv = register_module("qkv", nn::Linear(d, 3 * d));
    out = register_module("out", nn::Linear(d, d));
    n2 = register_module("n2", nn::LayerNorm(nn::LayerNormOptions({d})));
    up = register_module("up", nn::Linear(d, 4 * d));
    down = register_module("down", nn::Linear(4 * d, d));
  }
  Tensor forward(const Tensor& x) {
    const auto rows = x.size(0), length = x.size(1), d = x.size(2);
    const std::vector<Tensor> parts = qkv(n1(x)).view({rows, length, 3, 4, d / 4}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor seen = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const Tensor y = x + out(seen.transpose(1, 2).reshape({rows, length, d}));
    return y + down(at::gelu(up(n2(y))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding words{nullptr}, places{nullptr};
  Block b0{nullptr}, b1{nullptr};
  nn::Linear head{nullptr};
  GptImpl() {
    words = register_module("words", nn::Embedding(50, 64));
    places = register_module("places", nn::Embedding(24, 64));
    b0 = register_module("b0", Block(64));
    b1 = register_module("b1", Block(64));
    head = register_module("head", nn::Linear(64, 50));
  }
  Tensor forward(const Tensor& x) { return head(b1(b0(words(x) + places->weight.narrow(0, 0, x.size(1))))).flatten(0, 1); }
};

struct LstmImpl : nn::Module {
  nn::Embedding words{nullptr};
  nn::LSTM lstm{nullptr};
  nn::Linear head{nullptr};
  LstmImpl() {
    words = register_module("words", nn::Embedding(50, 32));
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(32, 48).num_layers(2).batch_first(true)));
    head = register_module("head", nn::Linear(48, 50));
  }
  Tensor forward(const Tensor& x) { return head(std::get<0>(lstm(words(x)))).flatten(0, 1); }
};

/// Batches in file order, or shuffled anew in each epoch.
class Rows : public train::BatchSource {
 public:
  Rows(Tensor x, Tensor y, std::int64_t batch, bool shuffle) : x_(std::move(x)), y_(std::move(y)), batch_(batch), shuffle_(shuffle) { Rows::reset(0); }
  std::optional<Batch> next() override {
    const std::int64_t rows = std::min(batch_, x_.size(0) - at_);
    if (rows <= 0) return std::nullopt;
    const Tensor which = order_.narrow(0, at_, rows);
    at_ += rows;
    return Batch{{x_.index_select(0, which)}, {y_.index_select(0, which)}, rows};
  }
  void reset(std::int64_t epoch) override {
    epoch_ = epoch;
    at_ = 0;
    order_ = shuffle_ ? at::randperm(x_.size(0), at::detail::createCPUGenerator(static_cast<std::uint64_t>(epoch)), at::kLong)
                      : at::arange(x_.size(0), at::kLong);
  }
  nlohmann::json state() const override { return {{"epoch", epoch_}, {"at", at_}}; }
  void load_state(const nlohmann::json& state) override {
    reset(state.at("epoch"));
    at_ = state.at("at");
  }

 private:
  Tensor x_, y_, order_;
  std::int64_t batch_;
  bool shuffle_;
  std::int64_t epoch_ = 0, at_ = 0;
};

train::Loss cross_entropy() {
  return train::Loss::sum_and_weight([](const Tensor& out, const Batch& b) {
    const Tensor targets = b.targets[0].flatten();
    return train::WeightedSum{at::cross_entropy_loss(out, targets, {}, at::Reduction::Sum), static_cast<double>(targets.numel())};
  });
}

train::Loss mean_cross_entropy() {
  return train::Loss::mean_over_rows([](const Tensor& out, const Batch& b) { return at::cross_entropy_loss(out, b.targets[0].flatten()); });
}

int run_optimizer(const std::string& kind, const std::string& folder) {
  const TensorFile in(folder + "/in.safetensors");
  std::vector<optim::NamedTensor> parameters;
  for (const char* name : {"a", "b", "c"}) parameters.push_back({name, in.load(name).set_requires_grad(true)});
  std::vector<optim::ParameterGroup> groups = {{"all", parameters}};
  std::unique_ptr<optim::Optimizer> optimizer;
  if (kind == "sgd") optimizer = std::make_unique<optim::Sgd>(groups, optim::SgdOptions{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true});
  if (kind == "adam") optimizer = std::make_unique<optim::Adam>(groups, optim::AdamOptions{.weight_decay = 0.01, .amsgrad = true});
  if (kind == "adamw") optimizer = std::make_unique<optim::AdamW>(groups, optim::AdamOptions{});
  if (kind == "adafactor") optimizer = std::make_unique<optim::Adafactor>(groups, optim::AdafactorOptions{.weight_decay = 0.1});
  for (int i = 0; i < 10; ++i) {
    for (auto& p : parameters) p.tensor.mutable_grad() = in.load(p.name + "." + std::to_string(i));
    optimizer->step();
  }
  train::save_tensors(folder + "/out.safetensors", parameters);
  return 0;
}

int run_scaler(const std::string& folder) {
  const TensorFile in(folder + "/in.safetensors");
  Tensor w = at::zeros({4}).set_requires_grad(true);
  optim::Sgd sgd({{"all", {{"w", w}}}}, {.learning_rate = 0.1});
  optim::GradScaler scaler({.scale = 1024, .growth_interval = 3});
  const Tensor gradients = in.load("gradients");
  for (std::int64_t i = 0; i < gradients.size(0); ++i) {
    sgd.zero_grad();
    scaler.scale((w * gradients[i]).sum()).backward();
    const bool stepped = scaler.step(sgd);
    scaler.update();
    std::printf("%.17g %lld %d\n", scaler.scale_factor(), static_cast<long long>(scaler.growth_tracker()), stepped ? 1 : 0);
  }
  train::save_tensors(folder + "/out.safetensors", {{"w", w}});
  return 0;
}

template <class Impl>
int train_model(const std::string& folder, std::int64_t micro_batch) {
  const TensorFile in(folder + "/in.safetensors");
  nn::ModuleHolder<Impl> model;
  const train::Model m = train::model_of(model);
  std::vector<optim::NamedTensor> all = m.parameters;
  all.insert(all.end(), m.buffers.begin(), m.buffers.end());
  train::load_tensors(in, all, "data.");
  Rows rows(in.load("data.x"), in.load("data.y"), 16, false);
  const std::vector<optim::ParameterGroup> groups = {{"all", m.parameters}};
  train::Trainer trainer(m, std::make_shared<optim::AdamW>(groups, optim::AdamOptions{.learning_rate = 3e-3}), {.micro_batch = micro_batch});
  train::FitOptions fit{.epochs = 1000, .steps = 50, .progress = train::ProgressStyle::Off};
  fit.on_step = [](const train::StepReport& r) { std::printf("%.17g\n", r.loss); };
  trainer.fit(rows, micro_batch > 0 ? cross_entropy() : mean_cross_entropy(), fit);
  train::save_tensors(folder + "/out.safetensors", all);
  return 0;
}

int run_killed(const std::string& folder, const std::string& checkpoints) {
  at::manual_seed(1);
  nn::Sequential model(nn::Linear(32, 256), nn::BatchNorm1d(256), nn::ReLU(), nn::Dropout(0.3), nn::Linear(256, 10));
  at::Generator g = at::detail::createCPUGenerator(4);
  const Tensor x = at::randn({200, 32}, g), y = at::randint(0, 10, {200}, g);
  Rows rows(x, y, 24, true);
  train::Trainer trainer(train::model_of(model), std::make_shared<optim::AdamW>(*model, optim::AdamOptions{.learning_rate = 1e-2}), {.ema_decay = 0.9});
  // Unbuffered and appended: what a step said is there when the next moment kills.
  const int log = ::open((folder + "/losses").c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  train::FitOptions fit{.epochs = 1000, .steps = 50, .checkpoint_dir = checkpoints, .checkpoint_every = 2, .progress = train::ProgressStyle::Off};
  fit.on_step = [&](const train::StepReport& r) {
    char line[80];
    const int n = std::snprintf(line, sizeof line, "%lld %.17g\n", static_cast<long long>(r.step), r.loss);
    if (::write(log, line, static_cast<std::size_t>(n)) != n) std::abort();
  };
  trainer.fit(rows, mean_cross_entropy(), fit);
  std::vector<optim::NamedTensor> out = optim::named_parameters(*model);
  for (const auto& a : trainer.averages()->averages()) out.push_back({"average/" + a.name, a.tensor});
  for (const auto& b : model->named_buffers()) out.push_back({b.key(), b.value()});
  train::save_tensors(folder + "/out.safetensors", out);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 3 && words[0] == "optimizer") return run_optimizer(words[1], words[2]);
    if (words.size() == 2 && words[0] == "scaler") return run_scaler(words[1]);
    if (words.size() == 3 && words[0] == "run") return run_killed(words[1], words[2]);
    if (words.size() == 4 && words[0] == "model") {
      const std::int64_t split = std::stoll(words[3]);
      if (words[1] == "mlp") return train_model<MlpImpl>(words[2], split);
      if (words[1] == "cnn") return train_model<CnnImpl>(words[2], split);
      if (words[1] == "gpt") return train_model<GptImpl>(words[2], split);
      if (words[1] == "lstm") return train_model<LstmImpl>(words[2], split);
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
  std::fprintf(stderr, "usage: train_program optimizer|scaler|model|run ... (see its source)\n");
  return 2;
}
