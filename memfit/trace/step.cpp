#include "memfit/trace/step.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

namespace memfit::trace {

std::string_view category_name(Category category) {
  switch (category) {
    case Category::Other: return "other";
    case Category::Parameter: return "parameter";
    case Category::Gradient: return "gradient";
    case Category::OptimizerState: return "optimizer state";
    case Category::Buffer: return "buffer";
    case Category::Input: return "input";
    case Category::Activation: return "activation";
    case Category::Temporary: return "temporary";
  }
  return "?";
}

std::string_view replay_name(Replay replay) {
  switch (replay) {
    case Replay::Yes: return "replayable";
    case Replay::SideEffect: return "side effect";
    case Replay::RandomWithoutGenerator: return "random without generator";
    case Replay::Nondeterministic: return "nondeterministic";
    case Replay::CustomOp: return "custom op";
    case Replay::ReadsForeignMemory: return "reads foreign memory";
    case Replay::WritesSource: return "writes a source";
    case Replay::Communication: return "communication";
  }
  return "?";
}

NameId StepBuilder::intern(std::string_view name) {
  auto [at, fresh] = names_.try_emplace(std::string(name), static_cast<NameId>(step_.names.size()));
  if (fresh) step_.names.emplace_back(name);
  return at->second;
}

std::uint32_t StepBuilder::intern_shape(std::span<const std::int64_t> sizes) {
  std::string key(sizes.size_bytes(), '\0');
  if (!sizes.empty()) std::memcpy(key.data(), sizes.data(), sizes.size_bytes());
  auto [at, fresh] = shapes_.try_emplace(std::move(key), static_cast<std::uint32_t>(step_.shapes.size()));
  if (fresh) step_.shapes.emplace_back(sizes.begin(), sizes.end());
  return at->second;
}

ValueId StepBuilder::add_source(Value value) {
  value.producer = kNone;
  value.overwrites = kNone;
  step_.values.push_back(value);
  return static_cast<ValueId>(step_.values.size() - 1);
}

OpId StepBuilder::add_op(Op op, std::span<const ValueId> inputs, std::span<const Value> outputs, ValueId* first_output) {
  const OpId id = next_op();
  op.inputs.begin = static_cast<std::uint32_t>(step_.operands.size());
  for (ValueId v : inputs) {
    auto begin = step_.operands.begin() + op.inputs.begin;
    if (std::find(begin, step_.operands.end(), v) == step_.operands.end()) step_.operands.push_back(v);
  }
  op.inputs.count = static_cast<std::uint32_t>(step_.operands.size()) - op.inputs.begin;
  op.outputs.begin = static_cast<std::uint32_t>(step_.operands.size());
  op.outputs.count = static_cast<std::uint32_t>(outputs.size());
  if (first_output) *first_output = static_cast<ValueId>(step_.values.size());
  for (Value value : outputs) {
    value.producer = id;
    if (value.overwrites != kNone) step_.values[value.overwrites].death = id;
    step_.operands.push_back(static_cast<ValueId>(step_.values.size()));
    step_.values.push_back(value);
  }
  step_.ops.push_back(op);
  return id;
}

void StepBuilder::drop(ValueId value) {
  if (step_.ops.empty()) return;
  Value& v = step_.values[value];
  if (v.death == kNone) v.death = next_op() - 1;
}

namespace {

std::optional<std::string> value_fault(const Step& step, ValueId id) {
  const Value& v = step.values[id];
  const auto n = static_cast<OpId>(step.ops.size());
  if (v.producer != kNone && v.producer >= n) return fmt::format("value {} is made by op {} of {}", id, v.producer, n);
  if (v.death != kNone && v.death >= n) return fmt::format("value {} dies at op {} of {}", id, v.death, n);
  if (v.producer != kNone && v.death != kNone && v.death < v.producer) return fmt::format("value {} dies before it is made", id);
  if (v.shape != kNone && v.shape >= step.shapes.size()) return fmt::format("value {} has an unknown shape", id);
  if (static_cast<std::uint8_t>(v.category) >= kCategoryCount) return fmt::format("value {} has an unknown category", id);
  if (v.bytes.count() > (1ull << 50)) return fmt::format("value {} is larger than a pebibyte", id);
  if (v.packable && v.packed_bytes >= v.bytes) return fmt::format("value {} grows by packing", id);
  if (!(v.pack_seconds >= 0) || !(v.unpack_seconds >= 0)) return fmt::format("value {} packs in negative time", id);
  if (v.overwrites == kNone) return std::nullopt;
  if (v.producer == kNone) return fmt::format("source {} overwrites a value", id);
  if (v.overwrites >= step.values.size()) return fmt::format("value {} overwrites an unknown value", id);
  const Value& old = step.values[v.overwrites];
  if (old.storage != v.storage) return fmt::format("value {} overwrites a value of another storage", id);
  if (old.bytes != v.bytes) return fmt::format("value {} overwrites a value of another size", id);
  if (old.death != v.producer) return fmt::format("value {} overwrites value {}, which lives on", id, v.overwrites);
  return std::nullopt;
}

bool finite(double seconds) { return seconds >= 0 && seconds < 1e9; }

/// `seen` counts, for each value, how often it was listed as an output.
std::optional<std::string> op_fault(const Step& step, OpId id, std::vector<std::uint8_t>& seen) {
  const Op& op = step.ops[id];
  const std::size_t pool = step.operands.size();
  for (OperandRange range : {op.inputs, op.outputs})
    if (range.begin > pool || range.count > pool - range.begin) return fmt::format("op {} has operands outside the pool", id);
  if (op.name != kNone && op.name >= step.names.size()) return fmt::format("op {} has an unknown name", id);
  if (op.source_line != kNone && op.source_line >= step.names.size()) return fmt::format("op {} has an unknown source line", id);
  if (static_cast<std::uint8_t>(op.replay) >= kReplayCount) return fmt::format("op {} has an unknown replay reason", id);
  if (!finite(op.seconds.count())) return fmt::format("op {} took impossible time", id);
  if (op.workspace.count() > (1ull << 50)) return fmt::format("op {} has a workspace larger than a pebibyte", id);
  for (ValueId v : step.inputs(op)) {
    if (v >= step.values.size()) return fmt::format("op {} reads an unknown value", id);
    const Value& value = step.values[v];
    if (value.producer != kNone && value.producer >= id) return fmt::format("op {} reads value {} before it is made", id, v);
    if (value.death != kNone && value.death < id) return fmt::format("op {} reads value {} after its death", id, v);
  }
  for (ValueId v : step.outputs(op)) {
    if (v >= step.values.size() || step.values[v].producer != id || seen[v]++) return fmt::format("op {} makes a value that is not its own", id);
    const ValueId old = step.values[v].overwrites;
    if (old == kNone) continue;
    const auto in = step.inputs(op);
    if (std::find(in.begin(), in.end(), old) == in.end()) return fmt::format("op {} overwrites value {} without reading it", id, old);
  }
  return std::nullopt;
}

}  // namespace

std::optional<std::string> find_fault(const Step& step) {
  if (step.ops.size() >= kNone || step.values.size() >= kNone) return "too many ops or values";
  if (step.fixed_bytes.count() > (1ull << 60)) return "fixed bytes are impossible";
  if (!finite(step.seconds.count())) return "the step took impossible time";
  std::vector<std::uint8_t> overwritten(step.values.size(), 0), seen(step.values.size(), 0);
  for (ValueId v = 0; v < step.values.size(); ++v) {
    if (auto fault = value_fault(step, v)) return fault;
    const ValueId old = step.values[v].overwrites;
    if (old != kNone && overwritten[old]++) return fmt::format("value {} is overwritten twice", old);
  }
  for (OpId op = 0; op < step.ops.size(); ++op)
    if (auto fault = op_fault(step, op, seen)) return fault;
  for (ValueId v = 0; v < step.values.size(); ++v)
    if (step.values[v].producer != kNone && !seen[v]) return fmt::format("value {} is missing among the outputs of its op", v);
  return std::nullopt;
}

std::vector<Bytes> live_bytes(const Step& step) {
  std::vector<Bytes> live;
  live.reserve(step.ops.size());
  std::vector<std::uint64_t> dying(step.ops.size(), 0);
  std::vector<bool> overwritten(step.values.size(), false);
  Bytes now = step.fixed_bytes;
  for (const Value& v : step.values) {
    if (v.producer == kNone) now += v.bytes;
    if (v.overwrites != kNone) overwritten[v.overwrites] = true;
  }
  for (ValueId id = 0; id < step.values.size(); ++id) {
    const Value& v = step.values[id];
    if (v.death != kNone && !overwritten[id]) dying[v.death] += v.bytes.count();
  }
  for (OpId i = 0; i < step.ops.size(); ++i) {
    for (ValueId out : step.outputs(step.ops[i]))
      if (step.values[out].overwrites == kNone) now += step.values[out].bytes;
    live.push_back(now + step.ops[i].workspace);
    now -= Bytes(dying[i]);
  }
  return live;
}

Bytes peak_bytes(const Step& step) {
  Bytes peak = step.fixed_bytes;
  for (const Value& v : step.values)
    if (v.producer == kNone) peak += v.bytes;
  for (Bytes b : live_bytes(step)) peak = std::max(peak, b);
  return peak;
}

}  // namespace memfit::trace
