// Whole nets of the usual kinds, written with torch::nn.
#include <torch/torch.h>

#include <random>

#include "tests/zoo/cpp/zoo.h"

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

ZOO(mlp) {
  rec.seed(1);
  nn::Sequential net(nn::Linear(64, 256), nn::Tanh(), nn::Linear(256, 256), nn::LayerNorm(nn::LayerNormOptions({256})), nn::GELU(),
                     nn::Dropout(0.2), nn::Linear(256, 10));
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 64}), labels = torch::randint(10, {1024}, torch::kLong);
    Tensor loss = F::cross_entropy(net->forward(x), labels);
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {x, labels}, 2);
  }
}

ZOO(cnn_batchnorm) {
  rec.seed(2);
  auto conv = [](int in, int out) { return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1)); };
  nn::Sequential net(conv(3, 16), nn::BatchNorm2d(16), nn::ReLU(nn::ReLUOptions(true)), conv(16, 16),
                     nn::BatchNorm2d(nn::BatchNorm2dOptions(16).momentum(std::nullopt)), nn::ReLU(nn::ReLUOptions(true)), conv(16, 24),
                     nn::BatchNorm2d(nn::BatchNorm2dOptions(24).track_running_stats(false)), nn::LeakyReLU(), nn::MaxPool2d(4), nn::Flatten(),
                     nn::Linear(24 * 64, 10), nn::BatchNorm1d(10));
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9).nesterov(true));
  for (int step = 0; step < 3; ++step) {
    Tensor images = torch::randn({12, 3, 32, 32}), labels = torch::randint(10, {12}, torch::kLong);
    if (step == 1) images = images.contiguous(at::MemoryFormat::ChannelsLast);
    net->train();
    Tensor unused = net->forward(images.flip(3));  // moves the statistics, never goes backward
    Tensor loss = F::cross_entropy(net->forward(images), labels);
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "unused", unused.sum());
    zoo::record_step(rec, step, loss, net, optimizer, {images, labels}, 1);
    net->eval();
    torch::NoGradGuard no_grad;
    rec.add(step, "evaluated", net->forward(images));
  }
}

namespace {

struct BlockImpl : nn::Module {
  BlockImpl(int width, int heads, double dropout) : heads_(heads), dropout_(dropout) {
    norm1 = register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})));
    norm2 = register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})));
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(width, width));
    up = register_module("up", nn::Linear(width, 4 * width));
    down = register_module("down", nn::Linear(4 * width, width));
  }
  Tensor forward(Tensor x, bool fused) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    auto parts = qkv(norm1(x)).view({batch, length, 3, heads_, width / heads_}).permute({2, 0, 3, 1, 4}).unbind(0);
    Tensor y;
    if (fused) {
      y = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    } else {
      Tensor scores = parts[0].matmul(parts[1].transpose(-2, -1)) / std::sqrt(double(width / heads_));
      Tensor mask = torch::ones({length, length}, torch::kBool).triu(1);
      y = F::dropout(scores.masked_fill(mask, -INFINITY).softmax(-1), F::DropoutFuncOptions().p(dropout_).training(is_training()));
      y = y.matmul(parts[2]);
    }
    x = x + F::dropout(out(y.transpose(1, 2).flatten(2)), F::DropoutFuncOptions().p(dropout_).training(is_training()));
    return x + down(F::gelu(up(norm2(x))));
  }
  int heads_;
  double dropout_;
  nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  explicit GptImpl(bool tied) {
    token = register_module("token", nn::Embedding(96, 96));
    position = register_module("position", nn::Embedding(64, 96));
    for (int i = 0; i < 4; ++i) blocks.push_back(register_module("block" + std::to_string(i), Block(96, 4, 0.1)));
    head = register_module("head", nn::Linear(nn::LinearOptions(96, 96).bias(false)));
    if (tied) head->weight = token->weight;
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = token(tokens) + position(torch::arange(tokens.size(1)));
    for (std::size_t i = 0; i < blocks.size(); ++i) x = blocks[i](x, i % 2 == 1);
    return head(x);
  }
  nn::Embedding token{nullptr}, position{nullptr};
  std::vector<Block> blocks;
  nn::Linear head{nullptr};
};
TORCH_MODULE(Gpt);

void train_gpt(zoo::Recorder& rec, bool tied) {
  Gpt net(tied);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-3).amsgrad(tied));
  for (int step = 0; step < 3; ++step) {
    Tensor tokens = torch::randint(96, {10, 65}, torch::kLong);
    Tensor logits = net(tokens.narrow(1, 0, 64));
    Tensor loss = F::cross_entropy(logits.flatten(0, 1), tokens.narrow(1, 1, 64).reshape(-1));
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "norm", nn::utils::clip_grad_norm_(net->parameters(), 1.0));
    zoo::record_step(rec, step, loss, net, optimizer, {tokens}, tied ? 3 : 2);
  }
}

}  // namespace

