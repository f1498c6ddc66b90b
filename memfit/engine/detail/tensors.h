// What kind of tensor one is, for engine and recorder alike. Threads: any. Cost: a few instructions.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>

#include "memfit/memory/cpu_allocator.h"

namespace memfit::engine::detail {

inline constexpr c10::DispatchKeySet kOpaqueKeys{c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr, c10::DispatchKey::Quantized,
                                                 c10::DispatchKey::NestedTensor, c10::DispatchKey::MkldnnCPU};

/// Its bytes are not one strided storage: made of other tensors, or laid out by a backend of its own.
inline bool is_opaque(const at::Tensor& t) {
  return t.key_set().has_any(kOpaqueKeys) || !t.unsafeGetTensorImpl()->has_storage();
}

/// It lives on the device that the engine looks after.
inline bool is_ours(const at::Tensor& t) { return t.device().type() == memory::CpuAllocator::kDeviceType; }

}  // namespace memfit::engine::detail
