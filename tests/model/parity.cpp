// Trains what export.py exported and compares with what Python eager made of it, bit by bit.
//   model_parity FOLDER          every case of FOLDER/cases.json; exit status 1 if one differs
#include <fmt/format.h>
#include <torch/torch.h>

#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"
#include "memfit/data/array_dataset.h"
#include "memfit/model/model.h"

namespace {

using memfit::model::Model;
using Arrays = std::map<std::string, at::Tensor>;

constexpr int kSteps = 20;
constexpr double kRate = 0.05, kMomentum = 0.9;

Arrays read_arrays(const std::string& path) {
  // Copied: kernels may round otherwise where an array lies in the file at another alignment than PyTorch gives its own.
  Arrays arrays;
  for (auto& array : memfit::data::map_arrays(path)) arrays[array.name] = array.tensor.clone();
  return arrays;
}

std::vector<at::Tensor> inputs_of(const Arrays& arrays, int batch, int count) {
  std::vector<at::Tensor> inputs;
  for (int i = 0; i < count; ++i) inputs.push_back(arrays.at(fmt::format("input{}_{}", batch, i)));
  return inputs;
}

/// The twin of train() in export.py.
at::Tensor train(Model& model, const Arrays& arrays, int batches, int inputs) {
  model.train();
  torch::manual_seed(1);
  std::map<std::string, at::Tensor> momenta;
  std::vector<at::Tensor> losses;
  for (int step = 0; step < kSteps; ++step) {
    const int batch = step % batches;
    const at::Tensor loss = (model.forward(inputs_of(arrays, batch, inputs)).at(0) - arrays.at(fmt::format("target{}", batch))).pow(2).mean();
    loss.backward();
    losses.push_back(loss.detach());
    const torch::NoGradGuard no_grad;
    for (const auto& [name, parameter] : model.parameters()) {
      const at::Tensor gradient = parameter.grad();
      if (!gradient.defined()) continue;
      at::Tensor& momentum = momenta[name];
      momentum = momentum.defined() ? momentum * kMomentum + gradient : gradient.clone();
      parameter.add_(momentum, -kRate);
      parameter.mutable_grad().reset();
    }
  }
  return torch::stack(losses);
}

/// Equal, or what differs.
std::string difference(const Arrays& wanted, const std::string& name, const at::Tensor& got) {
  const auto place = wanted.find(name);
  if (place == wanted.end()) return name + " is not in Python's state; ";
  const at::Tensor same = got.detach().contiguous();
  if (same.sizes() == place->second.sizes() && same.dtype() == place->second.dtype() &&
      std::memcmp(same.const_data_ptr(), place->second.const_data_ptr(), same.nbytes()) == 0) {
    return "";
  }
  return fmt::format("{} differs by {:.3g}; ", name, (same.to(at::kDouble) - place->second.to(at::kDouble)).abs().max().item<double>());
}

std::string run_case(const nlohmann::json& one, const std::string& folder) {
  const Arrays arrays = read_arrays(folder + one.at("results").get<std::string>());
  const auto eval = one.at("eval").get<std::string>();
  const auto model = memfit::model::load(folder + one.at("model").get<std::string>(), {.eval_path = eval.empty() ? "" : folder + eval});
  if (const auto reason = model->why_not_trainable()) return *reason;
  const int inputs = one.at("inputs");
  std::string text = difference(arrays, "losses", train(*model, arrays, one.at("batches"), inputs));
  model->eval();
  const torch::NoGradGuard no_grad;
  text += difference(arrays, "scores", model->forward(inputs_of(arrays, 0, inputs)).at(0));
  std::size_t states = 0;
  for (const auto& [name, tensor] : model->state()) {
    // TorchScript does not know which buffers Python leaves out of its state.
    if (model->format() == memfit::model::Format::TorchScript && !arrays.contains("state:" + name)) continue;
    text += difference(arrays, "state:" + name, tensor);
    ++states;
  }
  for (const auto& [name, tensor] : arrays) states -= name.starts_with("state:") ? 1 : 0;
  return states == 0 ? text : text + "some of Python's state is missing; ";
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  torch::set_num_threads(1);
  const std::string folder = std::string(argv[1]) + "/";
  std::ifstream file(folder + "cases.json");
  int bad = 0, count = 0;
  for (const nlohmann::json& one : nlohmann::json::parse(file)) {
    std::string text;
    try {
      text = run_case(one, folder);
    } catch (const std::exception& error) {
      text = error.what();
    }
    ++count;
    if (!text.empty()) ++bad;
    fmt::print("{:22} {}\n", one.at("name").get<std::string>(), text.empty() ? "same bits" : text);
  }
  fmt::print("{} of {} cases have the bits of Python eager\n", count - bad, count);
  return bad == 0 && count > 0 ? 0 : 1;
}