ZOO(gpt) {
  rec.seed(3);
  train_gpt(rec, false);
}

ZOO(weight_tying) {
  rec.seed(4);
  train_gpt(rec, true);
}

ZOO(lstm_packed) {
  rec.seed(5);
  nn::Embedding embed(nn::EmbeddingOptions(200, 48).padding_idx(0));
  nn::LSTM lstm(nn::LSTMOptions(48, 64).num_layers(2).bidirectional(true).batch_first(true).dropout(0.2));
  nn::Linear head(128, 12);
  nn::ModuleList net(embed, lstm, head);
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    Tensor lengths = std::get<0>(torch::randint(20, 71, {20}, torch::kLong).sort(0, true));
    Tensor tokens = torch::randint(1, 200, {20, lengths[0].item<int64_t>()}, torch::kLong);
    Tensor tags = torch::randint(12, tokens.sizes(), torch::kLong);
    auto packed = nn::utils::rnn::pack_padded_sequence(embed(tokens), lengths, true);
    auto [output, state] = lstm->forward_with_packed_input(packed);
    auto [padded, sizes] = nn::utils::rnn::pad_packed_sequence(output, true);
    Tensor loss = F::cross_entropy(head(padded).flatten(0, 1), tags.flatten()) + std::get<1>(state).square().mean() * 1e-3;
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {tokens, tags}, 2);
  }
}

ZOO(gru_carried_state) {
  rec.seed(6);
  nn::Embedding embed(50, 48);
  nn::GRU gru(nn::GRUOptions(48, 96).num_layers(2));
  nn::LSTMCell cell(96, 64);
  nn::Linear head(64, 50);
  nn::ModuleList net(embed, gru, cell, head);
  torch::optim::RMSprop optimizer(net->parameters(), torch::optim::RMSpropOptions(1e-3).momentum(0.5));
  Tensor stream = torch::randint(50, {4 * 30 + 1, 32}, torch::kLong), state = torch::zeros({2, 32, 96});
  std::tuple<Tensor, Tensor> carried{torch::zeros({32, 64}), torch::zeros({32, 64})};
  for (int step = 0; step < 4; ++step) {
    state = state.detach();
    carried = {std::get<0>(carried).detach(), std::get<1>(carried).detach()};
    auto [y, next] = gru(embed(stream.narrow(0, step * 30, 30)), state);
    state = next;
    std::vector<Tensor> outputs;
    for (const Tensor& moment : y.unbind(0)) {
      carried = cell(moment, carried);
      outputs.push_back(std::get<0>(carried));
    }
    Tensor loss = F::cross_entropy(head(torch::stack(outputs)).flatten(0, 1), stream.narrow(0, step * 30 + 1, 30).reshape(-1));
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "state", state);
    zoo::record_step(rec, step, loss, net, optimizer, {stream}, 2);
  }
}

namespace {

nn::Sequential double_conv(int in, int out) {
  auto conv = [](int a, int b) { return nn::Conv2d(nn::Conv2dOptions(a, b, 3).padding(1).bias(false)); };
  return nn::Sequential(conv(in, out), nn::BatchNorm2d(out), nn::ReLU(nn::ReLUOptions(true)), conv(out, out), nn::BatchNorm2d(out),
                        nn::ReLU(nn::ReLUOptions(true)));
}

}  // namespace

ZOO(unet) {
  rec.seed(7);
  auto down1 = double_conv(3, 12), down2 = double_conv(12, 24), bottom = double_conv(24, 48), up2 = double_conv(48, 24), up1 = double_conv(36, 12);
  nn::ConvTranspose2d lift(nn::ConvTranspose2dOptions(48, 24, 2).stride(2));
  nn::Conv2d head(nn::Conv2dOptions(12, 4, 1));
  nn::ModuleList net(down1, down2, bottom, up2, up1, lift, head);
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    Tensor images = torch::randn({4, 3, 64, 64}), masks = torch::randint(4, {4, 64, 64}, torch::kLong);
    Tensor a = down1->forward(images);
    Tensor b = down2->forward(torch::max_pool2d(a, 2));
    Tensor c = bottom->forward(torch::max_pool2d(b, 2));
    Tensor x = up2->forward(torch::cat({lift(c), b}, 1));
    x = F::interpolate(x, F::InterpolateFuncOptions().scale_factor(std::vector<double>{2, 2}).mode(torch::kBilinear).align_corners(false));
    Tensor loss = F::cross_entropy(head(up1->forward(torch::cat({x, a}, 1))), masks);
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {images, masks}, 2);
  }
}

