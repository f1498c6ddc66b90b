// Programs about what happens to single tensors: in place, slices, views, random numbers, indices, complex numbers.
#include <torch/torch.h>

#include "tests/zoo/cpp/zoo.h"

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;
using torch::indexing::None;
using torch::indexing::Slice;

namespace {

nn::ModuleList linears(int count, int width) {
  nn::ModuleList list;
  for (int i = 0; i < count; ++i) list->push_back(nn::Linear(width, width));
  return list;
}

Tensor run(const nn::ModuleList& list, int index, const Tensor& x) { return list->ptr<nn::LinearImpl>(index)->forward(x); }

}  // namespace

ZOO(inplace) {
  rec.seed(20);
  auto net = linears(9, 64);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  Tensor total = torch::zeros({});
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 64}), target = torch::randn({1024, 64});
    Tensor h = run(net, 0, x).relu_();
    h = run(net, 1, h);
    torch::leaky_relu_(h, 0.1);
    h = run(net, 2, h);
    torch::elu_(h);
    h = run(net, 3, h).sigmoid_();
    h = run(net, 4, h).tanh_();
    h = run(net, 5, h);
    torch::hardtanh_(h);
    h = run(net, 6, h);
    h.add_(1.0).mul_(0.5).sub_(0.1).div_(2.0).clamp_(-1.0, 1.0);
    h = run(net, 7, h);
    h.index_put_({h > 1.0}, 0.5);
    h.masked_fill_(h < -1.0, -0.5).neg_();
    Tensor y = run(net, 8, h);
    y.mul_(0.5).sin_().lerp_(h, 0.25);
    Tensor loss = F::mse_loss(y, target);
    optimizer.zero_grad();
    loss.backward();
    total += loss.detach();
    rec.add(step, "total", total);
    zoo::record_step(rec, step, loss, net, optimizer, {x, target});
  }
}

ZOO(slice_writes) {
  rec.seed(21);
  auto net = linears(8, 64);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
  Tensor history = torch::zeros({4, 64}), scratch = torch::empty({512, 64});
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({512, 64});
    torch::mul_out(scratch, x, torch::full({}, 2.0));
    Tensor canvas = torch::zeros({9, 512, 64});
    canvas[0] = x;
    canvas.index_put_({0}, x + scratch * 0.1);
    Tensor state = x;
    for (int i = 0; i < 8; ++i) {
      state = torch::tanh(run(net, i, state));
      canvas.index_put_({i + 1}, state);
      if (i % 3 == 0) canvas[i + 1].slice(0, 0, None, 2).mul_(0.5);
    }
    Tensor y = canvas.clone();
    y.index_put_({Slice(), Slice(), Slice(0, 16)}, y.index({Slice(), Slice(), Slice(16, 32)}) * 2);
    y.slice(0, 2, 4).copy_(canvas.slice(0, 4, 6));
    y.select(0, 5).narrow(1, 8, 16).zero_();
    Tensor z = y.mean(0);
    z.index_copy_(0, torch::arange(0, 64, 2), z.slice(0, 1, 65, 2).clone());
    z.diagonal().add_(1.0);
    Tensor loss = z.square().mean();
    history[step].copy_(z.detach().mean(0));
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "history", history);
    zoo::record_step(rec, step, loss, net, optimizer, {x, history, scratch}, 1);
  }
}

