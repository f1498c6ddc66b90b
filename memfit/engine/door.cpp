#include "memfit/engine/door.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <memory>

#include "memfit/core/error.h"

namespace memfit::engine {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;

Door open = Door::Fake;
OpHook op_hook = nullptr;

const DispatchKeySet kBelowFake(DispatchKeySet::FULL_AFTER, DispatchKey::Fake);
const DispatchKeySet kBelowGenericMode(DispatchKeySet::FULL_AFTER, DispatchKey::TESTING_ONLY_GenericMode);

void fake_fallback(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  op_hook(op, keys, keys & kBelowFake, stack);
}

void generic_mode_fallback(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  op_hook(op, keys, keys & kBelowGenericMode, stack);
}

std::unique_ptr<torch::Library>& library() {
  static auto* const one = new std::unique_ptr<torch::Library>();
  return *one;
}

// Tensors that are not plain strided bytes on a device, and modes in which ops are not what they seem.
const DispatchKeySet kWrapped{DispatchKey::Python,        DispatchKey::FuncTorchDynamicLayerBackMode,
                              DispatchKey::Functionalize, DispatchKey::ZeroTensor,
                              DispatchKey::PythonTLSSnapshot, DispatchKey::FuncTorchDynamicLayerFrontMode,
                              DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                              DispatchKey::FuncTorchVmapMode, DispatchKey::Batched, DispatchKey::VmapMode,
                              DispatchKey::BatchedNestedTensor, DispatchKey::PreDispatch, DispatchKey::PythonDispatcher,
                              DispatchKey::Tracer, DispatchKey::DeferredInit};

}  // namespace

const char* name_of(Door door) { return door == Door::Fake ? "fake" : "generic_mode"; }

c10::DispatchKey door_key() {
  return open == Door::Fake ? DispatchKey::Fake : DispatchKey::TESTING_ONLY_GenericMode;
}

Door open_door(const std::string& wanted, OpHook hook) {
  if (!wanted.empty() && wanted != "fake" && wanted != "generic_mode") {
    throw UsageError("MEMFIT_DOOR: \"" + wanted + "\" is not a door. Write fake or generic_mode, or leave it out.");
  }
  if (op_hook != nullptr) return open;
  auto& dispatcher = c10::Dispatcher::singleton();
  const bool fake_free = !dispatcher.hasBackendFallbackForDispatchKey(DispatchKey::Fake);
  if (wanted == "fake" && !fake_free) {
    throw UsageError("MEMFIT_DOOR: this PyTorch uses the key Fake itself. Write generic_mode, or leave it out.");
  }
  open = wanted == "generic_mode" || !fake_free ? Door::GenericMode : Door::Fake;
  op_hook = hook;
  library() = std::make_unique<torch::Library>(torch::Library::IMPL, "_", door_key(), __FILE__, __LINE__);
  if (open == Door::Fake) {
    library()->fallback(torch::CppFunction::makeFromBoxedFunction<&fake_fallback>());
  } else {
    library()->fallback(torch::CppFunction::makeFromBoxedFunction<&generic_mode_fallback>());
  }
  return open;
}

bool cover_thread(bool on) {
  const bool was = c10::impl::tls_is_dispatch_key_included(door_key());
  c10::impl::tls_set_dispatch_key_included(door_key(), on);
  return was;
}

bool must_pass(const OpRule& rule, DispatchKeySet keys) {
  if (rule.op_class == OpClass::PassThrough) return true;
  if (keys.has_any(kWrapped)) return true;
  if (open == Door::GenericMode) {
    // An op that autocast has yet to cast: its cast version comes by again.
    if (rule.has_autocast[0] && keys.has(DispatchKey::AutocastCPU)) return true;
    if (rule.has_autocast[1] && keys.has(DispatchKey::AutocastCUDA)) return true;
    // Lazily conjugated and negated arguments do not pass: their fallback redispatches to the kernel below this door, so the
    // op would run unseen. It is one unit with its keys, which a recipe keeps.
  }
  return false;
}

c10::impl::LocalDispatchKeySet replay_keys() {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.included_ = DispatchKeySet(DispatchKey::BackendSelect);
  keys.excluded_ = c10::default_excluded_set | c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                   DispatchKeySet({DispatchKey::Fake, DispatchKey::TESTING_ONLY_GenericMode, DispatchKey::Python,
                                   DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                                   DispatchKey::FuncTorchDynamicLayerFrontMode,
                                   DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Functionalize});
  return keys;
}

}  // namespace memfit::engine
