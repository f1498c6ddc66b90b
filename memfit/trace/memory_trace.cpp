#include "memfit/trace/memory_trace.h"

#include <fmt/format.h>

namespace memfit::trace {
namespace {

/// Whether nobody would look for their own mistake in this file.
bool is_foreign(std::string_view file) {
  return file.empty() || file.starts_with('<') || file.find("site-packages/") != std::string_view::npos ||
         file.find("dist-packages/") != std::string_view::npos || file.find("/lib/python3") != std::string_view::npos;
}

std::string place(const MemoryTrace& trace, const Frame& frame) {
  return frame.line == 0 ? std::string(trace.name(frame.file)) : fmt::format("{}:{}", trace.name(frame.file), frame.line);
}

}  // namespace

std::string_view phase_name(Phase phase) {
  switch (phase) {
    case Phase::Other: return "other";
    case Phase::Forward: return "forward";
    case Phase::Backward: return "backward";
    case Phase::Optimizer: return "optimizer";
    case Phase::Evaluation: return "evaluation";
  }
  return "?";
}

Category category_of(const Storage& storage) {
  const std::uint32_t roles = storage.roles;
  if (roles & kRoleParameter) return Category::Parameter;
  if (roles & kRoleGradient) return Category::Gradient;
  if (roles & kRoleOptimizerState) return Category::OptimizerState;
  if (roles & kRoleBuffer) return Category::Buffer;
  if (roles & kRoleInput) return Category::Input;
  if ((roles & kRoleReadInBackward) && storage.phase != Phase::Backward) return Category::Activation;
  return roles & kRoleMadeOutsideOps ? Category::Other : Category::Temporary;
}

std::string stack_text(const MemoryTrace& trace, std::uint32_t stack, std::size_t most) {
  std::string text;
  for (std::size_t i = 0; stack != kNone && i < most; ++i, stack = trace.stacks[stack].parent) {
    const Frame& frame = trace.frames[trace.stacks[stack].frame];
    if (i > 0) text += " < ";
    text += place(trace, frame);
    if (frame.function != kNone) text += fmt::format(" ({})", trace.name(frame.function));
  }
  return text;
}

std::string where(const MemoryTrace& trace, std::uint32_t site) {
  const std::uint32_t innermost = trace.sites[site].stack;
  for (std::uint32_t s = innermost; s != kNone; s = trace.stacks[s].parent) {
    const Frame& frame = trace.frames[trace.stacks[s].frame];
    if (!is_foreign(trace.name(frame.file))) return place(trace, frame);
  }
  return innermost == kNone ? "" : place(trace, trace.frames[trace.stacks[innermost].frame]);
}

}  // namespace memfit::trace
