// The settings of PyTorch's caching allocator that decide what is reserved, and its rounding rules.
// Not here: the policy itself (caching_allocator.h).
// Threads: plain data. Cost: none.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "memfit/trace/allocator_trace.h"

namespace memfit::analysis {

inline constexpr std::uint64_t kMinBlock = 512;                       // every size is a multiple
inline constexpr std::uint64_t kSmallLimit = std::uint64_t{1} << 20;  // up to here the small pool serves
inline constexpr std::uint64_t kSmallSegment = std::uint64_t{2} << 20;
inline constexpr std::uint64_t kLargeLimit = std::uint64_t{10} << 20;  // up to here requests share a large segment
inline constexpr std::uint64_t kRoundLarge = std::uint64_t{2} << 20;
inline constexpr std::uint64_t kNoSplitLimit = ~std::uint64_t{0};

struct AllocatorSettings {
  std::uint64_t max_split_size = kNoSplitLimit;
  bool expandable_segments = false;
  double garbage_collection_threshold = 0;                   // acts only with a memory fraction
  std::array<std::uint32_t, 16> roundup_power2_divisions{};  // for sizes from 1 MiB, 2 MiB, ... 32 GiB; 0 = off
  std::uint64_t large_segment = std::uint64_t{20} << 20;
  std::uint64_t max_non_split_rounding = std::uint64_t{20} << 20;
  std::optional<double> memory_fraction;
  bool operator==(const AllocatorSettings&) const = default;

  std::uint64_t round(std::uint64_t requested) const;
  std::uint64_t segment_size(std::uint64_t rounded) const;
  /// Is what remains of a free block after `rounded` split off?
  bool splits(std::uint64_t rounded, std::uint64_t remaining) const {
    if (rounded <= kSmallLimit || expandable_segments) return remaining >= kMinBlock;
    return rounded < max_split_size && remaining > kSmallLimit;
  }
};

/// What the snapshot says, both as fields and as the text of PYTORCH_ALLOC_CONF.
AllocatorSettings settings_of(const trace::RecordedSettings& recorded);

/// The text to put in PYTORCH_ALLOC_CONF for these settings; "" for the defaults.
std::string conf_text(const AllocatorSettings& settings);

/// Change `settings` as PYTORCH_ALLOC_CONF text does; unknown keys are ignored. Returns: false when a value is
/// malformed.
bool apply_conf(const std::string& conf, AllocatorSettings& settings);

}  // namespace memfit::analysis
