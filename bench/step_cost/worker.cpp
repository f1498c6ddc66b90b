// The C++ twin of worker.py and models.py: one model run eagerly, a step at a time: step_cost_worker MODEL.
// The same layers, sizes and protocol; weights and data are LibTorch's own draws from fixed seeds.
#include <torch/torch.h>

#include <c10/util/hash.h>

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <bit>
#include <chrono>
#include <functional>
#include <iostream>
#include <random>
#include <string>
#include <vector>

namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

struct BlockImpl : nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads, double dropout)
      : heads(heads),
        norm_attention(register_module("norm_attention", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm_feed(register_module("norm_feed", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))),
        out(register_module("out", nn::Linear(width, width))),
        feed(register_module("feed", nn::Sequential(nn::Linear(width, 4 * width), nn::GELU(), nn::Linear(4 * width, width)))),
        dropout(register_module("dropout", nn::Dropout(dropout))) {}

  Tensor attention(const Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto parts = qkv->forward(x).view({batch, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4});
    const Tensor mixed = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    return out->forward(mixed.transpose(1, 2).reshape({batch, length, width}));
  }

  Tensor forward(Tensor x) {
    x = x + dropout->forward(attention(norm_attention->forward(x)));
    return x + dropout->forward(feed->forward(norm_feed->forward(x)));
  }

  std::int64_t heads;
  nn::LayerNorm norm_attention, norm_feed;
  nn::Linear qkv, out;
  nn::Sequential feed;
  nn::Dropout dropout;
};
TORCH_MODULE(Block);

struct Gpt : nn::Module {
  Gpt() : embedding(register_module("embedding", nn::Embedding(512, 256))), head(register_module("head", nn::Linear(256, 512))) {
    for (int i = 0; i < 8; ++i) layers.push_back(register_module("layer" + std::to_string(i), Block(256, 4, 0.1)));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding->forward(tokens);
    for (auto& layer : layers) x = layer->forward(x);
    return head->forward(x);
  }
  nn::Embedding embedding;
  nn::Linear head;
  std::vector<Block> layers;
};

nn::Conv2d conv(std::int64_t in, std::int64_t out, bool bias) { return nn::Conv2d(nn::Conv2dOptions(in, out, 3).padding(1).bias(bias)); }

struct ResidualImpl : nn::Module {
  explicit ResidualImpl(std::int64_t channels)
      : conv1(register_module("conv1", conv(channels, channels, false))),
        conv2(register_module("conv2", conv(channels, channels, false))),
        norm1(register_module("norm1", nn::BatchNorm2d(channels))),
        norm2(register_module("norm2", nn::BatchNorm2d(channels))) {}
  Tensor forward(const Tensor& x) {
    const Tensor inner = torch::relu(norm1->forward(conv1->forward(x)));
    return torch::relu(x + norm2->forward(conv2->forward(inner)));
  }
  nn::Conv2d conv1, conv2;
  nn::BatchNorm2d norm1, norm2;
};
TORCH_MODULE(Residual);

struct ResNet : nn::Module {
  ResNet() : stem(register_module("stem", conv(3, 64, true))), head(register_module("head", nn::Linear(64, 10))) {
    for (int i = 0; i < 12; ++i) layers.push_back(register_module("layer" + std::to_string(i), Residual(64)));
  }
  Tensor forward(const Tensor& pictures) {
    Tensor x = stem->forward(pictures);
    for (auto& layer : layers) x = layer->forward(x);
    return head->forward(x.mean({2, 3}));
  }
  nn::Conv2d stem;
  nn::Linear head;
  std::vector<Residual> layers;
};

struct Tagger : nn::Module {
  Tagger()
      : embedding(register_module("embedding", nn::Embedding(10000, 256))),
        lower(register_module("lower", nn::LSTM(nn::LSTMOptions(256, 256).batch_first(true).bidirectional(true)))),
        upper(register_module("upper", nn::LSTM(nn::LSTMOptions(512, 256).batch_first(true).bidirectional(true)))),
        head(register_module("head", nn::Linear(512, 64))) {}
  Tensor forward(const Tensor& tokens) {
    const Tensor x = std::get<0>(lower->forward(embedding->forward(tokens)));
    return head->forward(std::get<0>(upper->forward(x)));
  }
  nn::Embedding embedding;
  nn::LSTM lower, upper;
  nn::Linear head;
};

nn::Sequential double_convolution(std::int64_t in, std::int64_t out) {
  return nn::Sequential(conv(in, out, true), nn::BatchNorm2d(out), nn::ReLU(), conv(out, out, true), nn::BatchNorm2d(out), nn::ReLU());
}

struct UNet : nn::Module {
  UNet() : head(register_module("head", nn::Conv2d(nn::Conv2dOptions(16, 4, 1)))) {
    std::int64_t in = 3;
    for (std::int64_t width : {16, 32, 64, 128}) {
      encoders.push_back(register_module("encoder" + std::to_string(width), double_convolution(in, width)));
      in = width;
    }
    bottom = register_module("bottom", double_convolution(128, 256));
    for (std::int64_t width : {128, 64, 32, 16}) {
      raises.push_back(register_module("raise" + std::to_string(width),
                                       nn::ConvTranspose2d(nn::ConvTranspose2dOptions(2 * width, width, 2).stride(2))));
      decoders.push_back(register_module("decoder" + std::to_string(width), double_convolution(2 * width, width)));
    }
  }
  Tensor forward(const Tensor& pictures) {
    Tensor x = pictures;
    std::vector<Tensor> skips;
    for (auto& encoder : encoders) {
      x = encoder->forward(x);
      skips.push_back(x);
      x = torch::max_pool2d(x, 2);
    }
    x = bottom->forward(x);
    for (std::size_t i = 0; i < raises.size(); ++i) {
      x = decoders[i]->forward(torch::cat({skips.back(), raises[i]->forward(x)}, 1));
      skips.pop_back();
    }
    return head->forward(x);
  }
  std::vector<nn::Sequential> encoders, decoders;
  nn::Sequential bottom{nullptr};
  std::vector<nn::ConvTranspose2d> raises;
  nn::Conv2d head;
};

