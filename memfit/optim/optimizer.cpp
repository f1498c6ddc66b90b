#include "memfit/optim/optimizer.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "memfit/core/error.h"
#include "memfit/optim/detail/compact_state.h"
#include "memfit/optim/detail/entry.h"

namespace memfit::optim {
namespace {

/// A dense tensor's elements in the order they lie in memory.
at::Tensor flat(const at::Tensor& tensor) { return tensor.as_strided({tensor.numel()}, {1}); }

std::uint64_t bytes_of(const at::Tensor& tensor) { return tensor.defined() ? tensor.nbytes() : 0; }

}  // namespace

struct Optimizer::Hook : torch::autograd::PostAccumulateGradHook {
  Hook(Optimizer& optimizer, Group& group, Entry& entry) : optimizer(optimizer), group(group), entry(entry) {}
  void operator()(const at::Tensor& tensor) override {
    at::NoGradGuard no_grad;
    at::autocast::clear_cache();
    optimizer.step_entries(group, {&entry});
    entry.parameter.mutable_grad().reset();
    entry.done = false;
  }
  Optimizer& optimizer;
  Group& group;
  Entry& entry;
};

std::vector<NamedTensor> named_parameters(const torch::nn::Module& module) {
  std::vector<NamedTensor> out;
  std::set<const void*> seen;
  for (const auto& item : module.named_parameters()) {
    if (seen.insert(item.value().unsafeGetTensorImpl()).second) out.push_back({item.key(), item.value()});
  }
  return out;
}

Optimizer::Optimizer(Algorithm algorithm, std::vector<ParameterGroup> groups, double learning_rate, double weight_decay,
                     const CommonOptions& options)
    : kind_(algorithm.kind), algorithm_(std::move(algorithm)), options_(options),
      generator_(at::detail::createCPUGenerator(options.seed)) {
  if (options_.temporaries.count() == 0) {
    throw UsageError(fmt::format("{}: temporaries is 0 bytes; name what a step may take, for example 16_MiB.", kind_));
  }
  for (ParameterGroup& given : groups) {
    Group group{given.name, given.learning_rate.value_or(learning_rate), given.weight_decay.value_or(weight_decay), {}};
    for (NamedTensor& p : given.parameters) {
      group.entries.push_back({std::move(p.name), std::move(p.tensor), 0, {}, false, 0});
    }
    groups_.push_back(std::move(group));
  }
  check_groups();
}

Optimizer::~Optimizer() {
  if (in_backward_) step_in_backward(false);
}

void Optimizer::check_groups() const {
  std::set<std::string> groups, names;
  std::map<const void*, std::string> tensors;
  for (const Group& group : groups_) {
    if (!groups.insert(group.name).second) {
      throw UsageError(fmt::format("{}: two groups are called \"{}\"; give each a name of its own.", kind_, group.name));
    }
    if (!(group.learning_rate >= 0) || !(group.weight_decay >= 0)) {
      throw UsageError(fmt::format("{}: group \"{}\" has learning rate {} and weight decay {}; neither may be negative.", kind_,
                                   group.name, group.learning_rate, group.weight_decay));
    }
    for (const Entry& e : group.entries) {
      if (!names.insert(e.name).second) {
        throw UsageError(fmt::format("{}: two parameters are called \"{}\"; state is kept by name.", kind_, e.name));
      }
      if (!e.parameter.defined()) throw UsageError(fmt::format("{}: parameter \"{}\" is undefined.", kind_, e.name));
      const auto [place, fresh] = tensors.emplace(e.parameter.unsafeGetTensorImpl(), e.name);
      if (!fresh) {
        throw UsageError(fmt::format("{}: \"{}\" and \"{}\" are one tensor; name a shared parameter once.", kind_,
                                     place->second, e.name));
      }
      if (!e.parameter.is_leaf()) {
        throw UsageError(fmt::format("{}: parameter \"{}\" is the result of an operation; only leaves are trained.", kind_, e.name));
      }
      if (!e.parameter.is_floating_point() || !e.parameter.is_non_overlapping_and_dense()) {
        throw UsageError(fmt::format("{}: parameter \"{}\" is no dense floating-point tensor; pass parameter.contiguous().", kind_, e.name));
      }
      if (options_.state != StatePrecision::Full && e.parameter.scalar_type() != at::kFloat) {
        throw UsageError(fmt::format("{}: parameter \"{}\" is {}; state in low precision is for float32 parameters. Use StatePrecision::Full.",
                                     kind_, e.name, c10::toString(e.parameter.scalar_type())));
      }
    }
  }
  if (names.empty()) throw UsageError(fmt::format("{}: there are no parameters to train.", kind_));
}

at::Tensor Optimizer::make_slot(std::size_t, const at::Tensor& parameter) const { return at::zeros_like(parameter); }

at::Tensor Optimizer::conforming_gradient(const Entry& entry) const {
  const at::Tensor& gradient = entry.parameter.grad();
  if (gradient.layout() != at::kStrided) {
    throw UsageError(fmt::format("{}: the gradient of \"{}\" is sparse; sparse gradients are not supported.", kind_, entry.name));
  }
  // Kernels walk parameter, gradient and state side by side as they lie in memory.
  if (gradient.strides() == entry.parameter.strides() && gradient.scalar_type() == entry.parameter.scalar_type()) return gradient;
  return at::empty_like(entry.parameter).copy_(gradient);
}

void Optimizer::make_state(Entry& entry) {
  if (!entry.state.empty() || algorithm_.slots.empty()) return;
  std::vector<Stored> made(algorithm_.slots.size());
  const std::int64_t n = entry.parameter.numel();
  for (std::size_t s = 0; s < made.size(); ++s) {
    const at::TensorOptions options = at::device(entry.parameter.device());
    switch (options_.state) {
      case StatePrecision::Full: made[s].values = make_slot(s, entry.parameter); break;
      case StatePrecision::BFloat16Stochastic: made[s].values = at::zeros({n}, options.dtype(at::kBFloat16)); break;
      case StatePrecision::Int8Blockwise:
        made[s].values = at::zeros({n}, options.dtype(never_negative(s) ? at::kByte : at::kChar));
        made[s].scales = at::zeros({(n + detail::kBlock - 1) / detail::kBlock}, options.dtype(at::kFloat));
        break;
    }
  }
  entry.state = std::move(made);
}

void Optimizer::make_state() {
  at::NoGradGuard no_grad;
  for (Group& group : groups_) {
    for (Entry& e : group.entries) {
      if (e.parameter.requires_grad()) make_state(e);
    }
  }
}

void Optimizer::step() {
  if (in_backward_) {
    throw UsageError(fmt::format("{}: step() with step_in_backward(true): backward has made the step already. Leave step() out.", kind_));
  }
  at::NoGradGuard no_grad;
  at::autocast::clear_cache();
  unfinished_ = true;
  for (Group& group : groups_) {
    std::vector<Entry*> entries;
    for (Entry& e : group.entries) {
      if (!e.done && e.parameter.grad().defined()) entries.push_back(&e);
    }
    step_entries(group, entries);
  }
  for (Group& group : groups_) {
    for (Entry& e : group.entries) e.done = false;
  }
  unfinished_ = false;
}

void Optimizer::step_entries(Group& group, const std::vector<Entry*>& entries) {
  using Key = std::tuple<c10::DeviceType, int, at::ScalarType, std::int64_t>;
  std::map<Key, std::vector<Entry*>> alike;
  std::vector<Key> order;
  for (Entry* e : entries) {
    make_state(*e);
    const Key key{e->parameter.device().type(), e->parameter.device().index(), e->parameter.scalar_type(), e->steps};
    auto& list = alike[key];
    if (list.empty()) order.push_back(key);
    list.push_back(e);
  }
  for (const Key& key : order) step_together(group, alike[key]);
}

/// Splits what is alike into kernel calls whose temporaries keep to the bound.
void Optimizer::step_together(Group& group, const std::vector<Entry*>& entries) {
  const std::uint64_t bound = options_.temporaries.count();
  std::vector<Entry*> list;
  std::uint64_t bytes = 0;
  auto flush = [&] {
    if (!list.empty()) step_full(group, list);
    list.clear();
    bytes = 0;
  };
  for (Entry* e : entries) {
    std::uint64_t need = 0;
    const bool copied = e->parameter.grad().strides() != e->parameter.strides();
    if (copied) need += e->parameter.nbytes();
    if (!algorithm_.one_kernel) need += 3 * e->parameter.nbytes();  // its own copy, a state's, the algorithm's temporary
    if (options_.state != StatePrecision::Full || (need > bound && algorithm_.elementwise && !copied)) {
      step_in_pieces(group, *e);
      continue;
    }
    if (bytes + need > bound) flush();
    list.push_back(e);
    bytes += need;
  }
  flush();
}

void Optimizer::step_full(Group& group, const std::vector<Entry*>& entries) {
  Chunk chunk;
  chunk.slots.resize(algorithm_.slots.size());
  chunk.step = entries.front()->steps + 1;
  chunk.learning_rate = group.learning_rate * factor_;
  chunk.weight_decay = group.weight_decay;
  for (const Entry* e : entries) {
    chunk.parameters.push_back(e->parameter);
    chunk.gradients.push_back(conforming_gradient(*e));
    for (std::size_t s = 0; s < chunk.slots.size(); ++s) chunk.slots[s].push_back(e->state[s].values);
  }
  if (algorithm_.one_kernel) update(chunk);
  else guarded_update(chunk);
  for (Entry* e : entries) {
    ++e->steps;
    e->done = true;
  }
}

/// An update of several kernels: what it had changed before a failure is put back.
void Optimizer::guarded_update(Chunk& chunk) {
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const at::Tensor& p : chunk.parameters) copies.emplace_back(p, p.clone());
  for (const auto& slot : chunk.slots) {
    for (const at::Tensor& s : slot) {
      if (s.defined()) copies.emplace_back(s, s.clone());
    }
  }
  try {
    update(chunk);
  } catch (...) {
    for (auto& [tensor, copy] : copies) tensor.copy_(copy);
    throw;
  }
}

