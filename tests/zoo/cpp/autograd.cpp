// Programs about autograd and optimizers: custom functions, second order, graphs kept, autocast, sparse gradients.
#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include "tests/zoo/cpp/zoo.h"

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

struct Swish : torch::autograd::Function<Swish> {
  static Tensor forward(torch::autograd::AutogradContext* context, const Tensor& x, const Tensor& beta) {
    Tensor gate = torch::sigmoid(beta * x);
    context->save_for_backward({x, beta, gate});
    context->saved_data["noise"] = torch::rand_like(x);  // kept beside the saved tensors
    return x * gate;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    auto saved = context->get_saved_variables();
    Tensor slope = saved[2] * (1 - saved[2]), noise = context->saved_data["noise"].toTensor();
    return {grads[0] * (saved[2] + saved[0] * saved[1] * slope) + noise * 1e-4, (grads[0] * saved[0] * saved[0] * slope).sum().view({1})};
  }
};

struct ClampInPlace : torch::autograd::Function<ClampInPlace> {
  static Tensor forward(torch::autograd::AutogradContext* context, Tensor x) {
    context->save_for_backward({x.abs() < 1});
    context->mark_dirty({x});
    return x.clamp_(-1, 1);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list grads) {
    return {grads[0] * context->get_saved_variables()[0]};
  }
};

nn::Sequential tanh_net(int width) {
  return nn::Sequential(nn::Linear(64, width), nn::Tanh(), nn::Linear(width, width), nn::Softplus(), nn::Linear(width, width), nn::Tanh(),
                        nn::Linear(width, 64));
}

}  // namespace

ZOO(custom_function) {
  rec.seed(40);
  nn::Linear first(96, 96), second(96, 96), third(96, 96);
  nn::ModuleList net(first, second, third);
  Tensor beta = torch::full({1}, 1.5, torch::requires_grad());
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 96});
    Tensor h = Swish::apply(first(x), beta);
    h = ClampInPlace::apply(second(h) * 1.0);
    Tensor loss = Swish::apply(third(h), beta).square().mean();
    optimizer.zero_grad();
    beta.mutable_grad().reset();
    loss.backward();
    rec.add(step, "beta", beta.grad());
    zoo::record_step(rec, step, loss, net, optimizer, {x, beta});
  }
}

ZOO(double_backward) {
  rec.seed(41);
  auto net = tanh_net(128);
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1e-4).betas({0.0, 0.9}));
  for (int step = 0; step < 3; ++step) {
    Tensor x = torch::randn({512, 64}).requires_grad_();
    Tensor grad = torch::autograd::grad({net->forward(x).sum()}, {x}, {}, true, true)[0];
    Tensor loss = (grad.norm(2, {1}) - 1).square().mean() + net->forward(x.detach() * 0.5).mean();
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {x}, 2);
  }
}

ZOO(retained_graph) {
  rec.seed(42);
  auto net = tanh_net(128);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 3; ++step) {
    Tensor x = torch::randn({768, 64});
    Tensor y = net->forward(x);
    Tensor first = y.square().mean(), second = (y - x).abs().mean();
    auto parameters = net->parameters();
    auto grads = torch::autograd::grad({first}, parameters, {}, true);
    for (std::size_t i = 0; i < grads.size(); ++i) rec.add(step, "grad" + std::to_string(i), grads[i]);
    optimizer.zero_grad();
    (first + second).backward({}, true);
    (first + second).backward();
    zoo::record_step(rec, step, first + second, net, optimizer, {x});
  }
}

ZOO(autocast_accumulation) {
  rec.seed(43);
  nn::Sequential net(nn::Conv2d(nn::Conv2dOptions(3, 32, 3).padding(1)), nn::BatchNorm2d(32), nn::ReLU(), nn::Conv2d(nn::Conv2dOptions(32, 32, 3).padding(1)),
                     nn::GELU(), nn::AvgPool2d(4), nn::Flatten(), nn::Linear(2048, 64), nn::Dropout(0.1), nn::Linear(64, 10));
  torch::optim::AdamW optimizer(net->parameters(), 1e-3);
  double scale = 1024;
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    Tensor loss, images, labels;
    for (int part = 0; part < 2; ++part) {
      images = torch::randn({8, 3, 32, 32});
      labels = torch::randint(10, {8}, torch::kLong);
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      Tensor logits = net->forward(images);
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::clear_cache();
      loss = F::cross_entropy(logits.to(torch::kFloat), labels) / 2;
      (loss * scale).backward();
      rec.add(step, "logits" + std::to_string(part), logits);
    }
    std::vector<Tensor> grads;
    for (const Tensor& parameter : net->parameters()) grads.push_back(parameter.grad());
    Tensor found = torch::zeros({1});
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found, torch::full({1}, float(1 / scale)));
    rec.add(step, "found", found);
    zoo::record_step(rec, step, loss, net, optimizer, {images, labels}, 2);
  }
}

