// Optimizer state in one or two bytes an element. Lossy; used only where StatePrecision asks for it.
// Not here: who decides that (optimizer.h). Threads: any. Cost: a few elementwise passes, temporaries of 3 floats an element.
#pragma once

#include <torch/types.h>

namespace memfit::optim::detail {

inline constexpr std::int64_t kBlock = 256;

/// float32 [n] to bfloat16 [n], up or down at random with the chance that makes the mean right. Infinities and NaN stay.
at::Tensor round_stochastically(const at::Tensor& values, at::Generator generator);

struct Blocks {
  at::Tensor codes;   // [n], int8, or uint8 where values are never negative
  at::Tensor scales;  // float32 [ceil(n / kBlock)]: largest magnitude of each block
};

/// float32 [n] to codes: the signed square root of a value's share of its block's largest in 127ths, to the nearest. Values
/// that are never negative: the fourth root in 255ths, rounded up, so that no denominator falls to zero.
Blocks encode_blocks(const at::Tensor& values, bool never_negative);
at::Tensor decode_blocks(const Blocks& blocks);

}  // namespace memfit::optim::detail