at::Tensor Optimizer::decode(const Stored& stored, std::size_t slot, std::int64_t begin, std::int64_t length) const {
  switch (options_.state) {
    case StatePrecision::Full: return flat(stored.values).narrow(0, begin, length);
    case StatePrecision::BFloat16Stochastic: return stored.values.narrow(0, begin, length).to(at::kFloat);
    case StatePrecision::Int8Blockwise: break;
  }
  const std::int64_t blocks = (length + detail::kBlock - 1) / detail::kBlock;
  return detail::decode_blocks({stored.values.narrow(0, begin, length), stored.scales.narrow(0, begin / detail::kBlock, blocks)});
}

/// Elementwise algorithms in pieces of a parameter; also the only way where state is kept in low precision.
void Optimizer::step_in_pieces(Group& group, Entry& entry) {
  const std::size_t slots = algorithm_.slots.size();
  const std::int64_t n = entry.parameter.numel();
  // Copy of the piece, states, their codes on the way, the algorithm's temporary: floats an element.
  const std::int64_t floats = static_cast<std::int64_t>(options_.state == StatePrecision::Full ? slots + 2 : 2 * slots + 6);
  const std::int64_t element = static_cast<std::int64_t>(entry.parameter.element_size());
  const std::int64_t fits = static_cast<std::int64_t>(options_.temporaries.count()) / (element * floats);
  const std::int64_t length = std::max(detail::kBlock, fits / detail::kBlock * detail::kBlock);
  const at::Tensor parameter = flat(entry.parameter);
  const at::Tensor gradient = flat(conforming_gradient(entry));
  while (entry.done_elements < n) {
    const std::int64_t begin = entry.done_elements;
    const std::int64_t count = std::min(length, n - begin);
    Chunk chunk{{parameter.narrow(0, begin, count)}, {gradient.narrow(0, begin, count)}, {}, entry.steps + 1,
                group.learning_rate * factor_, group.weight_decay};
    for (std::size_t s = 0; s < slots; ++s) chunk.slots.push_back({decode(entry.state[s], s, begin, count)});
    if (options_.state == StatePrecision::Full) {
      guarded_update(chunk);
    } else {
      const at::Tensor before = chunk.parameters[0].clone();
      const at::Tensor generator_before = generator_.get_state();
      try {
        update(chunk);
        std::vector<Stored> coded;
        for (std::size_t s = 0; s < slots; ++s) {
          if (options_.state == StatePrecision::BFloat16Stochastic) {
            coded.push_back({detail::round_stochastically(chunk.slots[s][0], generator_), {}});
          } else {
            const detail::Blocks blocks = detail::encode_blocks(chunk.slots[s][0], never_negative(s));
            coded.push_back({blocks.codes, blocks.scales});
          }
        }
        for (std::size_t s = 0; s < slots; ++s) {  // copies of like types take no memory: from here on nothing fails
          entry.state[s].values.narrow(0, begin, count).copy_(coded[s].values);
          if (coded[s].scales.defined()) {
            entry.state[s].scales.narrow(0, begin / detail::kBlock, coded[s].scales.numel()).copy_(coded[s].scales);
          }
        }
      } catch (...) {
        chunk.parameters[0].copy_(before);
        generator_.set_state(generator_before);
        throw;
      }
    }
    entry.done_elements += count;
  }
  entry.done_elements = 0;
  ++entry.steps;
  entry.done = true;
}