ZOO(sparse_embedding) {
  rec.seed(44);
  nn::Embedding words(nn::EmbeddingOptions(2000, 48).sparse(true));
  nn::EmbeddingBag bag(nn::EmbeddingBagOptions(1000, 48).mode(torch::kMean).sparse(true));
  nn::Sequential dense(nn::Linear(96, 128), nn::Tanh(), nn::Linear(128, 128), nn::ReLU(), nn::Linear(128, 20));
  torch::optim::SGD sparse({words->weight}, 0.1);
  torch::optim::Adagrad bags({bag->weight}, 0.05);
  torch::optim::Adam adam(dense->parameters(), 1e-3);
  Tensor graph = torch::sparse_coo_tensor(torch::randint(1024, {2, 5000}, torch::kLong), torch::rand({5000}), {1024, 1024}).coalesce();
  for (int step = 0; step < 3; ++step) {
    Tensor a = torch::randint(2000, {1024}, torch::kLong), b = torch::randint(1000, {3072}, torch::kLong), offsets = torch::arange(0, 3072, 3);
    Tensor x = torch::cat({words(a), bag(b, offsets)}, -1);
    x = torch::tanh(torch::mm(graph, x));
    Tensor labels = torch::randint(20, {1024}, torch::kLong);
    Tensor loss = F::cross_entropy(dense->forward(x), labels);
    sparse.zero_grad();
    bags.zero_grad();
    adam.zero_grad();
    loss.backward();
    rec.add(step, "words", words->weight.grad());
    rec.add(step, "bag", bag->weight.grad());
    sparse.step();
    bags.step();
    rec.add(step, "weights", words->weight);
    rec.add(step, "bags", bag->weight);
    zoo::record_step(rec, step, loss, dense, adam, {a, b, offsets, labels, words->weight, bag->weight, bag->weight, graph._values()}, 2);
  }
}

ZOO(optimizers) {
  rec.seed(45);
  for (int kind = 0; kind < 7; ++kind) {
    auto net = tanh_net(96);
    auto parameters = net->parameters();
    std::unique_ptr<torch::optim::Optimizer> optimizer;
    if (kind == 0) optimizer = std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(1e-3));
    if (kind == 1) optimizer = std::make_unique<torch::optim::Adam>(parameters, torch::optim::AdamOptions(1e-3).amsgrad(true));
    if (kind == 2) optimizer = std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-3));
    if (kind == 3) optimizer = std::make_unique<torch::optim::Adagrad>(parameters, torch::optim::AdagradOptions(0.05));
    if (kind == 4) optimizer = std::make_unique<torch::optim::RMSprop>(parameters, torch::optim::RMSpropOptions(1e-3).centered(true).momentum(0.5));
    if (kind == 5) {
      optimizer = std::make_unique<torch::optim::LBFGS>(parameters, torch::optim::LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"));
    }
    if (kind == 6) {  // the kernel behind fused=True
      std::vector<Tensor> grads, first, second, most, steps;
      for (const Tensor& p : parameters) {
        first.push_back(torch::zeros_like(p));
        second.push_back(torch::zeros_like(p));
        steps.push_back(torch::zeros({}));
      }
      for (int step = 0; step < 3; ++step) {
        Tensor x = torch::randn({1024, 64});
        net->zero_grad();
        F::mse_loss(net->forward(x), x).backward();
        grads.clear();
        for (const Tensor& p : parameters) grads.push_back(p.grad());
        torch::NoGradGuard no_grad;
        torch::_foreach_add_(steps, 1);
        at::_fused_adamw_(parameters, grads, first, second, most, steps, 1e-3, 0.9, 0.999, 0.01, 1e-8, false, false);
      }
      rec.module(kind, *net);
      rec.parameters(kind, second, "second");
      continue;
    }
    for (int step = 0; step < 3; ++step) {
      Tensor x = torch::randn({1024, 64});
      Tensor loss = optimizer->step([&] {
        optimizer->zero_grad();
        Tensor inner = F::mse_loss(net->forward(x), x);
        inner.backward();
        return inner;
      });
      rec.add(step, "loss" + std::to_string(kind), loss);
      auto fixed = parameters;
      fixed.push_back(x);
      rec.fixed_bytes(fixed, kind == 5 ? 20 : 3);   // LBFGS keeps a history of directions and gradients
    }
    rec.module(kind, *net);
    if (kind != 5) rec.optimizer(kind, *optimizer);
  }
}
