// Programs that are more than one stream of ops: threads, raw pointers, exceptions, long-lived state, files.
#include <torch/torch.h>

#include <cstring>
#include <sstream>
#include <thread>

#include "tests/zoo/cpp/zoo.h"

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

nn::Sequential deep_net() {
  return nn::Sequential(nn::Linear(96, 96), nn::Tanh(), nn::Linear(96, 96), nn::BatchNorm1d(96), nn::ReLU(nn::ReLUOptions(true)), nn::Linear(96, 96),
                        nn::GELU(), nn::Linear(96, 96), nn::Tanh(), nn::Linear(96, 96));
}

}  // namespace

ZOO(threads) {
  rec.seed(60);
  std::vector<nn::Sequential> nets = {deep_net(), deep_net(), deep_net()};
  std::vector<zoo::Recorder> parts(3);
  std::vector<std::thread> threads;
  for (int index = 0; index < 3; ++index) {
    threads.emplace_back([&, index] {
      torch::set_num_threads(1);
      auto generator = at::make_generator<at::CPUGeneratorImpl>(index);
      auto net = nets[index];
      torch::optim::Adam optimizer(net->parameters(), 1e-3);
      for (int step = 0; step < 4; ++step) {
        Tensor x = torch::randn({512, 96}, generator);
        Tensor noise = torch::bernoulli(torch::full({512, 96}, 0.9), generator);
        Tensor loss = F::mse_loss(net->forward(x * noise), x);
        optimizer.zero_grad();
        loss.backward();
        parts[index].add(step, "loss", loss);
        parts[index].module(step, *net);
        auto fixed = net->parameters();
        fixed.push_back(x);
        parts[index].fixed_bytes(fixed, 2);
        optimizer.step();
        parts[index].optimizer(step, optimizer);
        parts[index].generator(step, generator);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int index = 0; index < 3; ++index) rec.merge("thread" + std::to_string(index), parts[index]);
}

ZOO(raw_pointers) {
  rec.seed(61);
  auto net = deep_net();
  torch::optim::SGD optimizer(net->parameters(), 0.05);
  Tensor table = torch::zeros({1024, 96});
  float* row = table.data_ptr<float>();  // held for the whole program, written between ops
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 96});
    Tensor h = torch::tanh(x * 0.5);
    auto seen = h.accessor<float, 2>();
    Tensor y = net->forward(h);
    for (int i = 0; i < 96; ++i) row[step * 96 + i] = float(i) / 96;
    Tensor z = net->forward(y + table);
    float sum = 0;
    for (int i = 0; i < 1024; ++i) sum += seen[i][i % 96];
    std::memcpy(row + 96 * 512, row, 96 * 4 * sizeof(float));
    Tensor outside = torch::from_blob(row, {4, 96});
    Tensor loss = F::mse_loss(z, x) + outside.mean() + sum * 1e-6;
    optimizer.zero_grad();
    loss.backward();
    net->parameters()[0].grad().data_ptr<float>()[3] = 0.25f;
    rec.add(step, "table", table);
    rec.add(step, "sum", sum);
    zoo::record_step(rec, step, loss, net, optimizer, {x, table, h});
  }
}

ZOO(exceptions) {
  rec.seed(62);
  auto net = deep_net();
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 96});
    int caught = 0;
    try {
      Tensor h = net->forward(x);
      h.register_hook([](const Tensor&) -> Tensor { throw std::runtime_error("stop in backward"); });
      (h * 2).sum().backward();
    } catch (const std::exception&) {
      ++caught;
    }
    try {
      Tensor kept = torch::tanh(x * 2);
      torch::add(kept, torch::randn({7, 3}));
    } catch (const c10::Error&) {
      ++caught;
    }
    try {
      torch::empty({int64_t(1) << 52});
    } catch (const std::exception&) {
      rec.caught_out_of_memory();
      ++caught;
    }
    rec.add(step, "caught", caught);
    Tensor loss = F::mse_loss(net->forward(F::dropout(x, F::DropoutFuncOptions().p(0.1))), x);
    optimizer.zero_grad();
    loss.backward();
    zoo::record_step(rec, step, loss, net, optimizer, {x}, 2);
  }
}

ZOO(inference_with_state) {
  rec.seed(63);
  nn::GRUCell cell(96, 192);
  nn::Sequential head(nn::Linear(192, 192), nn::Tanh(), nn::Linear(192, 96));
  Tensor cache = torch::zeros({24, 512, 96}), state = torch::zeros({512, 192}), x = torch::randn({512, 96});
  torch::NoGradGuard no_grad;
  for (int step = 0; step < 24; ++step) {
    state = cell(x, state);
    Tensor y = head->forward(state);
    cache.select(0, step).copy_(y);
    x = torch::softmax(cache.narrow(0, 0, step + 1).mean(0), -1) + torch::rand_like(y) * 0.1;
    if (step % 6 == 5) {
      torch::InferenceMode guard;
      rec.add(step, "peek", head->forward(state * 0.5));
    }
  }
  rec.add(0, "cache", cache);
  rec.add(0, "state", state);
  auto fixed = cell->parameters();
  for (const Tensor& parameter : head->parameters()) fixed.push_back(parameter);
  fixed.push_back(cache);
  rec.fixed_bytes(fixed);
  rec.default_generator(0);
}

ZOO(save_load) {
  rec.seed(64);
  auto net = deep_net();
  auto optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), 1e-3);
  for (int step = 0; step < 4; ++step) {
    Tensor x = torch::randn({1024, 96});
    Tensor y = net->forward(x);
    std::stringstream file, activation;
    torch::save(net, file);
    torch::save(y.detach(), activation);
    Tensor loss = F::mse_loss(y, x);
    optimizer->zero_grad();
    loss.backward();
    Tensor again;
    torch::load(again, activation);
    rec.add(step, "again", again);
    zoo::record_step(rec, step, loss, net, *optimizer, {x}, 2);
    if (step == 1) {
      torch::load(net, file);
      optimizer = std::make_unique<torch::optim::Adam>(net->parameters(), 1e-3);
    }
  }
}

ZOO(variable_accumulation) {
  rec.seed(65);
  nn::Embedding embed(100, 64);
  nn::GRU gru(nn::GRUOptions(64, 96).batch_first(true));
  nn::Linear head(96, 100);
  nn::ModuleList net(embed, gru, head);
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  const std::vector<std::pair<int, int>> shapes = {{16, 40}, {8, 120}, {24, 17}, {4, 200}, {16, 64}, {3, 7}};
  optimizer.zero_grad();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    Tensor tokens = torch::randint(100, {shapes[i].first, shapes[i].second + 1}, torch::kLong);
    auto [y, state] = gru(embed(tokens.narrow(1, 0, shapes[i].second)));
    Tensor loss = F::cross_entropy(head(y).flatten(0, 1), tokens.narrow(1, 1, shapes[i].second).reshape(-1));
    loss.backward();
    rec.add(int(i), "loss", loss);
    if (i % 2 == 1) {
      zoo::record_step(rec, int(i), loss, net, optimizer, {tokens}, 2);
      optimizer.zero_grad();
    }
  }
}
