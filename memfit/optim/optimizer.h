// What all optimizers here share: named parameter groups, state keyed by parameter name, bounded temporaries, steps that an
// allocation failure cannot leave half done, steps inside backward.
// Not here: the algorithms (sgd.h, adam.h, lion.h, adafactor.h), loss scaling (grad_scaler.h), files (train/).
// Threads: one object, one thread; with step_in_backward() the thread that runs backward.
// Cost: that of the kernels; state as each algorithm says. Gradients that lie in memory otherwise than their parameter are copied.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"

namespace torch::nn {
class Module;
}

namespace memfit::optim {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

/// Parameters as the module names them, each once.
std::vector<NamedTensor> named_parameters(const torch::nn::Module& module);

struct ParameterGroup {
  /// Stands in messages and in the state. Unique.
  std::string name = "all";
  std::vector<NamedTensor> parameters;
  /// Default: the optimizer's own.
  std::optional<double> learning_rate{};
  std::optional<double> weight_decay{};
};

/// How state is kept between steps. Full is what PyTorch does. The others CHANGE RESULTS: training takes another path.
enum class StatePrecision {
  Full,
  BFloat16Stochastic,  // 2 bytes an element, rounded up or down at random so that small changes are not lost
  Int8Blockwise,       // 1 byte an element and 4 bytes a block of 256: root-coded shares of the block's largest
};

struct CommonOptions {
  /// Temporaries of one step; 16 MiB by default. Larger spares kernel calls where there is no fused kernel. Adafactor needs
  /// one and a half times its largest parameter whatever this says.
  Bytes temporaries = Bytes(16ULL << 20);
  /// Default Full. The other values change results.
  StatePrecision state = StatePrecision::Full;
  /// Of the random rounding of BFloat16Stochastic. Default 0.
  std::uint64_t seed = 0;
};

class Optimizer {
 public:
  virtual ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// Update, in place, every parameter that has a gradient. Clears autocast's cache of weights, which would be the old ones.
  /// Throws:   UsageError naming a parameter with a sparse gradient, or with step_in_backward(). What allocations throw; the
  ///           parameters updated so far are remembered, and the next step() does only the others, so that a step that is
  ///           called again after an allocation failure ends bitwise as one that did not fail.
  void step();
  /// Whether the last step() threw and waits to be called again.
  bool unfinished() const { return unfinished_; }
  /// Make the state of every parameter now, so that what the first step takes is seen before it.
  void make_state();
  /// Drop all gradients (as set_to_none=True).
  void zero_grad();

  /// Update each parameter inside backward as soon as its gradient is there, and free the gradient at once. Returns the old
  /// value. With this there is no accumulation, no gradient clipping and no gradient scaler: each refuses by name.
  bool step_in_backward(bool on);
  bool steps_in_backward() const { return in_backward_; }

  /// Of one group, or of all with "". Returns the old one (of the first group). Throws: UsageError for an unknown group.
  double set_learning_rate(double rate, const std::string& group = "");
  double learning_rate(const std::string& group = "") const;
  /// Multiplies every group's learning rate: for schedules. Returns the old factor. Default 1.
  double set_learning_rate_factor(double factor);

  /// All parameters, in the order of the groups.
  std::vector<NamedTensor> parameters() const;
  std::vector<at::Tensor> gradients() const;
  /// The algorithm's name: "AdamW".
  const std::string& kind() const { return kind_; }
  /// Bytes of state that live now.
  Bytes state_bytes() const;

  /// State tensors as "PARAMETER/SLOT", of parameters that have stepped. They are the optimizer's own: copy before a step.
  std::vector<NamedTensor> state_tensors() const;
  /// The rest: kind, groups with their rates, steps by parameter name, generator.
  nlohmann::json state() const;
  /// Take over what state() and state_tensors() gave. `tensor_of` returns a state tensor by name.
  /// Throws:   UsageError naming the kind, the groups or the parameters that differ, or a tensor of another shape or type;
  ///           nothing has changed then.
  void load_state(const nlohmann::json& state, const std::function<at::Tensor(const std::string&)>& tensor_of);

 protected:
  /// Parameters of one kernel call, alike in device, type and step; slots[s][i] is state s of parameter i.
  struct Chunk {
    std::vector<at::Tensor> parameters, gradients;
    std::vector<std::vector<at::Tensor>> slots;
    std::int64_t step = 0;  // 1 in the first
    double learning_rate = 0, weight_decay = 0;
  };
  struct Algorithm {
    std::string kind;
    std::vector<std::string> slots;
    bool one_kernel = false;   // update() changes all or, throwing, nothing
    bool elementwise = false;  // parameters may come in pieces
  };

  Optimizer(Algorithm algorithm, std::vector<ParameterGroup> groups, double learning_rate, double weight_decay,
            const CommonOptions& options);

  virtual void update(Chunk& chunk) = 0;
  /// A zero state tensor for `parameter`; undefined where this parameter has no such state. Default: like the parameter.
  virtual at::Tensor make_slot(std::size_t slot, const at::Tensor& parameter) const;
  /// Whether values of the slot are never negative (Int8Blockwise codes them otherwise).
  virtual bool never_negative(std::size_t slot) const { return false; }

 private:
  struct Stored;
  struct Entry;
  struct Group;
  struct Hook;
  struct Loaded;

  void check_groups() const;
  void step_entries(Group& group, const std::vector<Entry*>& entries);
  void step_together(Group& group, const std::vector<Entry*>& entries);
  void step_in_pieces(Group& group, Entry& entry);
  void step_full(Group& group, const std::vector<Entry*>& entries);
  void guarded_update(Chunk& chunk);
  void make_state(Entry& entry);
  at::Tensor decode(const Stored& stored, std::size_t slot, std::int64_t begin, std::int64_t length) const;
  const Group& group_of(const std::string& name) const;
  at::Tensor conforming_gradient(const Entry& entry) const;

  std::string kind_;
  Algorithm algorithm_;
  CommonOptions options_;
  std::vector<Group> groups_;
  at::Generator generator_;
  double factor_ = 1;
  bool in_backward_ = false;
  bool unfinished_ = false;
};

}  // namespace memfit::optim