ZOO(gan) {
  rec.seed(8);
  auto lift = [](int in, int out) { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(in, out, 4).stride(2).padding(1)); };
  auto fall = [](int in, int out) { return nn::Conv2d(nn::Conv2dOptions(in, out, 4).stride(2).padding(1)); };
  nn::Sequential generator(nn::Linear(32, 2048), nn::Unflatten(nn::UnflattenOptions(1, {32, 8, 8})), nn::BatchNorm2d(32),
                           nn::ReLU(nn::ReLUOptions(true)), lift(32, 16), nn::BatchNorm2d(16), nn::ReLU(), lift(16, 3), nn::Tanh());
  nn::Sequential critic(fall(3, 16), nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2).inplace(true)), nn::Dropout2d(0.2), fall(16, 32),
                        nn::BatchNorm2d(32), nn::LeakyReLU(), nn::Flatten(), nn::Linear(2048, 1));
  torch::optim::Adam optim_g(generator->parameters(), torch::optim::AdamOptions(2e-4).betas({0.5, 0.999}));
  torch::optim::Adam optim_d(critic->parameters(), torch::optim::AdamOptions(2e-4).betas({0.5, 0.999}));
  for (int step = 0; step < 3; ++step) {
    Tensor real = torch::randn({40, 3, 32, 32}).tanh(), noise = torch::randn({40, 32});
    Tensor fake = generator->forward(noise);
    optim_d.zero_grad();
    Tensor loss_d = torch::softplus(-critic->forward(real)).mean() + torch::softplus(critic->forward(fake.detach())).mean();
    loss_d.backward();
    optim_d.step();
    optim_g.zero_grad();
    Tensor loss_g = torch::softplus(-critic->forward(fake)).mean();
    loss_g.backward();
    rec.add(step, "loss_d", loss_d);
    rec.module(step, *critic, "critic");
    std::vector<Tensor> fixed = critic->parameters();
    fixed.insert(fixed.end(), {real, noise});
    zoo::record_step(rec, step, loss_g, generator, optim_g, fixed, 2);
    rec.optimizer(step, optim_d, "optim_d");
  }
}

namespace {

struct Tree {
  std::unique_ptr<Tree> left, right;
  int word = 0;
};

std::unique_ptr<Tree> random_tree(std::mt19937& chance, int leaves) {
  auto tree = std::make_unique<Tree>();
  if (leaves == 1) {
    tree->word = int(chance() % 100);
    return tree;
  }
  const int left = 1 + int(chance() % (leaves - 1));
  tree->left = random_tree(chance, left);
  tree->right = random_tree(chance, leaves - left);
  return tree;
}

struct TreeLstmImpl : nn::Module {
  TreeLstmImpl() {
    embed = register_module("embed", nn::Embedding(100, 96));
    leaf = register_module("leaf", nn::Linear(96, 3 * 96));
    node = register_module("node", nn::Linear(2 * 96, 5 * 96));
    head = register_module("head", nn::Linear(96, 5));
  }
  std::pair<Tensor, Tensor> forward(const Tree& tree) {
    if (!tree.left) {
      auto part = leaf(embed(torch::tensor({tree.word}))).chunk(3, -1);
      Tensor c = part[0].sigmoid() * part[2].tanh();
      return {part[1].sigmoid() * c.tanh(), c};
    }
    auto [lh, lc] = forward(*tree.left);
    auto [rh, rc] = forward(*tree.right);
    auto part = node(torch::cat({lh, rh}, -1)).chunk(5, -1);
    Tensor c = part[0].sigmoid() * part[4].tanh() + part[1].sigmoid() * lc + part[2].sigmoid() * rc;
    return {part[3].sigmoid() * c.tanh(), c};
  }
  nn::Embedding embed{nullptr};
  nn::Linear leaf{nullptr}, node{nullptr}, head{nullptr};
};
TORCH_MODULE(TreeLstm);

}  // namespace

ZOO(treelstm) {
  rec.seed(9);
  std::mt19937 chance(9);
  TreeLstm net;
  torch::optim::Adagrad optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    std::vector<Tensor> logits;
    for (int i = 0; i < 12; ++i) logits.push_back(net->head(net->forward(*random_tree(chance, 20 + int(chance() % 20))).first));
    Tensor labels = torch::randint(5, {12}, torch::kLong);
    Tensor loss = F::cross_entropy(torch::cat(logits), labels);
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {labels}, 1);
  }
}
