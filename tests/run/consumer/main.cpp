// A program of one's own: its training loop stands between the making of a Session and its end.
#include <torch/torch.h>

#include <cstdio>

#include "memfit/engine/session.h"

namespace {

float train() {
  torch::manual_seed(3);
  torch::nn::Sequential model;
  for (int i = 0; i < 8; ++i) {
    model->push_back(torch::nn::Linear(128, 128));
    model->push_back(torch::nn::GELU());
  }
  torch::Tensor loss = model->forward(torch::randn({2048, 128})).square().mean();
  loss.backward();
  return model->parameters().front().grad().sum().item<float>();
}

}  // namespace

int main() {
  using namespace memfit::literals;
  const float plain = train();
  float held = 0;
  memfit::engine::SessionStats stats;
  {
    memfit::engine::Session session({.tensor_memory = 12_MiB});
    held = train();
    stats = session.stats();
  }
  std::printf("same %d, peak %llu, evictions %llu\n", plain == held, static_cast<unsigned long long>(stats.peak.count()),
              static_cast<unsigned long long>(stats.evictions));
  return plain == held && stats.evictions > 0 && stats.peak <= 12_MiB ? 0 : 1;
}