struct Tree {
  std::int64_t word = 0;
  std::vector<Tree> children;  // none or two
};

Tree random_tree(std::mt19937& random, int leaves) {
  if (leaves == 1) return {static_cast<std::int64_t>(random() % 1000), {}};
  const int left = 1 + static_cast<int>(random() % static_cast<unsigned>(leaves - 1));
  Tree tree;
  tree.children.push_back(random_tree(random, left));
  tree.children.push_back(random_tree(random, leaves - left));
  return tree;
}

struct TreeLstm : nn::Module {
  TreeLstm()
      : embedding(register_module("embedding", nn::Embedding(1000, 128))),
        leaf(register_module("leaf", nn::Linear(128, 256))),
        cell(register_module("cell", nn::Linear(256, 640))),
        head(register_module("head", nn::Linear(128, 5))) {}
  std::pair<Tensor, Tensor> node(const Tree& tree) {
    Tensor memory, out;
    if (tree.children.empty()) {
      const auto parts = leaf->forward(embedding->forward(torch::tensor({tree.word}))).chunk(2, 1);
      memory = parts[0], out = parts[1];
    } else {
      const auto [left, left_memory] = node(tree.children[0]);
      const auto [right, right_memory] = node(tree.children[1]);
      const auto gates = cell->forward(torch::cat({left, right}, 1)).chunk(5, 1);
      memory = torch::sigmoid(gates[0]) * torch::tanh(gates[4]) + torch::sigmoid(gates[1]) * left_memory +
               torch::sigmoid(gates[2]) * right_memory;
      out = gates[3];
    }
    return {torch::sigmoid(out) * torch::tanh(memory), memory};
  }
  Tensor forward(const std::vector<Tree>& trees) {
    std::vector<Tensor> roots;
    for (const Tree& tree : trees) roots.push_back(node(tree).first);
    return head->forward(torch::cat(roots));
  }
  nn::Embedding embedding;
  nn::Linear leaf, cell, head;
};

struct Case {
  std::shared_ptr<nn::Module> net;
  std::function<Tensor()> loss;
};

template <class Net, class Inputs>
Case make(Inputs inputs, Tensor targets) {
  auto net = std::make_shared<Net>();
  return {net, [=] {
            Tensor out = net->forward(inputs);
            // A class for every token.
            if (targets.dim() == 2) return F::cross_entropy(out.flatten(0, 1), targets.flatten());
            return F::cross_entropy(out, targets);
          }};
}

Case make(const std::string& name) {
  torch::manual_seed(0);
  if (name == "gpt") return make<Gpt>(torch::randint(512, {8, 256}, torch::kLong), torch::randint(512, {8, 256}, torch::kLong));
  if (name == "resnet") return make<ResNet>(torch::randn({16, 3, 64, 64}), torch::randint(10, {16}, torch::kLong));
  if (name == "lstm") return make<Tagger>(torch::randint(10000, {32, 200}, torch::kLong), torch::randint(64, {32, 200}, torch::kLong));
  if (name == "unet") return make<UNet>(torch::randn({4, 3, 128, 128}), torch::randint(4, {4, 128, 128}, torch::kLong));
  if (name == "tree") {
    std::mt19937 random(3);
    std::vector<Tree> trees;
    for (int i = 0; i < 16; ++i) trees.push_back(random_tree(random, 64));
    return make<TreeLstm>(trees, torch::randint(5, {16}, torch::kLong));
  }
  throw std::invalid_argument("unknown model '" + name + "'; there are gpt, resnet, lstm, unet, tree");
}

std::string digest(const std::vector<Tensor>& tensors) {
  std::string all;
  for (const Tensor& tensor : tensors) {
    // Of copies: a tensor whose pointer is out may not be moved, and that would change what is measured.
    const Tensor copy = tensor.detach().clone(at::MemoryFormat::Contiguous);
    all += c10::sha1(std::string(static_cast<const char*>(copy.const_data_ptr()), copy.nbytes())).str();
  }
  return c10::sha1(all).str().substr(0, 16);
}

nlohmann::json step(const Case& one) {
  const auto parameters = one.net->parameters();
  for (const Tensor& parameter : parameters) parameter.mutable_grad().reset();
  torch::manual_seed(1);
  const auto start = std::chrono::steady_clock::now();
  const Tensor loss = one.loss();
  loss.backward();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - start;
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return {{"ms", took.count()},
          {"loss", fmt::format("{:08x}", std::bit_cast<std::uint32_t>(loss.item<float>()))},
          {"gradients", digest(gradients)},
          {"buffers", digest(one.net->buffers())}};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: step_cost_worker MODEL\n";
    return 2;
  }
  try {
    const Case one = make(argv[1]);
    std::cout << nlohmann::json{{"ready", true}} << std::endl;
    for (std::string line; std::getline(std::cin, line);) {
      if (line != "step") throw std::invalid_argument("unknown command '" + line + "'; there is 'step'");
      std::cout << step(one) << std::endl;
    }
  } catch (const c10::OutOfMemoryError& error) {
    std::cerr << error.what() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
  return 0;
}
