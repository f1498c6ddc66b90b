// TorchScript modules, traced and scripted by make_modules.py, trained and run from C++.
#include <torch/script.h>
#include <torch/torch.h>

#include "tests/zoo/cpp/zoo.h"

namespace F = torch::nn::functional;
using torch::Tensor;

namespace {

void train(zoo::Recorder& rec, const std::string& file, const std::function<Tensor()>& input, bool images) {
  torch::jit::Module net = torch::jit::load(rec.modules() + "/" + file);
  net.train();
  std::vector<Tensor> parameters;
  for (const Tensor& parameter : net.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.05).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    Tensor x = input();
    Tensor labels = torch::randint(10, {x.size(0)}, torch::kLong);
    Tensor loss = F::cross_entropy(net.forward({x}).toTensor(), labels);
    optimizer.zero_grad();
    loss.backward();
    rec.add(step, "loss", loss);
    rec.parameters(step, parameters);
    std::vector<Tensor> fixed = parameters;
    fixed.push_back(x);
    for (const auto& buffer : net.named_buffers()) {
      rec.add(step, buffer.name, buffer.value);
      fixed.push_back(buffer.value);
    }
    rec.fixed_bytes(fixed, 1);
    optimizer.step();
    rec.default_generator(step);
    if (images && step == 2) {
      net.eval();
      torch::NoGradGuard no_grad;
      rec.add(step, "evaluated", net.forward({x}).toTensor());
      net.train();
    }
  }
}

}  // namespace

ZOO(script_residual) {
  rec.seed(80);
  train(rec, "residual.pt", [] { return torch::randn({12, 3, 32, 32}); }, true);
}

ZOO(script_control_flow) {
  rec.seed(81);
  train(rec, "control_flow.pt", [] { return torch::randn({1024, 64}); }, false);
}

ZOO(script_traced) {
  rec.seed(82);
  train(rec, "traced.pt", [] { return torch::randn({768, 64}); }, false);
}