ZOO(views) {
  rec.seed(22);
  nn::Linear first(64, 128), second(128, 128), third(128, 16);
  nn::ModuleList net(first, second, third);
  Tensor scale = torch::ones({1, 1, 128}, torch::requires_grad());
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    Tensor base = torch::randn({64, 64});
    Tensor x = base.as_strided({32, 32, 64}, {64, 64, 1}).clone();
    Tensor h = first(x);
    Tensor strided = h.as_strided({32, 32, 64}, {4096, 128, 2}, 1);
    Tensor wide = scale.expand({32, 32, 128}) * h;
    auto parts = wide.split(32, -1);
    auto rows = parts[0].unbind(0);
    Tensor turned = torch::view_as_complex(wide.view({32, 32, 64, 2})) * c10::complex<float>(0, 1);
    Tensor back = torch::view_as_real(turned).flatten(2);
    Tensor picture = h.unflatten(-1, {8, 16}).movedim(1, -1).transpose(1, 3).reshape({32, 32, 128});
    Tensor windows = torch::tanh(h).unfold(1, 4, 4).sum(-1);
    Tensor y = torch::sin(back + wide) + torch::constant_pad_nd(strided, {0, 64}) + torch::stack(rows).repeat({1, 1, 4});
    y = y + picture + parts[3].tile({1, 1, 4}) + windows.repeat_interleave(4, 1);
    Tensor loss = third(torch::relu(second(y))).square().mean();
    optimizer.zero_grad();
    scale.mutable_grad().reset();
    loss.backward();
    base.view(-1).slice(0, 0, None, 7).mul_(2);
    rec.add(step, "base", base);
    rec.add(step, "scale", scale.grad());
    zoo::record_step(rec, step, loss, net, optimizer, {x, base, scale});
  }
}

namespace {

void train_on_noise(zoo::Recorder& rec, std::optional<at::Generator> own, std::optional<at::Generator> other) {
  auto net = linears(9, 64);
  torch::optim::SGD optimizer(net->parameters(), 1e-3);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({256, 64}, own), h = x;
    std::vector<std::function<Tensor()>> draws = {
        [&] { return torch::rand({256, 64}, own); },
        [&] { return torch::bernoulli(torch::full({256, 64}, 0.4), own); },
        [&] { return at::normal(torch::zeros({256, 64}), torch::ones({256, 64}), other); },
        [&] { return torch::poisson(torch::full({256, 64}, 2.5), own); },
        [&] { return torch::empty({256, 64}).uniform_(-1, 1, other) + torch::empty({256, 64}).normal_(0, 2, own); },
        [&] { return torch::empty({256, 64}).exponential_(2.0, own) + torch::empty({256, 64}).geometric_(0.3, other); },
        [&] { return torch::empty({256, 64}).random_(0, 5, own) + torch::binomial(torch::full({256, 64}, 5.0), torch::full({256, 64}, 0.5), own); },
        [&] { return torch::multinomial(torch::softmax(h.detach(), -1), 64, true, own).to(torch::kFloat); },
        [&] { return torch::randperm(256 * 64, own).view({256, 64}).to(torch::kFloat) / 16384; },
    };
    for (int i = 0; i < 9; ++i) {
      Tensor noise = draws[i]();
      h = torch::tanh(run(net, i, h) * noise + 0.01 * noise);
    }
    Tensor loss = h.square().mean();
    optimizer.zero_grad();
    loss.backward();
    if (own) rec.generator(step, *own, "own");
    if (other) rec.generator(step, *other, "other");
    zoo::record_step(rec, step, loss, net, optimizer, {x});
  }
}

}  // namespace

ZOO(random_default) {
  rec.seed(23);
  train_on_noise(rec, std::nullopt, std::nullopt);
}

ZOO(random_own_generator) {
  rec.seed(24);
  train_on_noise(rec, at::make_generator<at::CPUGeneratorImpl>(5), at::make_generator<at::CPUGeneratorImpl>(6));
}

ZOO(dropout_kinds) {
  rec.seed(25);
  nn::Conv2dOptions conv(8, 8, 3);
  conv.padding(1);
  nn::Sequential net(nn::Conv2d(conv), nn::Dropout(0.2), nn::Conv2d(conv), nn::Dropout(nn::DropoutOptions(0.2).inplace(true)), nn::Conv2d(conv),
                     nn::Dropout2d(0.2), nn::Conv2d(conv), nn::SELU(), nn::AlphaDropout(0.1), nn::Conv2d(conv), nn::FeatureAlphaDropout(0.1),
                     nn::Conv2d(conv), nn::RReLU(nn::RReLUOptions().lower(0.1).upper(0.4)), nn::Conv2d(conv),
                     nn::RReLU(nn::RReLUOptions().inplace(true)), nn::Flatten(), nn::Linear(8 * 256, 10));
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  for (int step = 0; step < 3; ++step) {
    Tensor images = torch::randn({24, 8, 16, 16}), labels = torch::randint(10, {24}, torch::kLong);
    Tensor loss = F::cross_entropy(net->forward(images), labels);
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {images, labels}, 2);
  }
}

