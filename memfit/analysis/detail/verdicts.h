// Fills DeviceExplanation::verdicts. One file a question: out of memory, growth and spikes, advice.
#pragma once

#include "memfit/analysis/explain.h"

namespace memfit::analysis::detail {

void judge(DeviceExplanation& device, const Attribution& attribution, const ExplainOptions& options);

/// Places whose live bytes grow from step to step, largest growth first.
struct Growth {
  std::uint64_t place = 0;
  trace::StackId stack = trace::kNoStack;
  std::uint64_t bytes = 0;  // over the steps looked at
  std::uint64_t blocks = 0;
  std::uint32_t steps = 0;
};
std::vector<Growth> find_growth(const DeviceExplanation& device, const Attribution& attribution);

/// The place whose short-lived blocks raise the peak most.
struct Spike {
  std::uint64_t place = 0;
  trace::StackId stack = trace::kNoStack;
  std::uint64_t bytes = 0;    // by which the peak would be lower
  std::uint64_t largest = 0;  // its largest block
  std::uint32_t event = kNever;
  std::uint64_t times = 0;
  std::uint32_t longest_life = 0;  // in events
};
std::optional<Spike> find_spike(const DeviceExplanation& device, const Attribution& attribution);

}  // namespace memfit::analysis::detail
