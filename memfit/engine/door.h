// Where the engine stands in PyTorch's dispatcher. Two places are known to work; this file is all that knows which.
//   fake          DispatchKey::Fake, below autograd. Everything comes by once, as the kernel will run it.
//   generic_mode  DispatchKey::TESTING_ONLY_GenericMode, above autograd and autocast. For the day when PyTorch itself
//                 takes Fake.
// Both are tested on every build; the choice is made at start and reported.
// Threads: a thread is watched after cover_thread(); backward threads inherit it.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>

#include "memfit/engine/op_rules.h"

namespace memfit::engine {

enum class Door { Fake, GenericMode };

/// Called for each op of a covered thread, outermost ops only.
using OpHook = void (*)(const c10::OperatorHandle& op, c10::DispatchKeySet keys, c10::DispatchKeySet rest, torch::jit::Stack* stack);

const char* name_of(Door door);
/// Register the fallback. `wanted` is "fake", "generic_mode" or "" (first that is free).
/// Throws: UsageError for another name or when the door is taken.
Door open_door(const std::string& wanted, OpHook hook);
/// Watch the calling thread's ops, or stop. Returns whether it was watched.
bool cover_thread(bool on);
/// The key whose exclusion hides nested ops.
c10::DispatchKey door_key();
/// True when `keys` show tensors or modes that this door must let pass: what they are made of comes by later.
bool must_pass(const OpRule& rule, c10::DispatchKeySet keys);
/// TLS keys under which a recorded op is replayed.
c10::impl::LocalDispatchKeySet replay_keys();

}  // namespace memfit::engine