void Optimizer::zero_grad() {
  for (Group& group : groups_) {
    for (Entry& e : group.entries) e.parameter.mutable_grad().reset();
  }
}

bool Optimizer::step_in_backward(bool on) {
  const bool old = in_backward_;
  for (Group& group : groups_) {
    for (Entry& e : group.entries) {
      if (!e.parameter.requires_grad()) continue;
      torch::autograd::impl::set_post_acc_grad_hooks(e.parameter, on ? std::make_unique<Hook>(*this, group, e) : nullptr);
    }
  }
  in_backward_ = on;
  return old;
}

const Optimizer::Group& Optimizer::group_of(const std::string& name) const {
  if (name.empty()) return groups_.front();
  std::string known;
  for (const Group& group : groups_) {
    if (group.name == name) return group;
    known += (known.empty() ? "\"" : ", \"") + group.name + "\"";
  }
  throw UsageError(fmt::format("{}: there is no group \"{}\"; the groups are {}.", kind_, name, known));
}

double Optimizer::learning_rate(const std::string& group) const { return group_of(group).learning_rate; }

double Optimizer::set_learning_rate(double rate, const std::string& group) {
  const Group& named = group_of(group);
  if (!(rate >= 0)) throw UsageError(fmt::format("{}: a learning rate of {} is negative.", kind_, rate));
  const double old = named.learning_rate;
  for (Group& g : groups_) {
    if (group.empty() || &g == &named) g.learning_rate = rate;
  }
  return old;
}

double Optimizer::set_learning_rate_factor(double factor) {
  if (!(factor >= 0)) throw UsageError(fmt::format("{}: a learning rate factor of {} is negative.", kind_, factor));
  return std::exchange(factor_, factor);
}

std::vector<NamedTensor> Optimizer::parameters() const {
  std::vector<NamedTensor> out;
  for (const Group& group : groups_) {
    for (const Entry& e : group.entries) out.push_back({e.name, e.parameter});
  }
  return out;
}

std::vector<at::Tensor> Optimizer::gradients() const {
  std::vector<at::Tensor> out;
  for (const Group& group : groups_) {
    for (const Entry& e : group.entries) {
      if (e.parameter.grad().defined()) out.push_back(e.parameter.grad());
    }
  }
  return out;
}

Bytes Optimizer::state_bytes() const {
  std::uint64_t sum = 0;
  for (const NamedTensor& t : state_tensors()) sum += bytes_of(t.tensor);
  return Bytes(sum);
}

}  // namespace memfit::optim
