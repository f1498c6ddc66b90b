#include "memfit/optim/detail/compact_state.h"

#include <ATen/ATen.h>

namespace memfit::optim::detail {

at::Tensor round_stochastically(const at::Tensor& values, at::Generator generator) {
  // bfloat16 is the upper half of a float: a random number below 2^16 carries into it with the right chance.
  at::Tensor bits = at::randint(0, 1 << 16, values.sizes(), std::move(generator), values.options().dtype(at::kInt));
  bits.add_(values.view(at::kInt)).bitwise_and_(-(1 << 16));
  return at::where(values.isfinite(), bits.view(at::kFloat), values).to(at::kBFloat16);
}

Blocks encode_blocks(const at::Tensor& values, bool never_negative) {
  const std::int64_t n = values.numel();
  const std::int64_t blocks = (n + kBlock - 1) / kBlock;
  const at::Tensor rows = at::constant_pad_nd(values, {0, blocks * kBlock - n}).view({blocks, kBlock});
  at::Tensor scales = rows.abs().amax(1);
  at::Tensor shares = rows.div(scales.clamp_min(std::numeric_limits<float>::min()).unsqueeze(1));
  if (never_negative) {
    shares.sqrt_().sqrt_().mul_(255).ceil_().clamp_(0, 255);
  } else {
    const at::Tensor sign = shares.sign();
    shares.abs_().sqrt_().mul_(127).round_().mul_(sign);
  }
  return {shares.to(never_negative ? at::kByte : at::kChar).view(-1).narrow(0, 0, n), scales};
}

at::Tensor decode_blocks(const Blocks& blocks) {
  const bool never_negative = blocks.codes.scalar_type() == at::kByte;
  const std::int64_t n = blocks.codes.numel();
  const std::int64_t count = blocks.scales.numel();
  at::Tensor shares = at::constant_pad_nd(blocks.codes, {0, count * kBlock - n}).to(at::kFloat).view({count, kBlock});
  if (never_negative) {
    shares.div_(255).square_().square_();
  } else {
    shares.div_(127);
    shares.mul_(shares.abs());
  }
  return shares.mul_(blocks.scales.unsqueeze(1)).view(-1).narrow(0, 0, n);
}

}  // namespace memfit::optim::detail
