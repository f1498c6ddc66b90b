// The C++ half of the exactness zoo: `zoo_cpp NAME --digest FILE [--modules FOLDER]`, `zoo_cpp --list`.
#include <c10/util/hash.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "tests/zoo/cpp/zoo.h"

namespace zoo {

std::map<std::string, Program>& programs() {
  static std::map<std::string, Program> all;
  return all;
}

namespace {

std::string digest_of_dense(const torch::Tensor& tensor) {
  torch::Tensor copy = tensor.detach().clone(at::MemoryFormat::Contiguous).resolve_conj();
  std::ostringstream head;
  head << copy.dtype() << ' ' << copy.sizes();
  std::string bytes = head.str();
  bytes.append(static_cast<const char*>(copy.const_data_ptr()), copy.nbytes());
  return c10::sha1(bytes).str();
}

std::string digest_of(const torch::Tensor& tensor) {
  if (!tensor.defined()) return "undefined";
  if (tensor.is_sparse()) {
    torch::Tensor whole = tensor.detach().coalesce();
    return digest_of_dense(whole.indices()) + digest_of_dense(whole.values());
  }
  return digest_of_dense(tensor);
}

std::uint64_t resident_high_water() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoull(line.substr(6)) * 1024;
  }
  return 0;
}

}  // namespace

void Recorder::seed(std::uint64_t seed) {
  torch::sin(torch::zeros({8}));
  torch::manual_seed(seed);
}

void Recorder::add(int step, const std::string& name, const torch::Tensor& tensor) {
  entries_.emplace_back(step, name, digest_of(tensor));
}

void Recorder::add(int step, const std::string& name, double number) {
  add(step, name, torch::tensor(number, torch::kFloat64));
}

void Recorder::module(int step, const torch::nn::Module& module, const std::string& name) {
  for (const auto& item : module.named_parameters()) {
    add(step, name + "." + item.key(), item.value());
    add(step, name + "." + item.key() + ".grad", item.value().grad());
  }
  for (const auto& item : module.named_buffers()) add(step, name + "." + item.key(), item.value());
}

void Recorder::parameters(int step, const std::vector<torch::Tensor>& parameters, const std::string& name) {
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    add(step, name + "." + std::to_string(i), parameters[i]);
    add(step, name + "." + std::to_string(i) + ".grad", parameters[i].grad());
  }
}

void Recorder::optimizer(int step, const torch::optim::Optimizer& optimizer, const std::string& name) {
  std::ostringstream saved;
  torch::serialize::OutputArchive archive;
  optimizer.save(archive);
  archive.save_to(saved);
  // The archive is a zip file whose headers carry no time; its tensors are stored as they are.
  torch::serialize::InputArchive read;
  std::istringstream again(saved.str());
  read.load_from(again);
  std::vector<std::pair<std::string, torch::Tensor>> found;
  std::vector<std::pair<std::string, torch::serialize::InputArchive>> queue;
  queue.emplace_back("", std::move(read));
  while (!queue.empty()) {
    auto [prefix, here] = std::move(queue.back());
    queue.pop_back();
    for (const auto& key : here.keys()) {
      torch::serialize::InputArchive inner;
      torch::Tensor tensor;
      if (here.try_read(key, inner)) {
        queue.emplace_back(prefix + "." + key, std::move(inner));
      } else if (here.try_read(key, tensor)) {
        found.emplace_back(prefix + "." + key, tensor);
      }
    }
  }
  // State is keyed by the parameter's address: its order is not the program's. Sort the digests instead.
  std::multiset<std::string> digests;
  for (const auto& [key, tensor] : found) digests.insert(digest_of(tensor));
  std::string all;
  for (const auto& digest : digests) all += digest;
  entries_.emplace_back(step, name, c10::sha1(all).str());
}

void Recorder::generator(int step, const at::Generator& generator, const std::string& name) {
  add(step, "generator." + name, generator.get_state());
}

void Recorder::default_generator(int step) { generator(step, at::detail::getDefaultCPUGenerator(), "default"); }

void Recorder::fixed_bytes(const std::vector<torch::Tensor>& tensors, int state_copies) {
  std::map<const void*, std::uint64_t> seen;
  std::uint64_t state = 0;
  for (const auto& tensor : tensors) {
    if (!tensor.defined() || !tensor.has_storage()) continue;
    seen[tensor.storage().unsafeGetStorageImpl()] = tensor.storage().nbytes();
    if (tensor.is_leaf() && tensor.requires_grad()) {
      state += state_copies * tensor.nbytes();
      const torch::Tensor& grad = tensor.grad();
      if (grad.defined() && grad.has_storage()) seen[grad.storage().unsafeGetStorageImpl()] = grad.storage().nbytes();
    }
  }
  for (const auto& [storage, bytes] : seen) state += bytes;
  most_fixed_ = std::max(most_fixed_, state);
}

void Recorder::merge(const std::string& name, const Recorder& other) {
  for (const auto& [step, key, digest] : other.entries_) entries_.emplace_back(step, name + "." + key, digest);
  most_fixed_ += other.most_fixed_;
}

void Recorder::write(const std::string& path) const {
  nlohmann::json result = {{"hwm_bytes", resident_high_water()}, {"torch_version", TORCH_VERSION}, {"fixed_bytes", most_fixed_},
                           {"out_of_memory_caught", out_of_memory_}, {"entries", entries_}};
  const std::string part = path + ".part";
  {
    std::ofstream file(part);
    file << result;
    if (!file.flush()) throw std::runtime_error("zoo_cpp: cannot write " + part);
  }
  if (std::rename(part.c_str(), path.c_str()) != 0) throw std::runtime_error("zoo_cpp: cannot rename to " + path);
}

}  // namespace zoo

int main(int argc, char** argv) {
  std::string name, digest, modules;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--list") {
      for (const auto& [known, program] : zoo::programs()) std::puts(known.c_str());
      return 0;
    }
    if (word == "--digest" && i + 1 < argc) {
      digest = argv[++i];
    } else if (word == "--modules" && i + 1 < argc) {
      modules = argv[++i];
    } else {
      name = word;
    }
  }
  const auto found = zoo::programs().find(name);
  if (found == zoo::programs().end() || digest.empty()) {
    std::fputs("usage: zoo_cpp NAME --digest FILE [--modules FOLDER], or zoo_cpp --list\n", stderr);
    return 2;
  }
  zoo::Recorder rec(modules);
  found->second(rec);
  rec.write(digest);
  return 0;
}
