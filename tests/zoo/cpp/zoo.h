// What every C++ zoo program shares: a recorder of digests, the table of programs, and words for the usual steps.
// Not here: anything of memfit. These programs link LibTorch alone and run under `memfit run` as anybody's would.
// Threads: a Recorder belongs to one thread; merge() brings several together. Cost: one copy of each tensor recorded.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

namespace zoo {

class Recorder {
 public:
  explicit Recorder(std::string modules = "") : modules_(std::move(modules)) {}

  /// Seed everything, and let MKL's vector math set itself up in one thread (see tests/zoo/README.md).
  void seed(std::uint64_t seed);
  void add(int step, const std::string& name, const torch::Tensor& tensor);
  void add(int step, const std::string& name, double number);
  /// Parameters, their gradients, and buffers.
  void module(int step, const torch::nn::Module& module, const std::string& name = "model");
  void parameters(int step, const std::vector<torch::Tensor>& parameters, const std::string& name = "model");
  /// The optimizer's state, as it would be saved.
  void optimizer(int step, const torch::optim::Optimizer& optimizer, const std::string& name = "optimizer");
  void generator(int step, const at::Generator& generator, const std::string& name = "own");
  void default_generator(int step);
  /// Bytes a step cannot do without: parameters, gradients, inputs. `state_copies`: optimizer state as copies of the parameters.
  void fixed_bytes(const std::vector<torch::Tensor>& tensors, int state_copies = 0);
  void merge(const std::string& name, const Recorder& other);
  void caught_out_of_memory() { ++out_of_memory_; }
  /// Folder of the TorchScript modules that make_modules.py wrote.
  const std::string& modules() const { return modules_; }
  void write(const std::string& path) const;

 private:
  std::string modules_;
  std::vector<std::tuple<int, std::string, std::string>> entries_;
  std::uint64_t most_fixed_ = 0;
  int out_of_memory_ = 0;
};

using Program = void (*)(Recorder&);
std::map<std::string, Program>& programs();

struct Registration {
  Registration(const char* name, Program program) { programs()[name] = program; }
};

/// Seconds are spent in the step; this is the part that all of them have in common.
template <typename Net>
void record_step(Recorder& rec, int step, const torch::Tensor& loss, Net& net, torch::optim::Optimizer& optimizer,
                 std::vector<torch::Tensor> inputs, int state_copies = 0) {
  rec.add(step, "loss", loss);
  rec.module(step, *net);
  for (const auto& parameter : net->parameters()) inputs.push_back(parameter);
  for (const auto& buffer : net->buffers()) inputs.push_back(buffer);
  rec.fixed_bytes(inputs, state_copies);
  optimizer.step();
  rec.optimizer(step, optimizer);
  rec.default_generator(step);
}

}  // namespace zoo

#define ZOO(name)                                               \
  static void zoo_##name(zoo::Recorder&);                       \
  static zoo::Registration registered_##name(#name, zoo_##name); \
  static void zoo_##name(zoo::Recorder& rec)
