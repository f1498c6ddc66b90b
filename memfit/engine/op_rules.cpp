#include "memfit/engine/op_rules.h"

#include <ATen/core/enum_tag.h>

#include <mutex>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

namespace memfit::engine {
namespace {

using c10::DispatchKey;

bool holds_tensor(const c10::TypePtr& type) { return type->kind() == c10::TypeKind::TensorType; }

c10::TypePtr without_optional(c10::TypePtr type) {
  if (auto optional = type->cast<c10::OptionalType>()) return optional->getElementType();
  return type;
}

ArgKind kind_of(const c10::TypePtr& declared) {
  const c10::TypePtr type = without_optional(declared);
  switch (type->kind()) {
    case c10::TypeKind::TensorType: return ArgKind::Tensor;
    case c10::TypeKind::GeneratorType: return ArgKind::Generator;
    case c10::TypeKind::ListType: {
      const c10::TypePtr element = without_optional(type->castRaw<c10::ListType>()->getElementType());
      if (holds_tensor(element)) return ArgKind::TensorList;
      return element->kind() == c10::TypeKind::ListType || element->kind() == c10::TypeKind::ClassType ? ArgKind::Opaque
                                                                                                      : ArgKind::Plain;
    }
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::FloatType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::NumberType:
    case c10::TypeKind::StringType:
    case c10::TypeKind::DeviceObjType:
    case c10::TypeKind::LayoutType:
    case c10::TypeKind::ScalarTypeType:
    case c10::TypeKind::MemoryFormatType:
    case c10::TypeKind::ComplexType:
    case c10::TypeKind::QSchemeType: return ArgKind::Plain;
    default: return ArgKind::Opaque;
  }
}

// The written tensor is filled whatever it held. Only ops whose kernels read nothing of it.
const std::unordered_set<std::string_view>& overwriting() {
  static const std::unordered_set<std::string_view> names = {
      "aten::zero_", "aten::fill_", "aten::copy_", "aten::uniform_", "aten::normal_", "aten::bernoulli_", "aten::random_",
      "aten::exponential_", "aten::geometric_", "aten::cauchy_", "aten::log_normal_"};
  return names;
}

// Storage surgery: metadata or the storage itself changes, not content.
const std::unordered_set<std::string_view>& resizing() {
  static const std::unordered_set<std::string_view> names = {"aten::resize_", "aten::resize_as_", "aten::set_",
                                                             "aten::_resize_output_", "aten::resize", "aten::set"};
  return names;
}

// Results depend on more than the arguments, or calling again does something to the world.
KeepReason keep_reason(std::string_view name) {
  if (name == "aten::from_file" || name == "aten::_pin_memory") return KeepReason::ReadsOutside;
  if (name == "aten::record_stream" || name.find("observer") != std::string_view::npos ||
      name.find("_cufft") != std::string_view::npos)
    return KeepReason::SideEffect;
  return KeepReason::None;
}

// Kernels of these write arguments that their schema calls read-only (running statistics of batch norm), or are
// called in training with statistics that a replay must not move again.
bool moves_running_statistics(std::string_view name) {
  return name.find("batch_norm") != std::string_view::npos && name.find("backward") == std::string_view::npos &&
         name.find("update_stats") == std::string_view::npos && name.find("gather_stats") == std::string_view::npos;
}

void note_arguments(const c10::FunctionSchema& schema, OpRule& rule) {
  bool all_alias = !schema.returns().empty();
  for (const auto& result : schema.returns()) {
    const bool alias = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    if (!alias) all_alias = false;
  }
  const bool statistics = moves_running_statistics(schema.name());
  for (std::uint32_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    rule.kinds.push_back(kind_of(argument.type()));
    if (rule.kinds.back() == ArgKind::Generator) rule.generator_arg = static_cast<int>(i);
    bool written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    if (argument.alias_info() != nullptr && !written) {
      for (const auto& inner : argument.alias_info()->containedTypes()) written = written || inner.isWrite();
    }
    if (statistics && (argument.name() == "running_mean" || argument.name() == "running_var")) {
      rule.hidden_writes.push_back(i);
      continue;
    }
    if (statistics && (argument.name() == "training" || argument.name() == "train")) rule.training_arg = static_cast<int>(i);
    if (written) rule.writes.push_back(i);
    if (rule.kinds.back() == ArgKind::Opaque && rule.op_class == OpClass::Record) {
      rule.op_class = OpClass::Keep;
      rule.reason = KeepReason::Opaque;
    }
  }
  if (all_alias && rule.writes.empty()) rule.op_class = OpClass::View;
}

OpRule make_rule(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OpRule rule(op);
  rule.name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
  rule.name_hash = 0xcbf29ce484222325ull;   // FNV-1a
  for (const char c : rule.name) rule.name_hash = (rule.name_hash ^ static_cast<unsigned char>(c)) * 0x100000001b3ull;
  rule.args = static_cast<std::uint32_t>(schema.arguments().size());
  note_arguments(schema, rule);
  const std::string& name = schema.name();
  rule.random = op.hasTag(at::Tag::nondeterministic_seeded);
  rule.has_autocast[0] = op.hasKernelForDispatchKey(DispatchKey::AutocastCPU);
  rule.has_autocast[1] = op.hasKernelForDispatchKey(DispatchKey::AutocastCUDA);
  rule.overwrites = overwriting().count(name) != 0 || op.hasTag(at::Tag::out);
  rule.resizes = resizing().count(name) != 0;
  if (rule.resizes) rule.op_class = OpClass::Keep;
  if (op.hasTag(at::Tag::inplace_view) && !rule.resizes) rule.op_class = OpClass::View;
  if (op.hasTag(at::Tag::nondeterministic_bitwise) && !rule.random && rule.op_class == OpClass::Record) {
    rule.op_class = OpClass::Keep;
    rule.reason = KeepReason::Nondeterministic;
  }
  if (const KeepReason reason = keep_reason(name); reason != KeepReason::None && rule.op_class == OpClass::Record) {
    rule.op_class = OpClass::Keep;
    rule.reason = reason;
  }
  const std::string_view space = std::string_view(name).substr(0, name.find("::"));
  if (space != "aten" && space != "prims") {
    const bool communicates = space == "c10d" || space == "_c10d_functional" || space == "c10d_functional" ||
                              space == "symm_mem" || space == "_dtensor" || space == "fsdp";
    rule.op_class = communicates ? OpClass::Escape : OpClass::PassThrough;
    rule.reason = communicates ? KeepReason::Communication : KeepReason::CustomOp;
  } else if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) && !op.hasKernelForDispatchKey(DispatchKey::CPU) &&
             !op.hasKernelForDispatchKey(DispatchKey::CUDA)) {
    // Some ops have both a composite form and a kernel of their own (mish_backward); those run as one unit.
    rule.op_class = OpClass::PassThrough;
  }
  return rule;
}

}  // namespace

const OpRule& rule_of(const c10::OperatorHandle& op) {
  // Each operator has one schema object for life, unless it is deregistered; then a new one has a new name check below.
  struct Entry { const void* key; const OpRule* rule; };
  constexpr std::size_t kSlots = 1024;
  thread_local Entry near[kSlots];
  const void* key = &op.schema();
  Entry& entry = near[(reinterpret_cast<std::uintptr_t>(key) >> 6) % kSlots];
  if (entry.key == key) return *entry.rule;
  static std::mutex mutex;
  static std::unordered_map<const void*, OpRule*> rules;
  std::lock_guard lock(mutex);
  OpRule*& rule = rules[key];
  if (rule == nullptr) rule = new OpRule(make_rule(op));
  entry = {key, rule};
  return *rule;
}

}  // namespace memfit::engine