ZOO(scatter_index_sort) {
  rec.seed(26);
  auto net = linears(8, 48);
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({512, 48}), places = torch::rand({512, 48}).argsort(/*dim=*/int64_t{1}, /*descending=*/false), rows = torch::randperm(512);
    Tensor h = torch::tanh(run(net, 0, x));
    h = h.gather(1, places) + h.scatter(1, places, 0.5);
    h = torch::zeros_like(h).scatter_add(1, places, torch::tanh(run(net, 1, h)));
    h = h.index_select(0, rows) + torch::zeros_like(h).index_add(0, rows, run(net, 2, h));
    auto [ordered, order] = torch::tanh(run(net, 3, h)).sort(-1, true);
    h = ordered + order.to(torch::kFloat) / 48;
    auto [values, at] = run(net, 4, h).topk(16, -1);
    h = torch::cat({values, values.flip(-1), values.roll(3, -1)}, -1);
    auto [kinds, back, counts] = torch::_unique2((h * 2).detach().to(torch::kLong), true, true, true);
    h = run(net, 5, h) + counts.index({back}).to(torch::kFloat).log() * 0.01;
    Tensor y = h.clone();
    y.index_put_({rows.narrow(0, 0, 64), places.select(1, 0).narrow(0, 0, 64)}, torch::ones({64}), true);
    Tensor picked = torch::masked_select(run(net, 6, y), y > 0.6);
    Tensor corners = torch::nonzero(y.detach() > 1.0);
    Tensor z = run(net, 7, y.cumsum(-1) * 0.1 + std::get<0>(y.max(0)));
    Tensor loss = z.square().mean() + picked.mean() + z.index({corners.select(1, 0), corners.select(1, 1)}).sum() * 1e-3;
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "kinds", kinds);
    rec.add(step, "at", at);
    zoo::record_step(rec, step, loss, net, optimizer, {x, places, rows});
  }
}

ZOO(complex_fft) {
  rec.seed(27);
  nn::Conv1d lift(nn::Conv1dOptions(1, 16, 1)), skip(nn::Conv1dOptions(16, 16, 1)), head(nn::Conv1dOptions(16, 1, 1));
  nn::ModuleList net(lift, skip, head);
  Tensor weight = (torch::randn({16, 16, 24}, torch::kComplexFloat) / 16).requires_grad_();
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({32, 1, 256}), target = torch::randn({32, 1, 256});
    Tensor h = lift(x);
    for (int layer = 0; layer < 3; ++layer) {
      Tensor spectrum = torch::fft::rfft(h);
      Tensor full = torch::zeros_like(spectrum);
      full.narrow(-1, 0, 24).copy_(torch::einsum("bim,iom->bom", {spectrum.narrow(-1, 0, 24), weight}));
      h = torch::gelu(torch::fft::irfft(full, 256) + skip(h));
    }
    Tensor c = torch::complex(h.slice(2, 0, None, 2).contiguous(), h.slice(2, 1, None, 2).contiguous());
    c = torch::fft::ifft(torch::fft::fft(c)) * c.conj() / (1 + c.abs());
    Tensor loss = F::mse_loss(head(h), target) + torch::real(c).mean() + torch::view_as_real(c).square().mean();
    optimizer.zero_grad();
    weight.mutable_grad().reset();
    loss.backward();
    rec.add(step, "weight", weight.grad());
    torch::NoGradGuard no_grad;
    weight.sub_(weight.grad() * 0.01);
    zoo::record_step(rec, step, loss, net, optimizer, {x, target, weight});
  }
}
