// One device's history made whole: what was there before the recording, what every event did to allocated and reserved
// bytes, when each block was freed, and where the file contradicts itself.
// Not here: what it means (verdicts.h), who owns it (owners.h), other settings (replay.h).
// Threads: pure functions. Cost: two passes over the events; 12 bytes an event.
//
// Note [What was before]
// A recording starts late, or its ring loses the oldest events. What was live at its start is what the file shows live
// at the end and no event allocated, and what an event frees without having allocated it. The same for segments; mapped
// ranges are undone event by event from the end. With that, allocated and reserved are right at every event, and the
// part nobody recorded is a number of its own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "memfit/analysis/allocator_settings.h"
#include "memfit/trace/allocator_trace.h"

namespace memfit::analysis {

namespace detail {
class BlockLayout;
}

inline constexpr std::uint32_t kNever = 0xffffffff;
inline constexpr std::uint32_t kBaseFlag = 0x80000000;  // marks the index of a base block among event indices

enum class UnrecordedReason : std::uint8_t { None, Overflow, NotRecording, Unknown };
std::string_view name_of(UnrecordedReason reason);

/// A block that was live when the recording began.
struct BaseBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested = 0;
  trace::StackId stack = trace::kNoStack;
  std::uint32_t freed_at = kNever;  // local event index
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  bool exact = false;  // its size is known from the segments, not from the request
  bool pending = false;
};

struct BaseSegment {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  trace::StackId stack = trace::kNoStack;
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  bool expandable = false;
  bool large = true;
};

struct Violation {
  std::uint32_t event = 0;  // local index; kNever = the state at the end
  std::string what;
};

struct DeviceTimeline {
  const trace::AllocatorSnapshot* snapshot = nullptr;
  std::int32_t device = 0;
  std::size_t first = 0;    // of snapshot->events
  std::uint32_t count = 0;  // events of this device
  AllocatorSettings settings;

  std::vector<BaseBlock> base_blocks;
  std::vector<BaseSegment> base_segments;
  std::uint64_t base_allocated = 0;
  std::uint64_t base_reserved = 0;
  std::uint64_t base_pending = 0;

  std::vector<std::uint32_t> freed_at;  // of each event: for an alloc the event that asked to free it, or kNever
  // Of each event: an alloc's block; bytes a free took off the allocated; bytes of a segment that took effect.
  std::vector<std::uint64_t> size_of;

  std::uint64_t final_allocated = 0, final_reserved = 0, final_pending = 0;
  std::uint64_t peak_allocated = 0, peak_reserved = 0;
  std::uint32_t peak_event = kNever;  // kNever: already at the start
  std::uint64_t reserved_at_peak = 0;
  std::uint32_t peak_reserved_event = kNever;

  std::uint64_t unrecorded = 0;  // bytes live at the start of the recording
  UnrecordedReason reason = UnrecordedReason::None;

  std::uint64_t violation_count = 0;
  std::vector<Violation> violations;  // the first 20
  bool shows_segments = true;         // false: the file lists none for this device, so reserved is what events tell
  bool completes_on_request = false;  // the recording has no free_completed events

  const trace::AllocatorEvent& event(std::uint32_t i) const { return snapshot->events[first + i]; }
};

/// All devices that the snapshot knows, in order.
std::vector<DeviceTimeline> compute_timelines(const trace::AllocatorSnapshot& snapshot);

/// Play the recorded events forward again and call `visit(event, layout)` after each (first with kNever: the base).
/// Returns when `visit` says false.
void play(const DeviceTimeline& timeline, const std::function<bool(std::uint32_t, const detail::BlockLayout&)>& visit);

/// Allocated and reserved bytes after each event, thinned to at most `limit` points per series by keeping the extremes.
struct Curve {
  std::vector<std::uint32_t> event;
  std::vector<std::uint64_t> allocated, reserved;
};
Curve compute_curve(const DeviceTimeline& timeline, std::uint32_t from, std::uint32_t to, std::size_t limit);

}  // namespace memfit::analysis
