// State of optimizers by name: given out, checked whole, taken over.
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <nlohmann/json.hpp>
#include <set>

#include "memfit/core/error.h"
#include "memfit/optim/detail/entry.h"
#include "memfit/optim/optimizer.h"

namespace memfit::optim {
namespace {

using nlohmann::json;

constexpr const char* kScales = ".scales";

const char* name_of(StatePrecision precision) {
  switch (precision) {
    case StatePrecision::Full: return "full";
    case StatePrecision::BFloat16Stochastic: return "bfloat16-stochastic";
    case StatePrecision::Int8Blockwise: return "int8-blockwise";
  }
  return "";
}

std::string text_of(const at::Tensor& tensor) {
  return fmt::format("{}[{}]", c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "));
}

}  // namespace

std::vector<NamedTensor> Optimizer::state_tensors() const {
  std::vector<NamedTensor> out;
  for (const Group& group : groups_) {
    for (const Entry& e : group.entries) {
      for (std::size_t s = 0; s < e.state.size(); ++s) {
        const std::string name = e.name + "/" + algorithm_.slots[s];
        if (e.state[s].values.defined()) out.push_back({name, e.state[s].values});
        if (e.state[s].scales.defined()) out.push_back({name + kScales, e.state[s].scales});
      }
    }
  }
  return out;
}

json Optimizer::state() const {
  json groups = json::array();
  json steps = json::object();
  for (const Group& group : groups_) {
    json names = json::array();
    for (const Entry& e : group.entries) {
      names.push_back(e.name);
      if (e.steps > 0) steps[e.name] = e.steps;
    }
    groups.push_back({{"name", group.name}, {"learning_rate", group.learning_rate}, {"weight_decay", group.weight_decay}, {"parameters", names}});
  }
  json out = {{"kind", kind_}, {"precision", name_of(options_.state)}, {"groups", groups}, {"steps", steps}};
  if (options_.state == StatePrecision::BFloat16Stochastic) {
    const at::Tensor bytes = generator_.get_state();
    out["generator"] = std::vector<std::uint8_t>(bytes.const_data_ptr<std::uint8_t>(), bytes.const_data_ptr<std::uint8_t>() + bytes.numel());
  }
  return out;
}

struct Optimizer::Loaded {
  std::vector<Stored> state;
  std::int64_t steps = 0;
};

void Optimizer::load_state(const json& state, const std::function<at::Tensor(const std::string&)>& tensor_of) {
  at::NoGradGuard no_grad;
  if (state.at("kind") != kind_ || state.at("precision") != name_of(options_.state)) {
    throw UsageError(fmt::format("{} ({} state): the saved optimizer is {} ({} state).", kind_, name_of(options_.state),
                                 state.at("kind").get<std::string>(), state.at("precision").get<std::string>()));
  }
  std::set<std::string> saved, mine;
  for (const json& group : state.at("groups")) {
    for (const json& name : group.at("parameters")) saved.insert(group.at("name").get<std::string>() + ": " + name.get<std::string>());
  }
  for (const Group& group : groups_) {
    for (const Entry& e : group.entries) mine.insert(group.name + ": " + e.name);
  }
  std::vector<std::string> missing, extra;
  std::set_difference(mine.begin(), mine.end(), saved.begin(), saved.end(), std::back_inserter(missing));
  std::set_difference(saved.begin(), saved.end(), mine.begin(), mine.end(), std::back_inserter(extra));
  if (!missing.empty() || !extra.empty()) {
    throw UsageError(fmt::format("{}: the saved optimizer has other parameters. Not saved: {}. Saved, but not here: {}.", kind_,
                                 missing.empty() ? "none" : fmt::format("{}", fmt::join(missing, ", ")),
                                 extra.empty() ? "none" : fmt::format("{}", fmt::join(extra, ", "))));
  }
  // All of it is made and checked before any of it is taken over.
  std::vector<std::vector<Loaded>> loaded(groups_.size());
  auto take = [&](const std::string& name, const at::Tensor& like) {
    const at::Tensor found = tensor_of(name);
    if (!found.defined()) throw UsageError(fmt::format("{}: the saved optimizer lacks \"{}\".", kind_, name));
    if (found.sizes() != like.sizes() || found.scalar_type() != like.scalar_type()) {
      throw UsageError(fmt::format("{}: \"{}\" is {} here and {} in the saved optimizer.", kind_, name, text_of(like), text_of(found)));
    }
    return at::empty_like(like).copy_(found);
  };
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const Entry& e : groups_[g].entries) {
      Loaded one;
      one.steps = state.at("steps").value(e.name, std::int64_t{0});
      if (one.steps > 0) {
        Entry blank{e.name, e.parameter, 0, {}, false, 0};
        make_state(blank);
        for (std::size_t s = 0; s < blank.state.size(); ++s) {
          const std::string name = e.name + "/" + algorithm_.slots[s];
          Stored& stored = blank.state[s];
          if (stored.values.defined()) stored.values = take(name, stored.values);
          if (stored.scales.defined()) stored.scales = take(name + kScales, stored.scales);
        }
        one.state = std::move(blank.state);
      }
      loaded[g].push_back(std::move(one));
    }
  }
  if (options_.state == StatePrecision::BFloat16Stochastic) {
    const auto bytes = state.at("generator").get<std::vector<std::uint8_t>>();
    at::Tensor tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
    std::copy(bytes.begin(), bytes.end(), tensor.mutable_data_ptr<std::uint8_t>());
    generator_.set_state(tensor);
  }
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const json& saved_group : state.at("groups")) {
      if (saved_group.at("name") != groups_[g].name) continue;
      groups_[g].learning_rate = saved_group.at("learning_rate");
      groups_[g].weight_decay = saved_group.at("weight_decay");
    }
    for (std::size_t i = 0; i < loaded[g].size(); ++i) {
      Entry& e = groups_[g].entries[i];
      e.state = std::move(loaded[g][i].state);
      e.steps = loaded[g][i].steps;
      e.done = false;
      e.done_elements = 0;
    }
  }
  unfinished_ = false;
}

}  // namespace memfit::optim
