// An ordinary LibTorch trainer that knows nothing of memfit. Prints its losses and a checksum of its weights.
// `trainer uncaught` allocates until something gives, and catches nothing.
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

namespace {

std::uint64_t checksum(const torch::nn::Module& model) {
  std::uint64_t sum = 1469598103934665603ULL;
  for (const torch::Tensor& parameter : model.parameters()) {
    const torch::Tensor flat = parameter.detach().contiguous();
    const auto* bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (std::size_t i = 0; i < flat.nbytes(); ++i) sum = (sum ^ bytes[i]) * 1099511628211ULL;
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1 && std::string(argv[1]) == "uncaught") {
    std::vector<torch::Tensor> kept;
    for (;;) kept.push_back(torch::from_blob(new float[1 << 20], {1 << 20}).clone());
  }
  torch::manual_seed(3);
  torch::nn::Sequential model;
  for (int i = 0; i < 10; ++i) {
    model->push_back(torch::nn::Linear(256, 256));
    model->push_back(torch::nn::GELU());
    model->push_back(torch::nn::Dropout(0.1));
  }
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  const torch::Tensor x = torch::randn({2048, 256});
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    torch::Tensor loss = model->forward(x).square().mean();
    loss.backward();
    optimizer.step();
    std::printf("step %d loss %a\n", step, loss.item<float>());
  }
  std::printf("weights %016llx\n", static_cast<unsigned long long>(checksum(*model)));
  return 0;
}
