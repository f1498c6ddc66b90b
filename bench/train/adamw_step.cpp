// One process of adamw.py: AdamW steps on the parameters of a GPT of 25.7 million, one for each line of standard input.
#include <torch/torch.h>

#include <chrono>
#include <iostream>
#include <string>

#include "memfit/engine/session.h"
#include "memfit/memory/cpu_allocator.h"
#include "memfit/optim/adam.h"

int main(int argc, char** argv) {
  const bool counted = argc > 1 && std::string(argv[1]) == "--count";  // bytes, without looking at the time
  std::optional<memfit::engine::Session> session;
  if (counted) session.emplace(memfit::engine::SessionOptions{});
  at::set_num_threads(2);
  at::manual_seed(0);
  std::vector<memfit::optim::NamedTensor> parameters;
  const auto add = [&](std::vector<std::int64_t> shape) {
    at::Tensor p = at::randn(shape).mul_(0.02).set_requires_grad(true);
    p.mutable_grad() = at::randn(shape).mul_(0.001);
    parameters.push_back({std::to_string(parameters.size()), p});
  };
  add({512, 512}), add({256, 512});
  for (int block = 0; block < 8; ++block) {
    add({512}), add({512}), add({1536, 512}), add({1536}), add({512, 512}), add({512});
    add({512}), add({512}), add({2048, 512}), add({2048}), add({512, 2048}), add({512});
  }
  std::int64_t count = 0;
  for (const auto& p : parameters) count += p.tensor.numel();
  memfit::optim::AdamW optimizer({{"all", parameters}}, {});
  auto& allocator = memfit::memory::CpuAllocator::instance();
  std::cout << count << " " << parameters.size() << std::endl;
  for (std::string line; std::getline(std::cin, line);) {
    const std::uint64_t live = counted ? allocator.ledger().live : 0;
    if (counted) allocator.reset_peaks();
    const auto start = std::chrono::steady_clock::now();
    optimizer.step();
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::cout << seconds << " " << (counted ? allocator.ledger().peak_live - live : 0) << std::endl;
  }
}
