#include "memfit/analysis/explain.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "memfit/analysis/detail/block_layout.h"
#include "memfit/analysis/detail/verdicts.h"
#include "memfit/core/error.h"

namespace memfit::analysis {

using trace::AllocatorAction;

std::string_view name_of(VerdictKind kind) {
  switch (kind) {
    case VerdictKind::Capacity:
      return "capacity";
    case VerdictKind::Fragmentation:
      return "fragmentation";
    case VerdictKind::Leak:
      return "leak";
    case VerdictKind::Spike:
      return "spike";
    case VerdictKind::OversizedRequest:
      return "oversized_request";
    case VerdictKind::OtherProcesses:
      return "other_processes";
    case VerdictKind::CapBelowDevice:
      return "cap_below_device";
    case VerdictKind::PoolsCannotShare:
      return "pools_cannot_share";
    case VerdictKind::None:
      return "none";
  }
  return "none";
}

namespace {

void choose_window(DeviceExplanation& d, const ExplainOptions& options) {
  d.from = std::min(options.from.value_or(0), d.timeline.count);
  d.to = std::min(options.to.value_or(d.timeline.count), d.timeline.count);
  if (options.last_step) {
    if (d.steps.size() < 2) {
      if (d.timeline.count == 0) return;
      throw UsageError(
          fmt::format("--last-step: device {} shows no steps (forward, backward, optimizer in the recorded stacks). "
                      "Give the events yourself, for example --from {}.",
                      d.timeline.device, d.timeline.count / 2));
    }
    // The last step that is whole.
    d.from = d.steps[d.steps.size() - 2];
    d.to = d.steps.back();
  }
}

void find_peak(DeviceExplanation& d) {
  const DeviceTimeline& t = d.timeline;
  if (d.from == 0 && d.to == t.count) {
    d.peak_allocated = t.peak_allocated;
    d.peak_event = t.peak_event;
    d.reserved_at_peak = t.reserved_at_peak;
    return;
  }
  bool any = false;
  play(t, [&](std::uint32_t i, const detail::BlockLayout& layout) {
    if (i == kNever) return true;
    if (i >= d.to) return false;
    if (i < d.from) return true;
    if (!any || layout.allocated() > d.peak_allocated) {
      d.peak_allocated = layout.allocated();
      d.reserved_at_peak = layout.reserved();
      d.peak_event = i;
    }
    any = true;
    return true;
  });
  if (!any) {  // an empty window: the state at its start
    d.peak_event = d.from == 0 ? kNever : d.from - 1;
    play(t, [&](std::uint32_t i, const detail::BlockLayout& layout) {
      if (i != d.peak_event) return true;
      d.peak_allocated = layout.allocated();
      d.reserved_at_peak = layout.reserved();
      return false;
    });
  }
}

void count_left_out(DeviceExplanation& d, std::uint64_t min_size) {
  d.left_out = d.timeline.count - (d.to - d.from);
  if (min_size == 0) return;
  for (std::uint32_t i = d.from; i < d.to; ++i)
    if (d.timeline.event(i).action == AllocatorAction::Alloc && d.timeline.size_of[i] < min_size) ++d.left_out;
}

/// Who the program itself says the peak belongs to: set_user_metadata and torch.compile's context.
void find_notes(DeviceExplanation& d) {
  const trace::AllocatorSnapshot& snapshot = *d.timeline.snapshot;
  if (snapshot.notes.size() <= 1) return;
  std::map<std::uint32_t, std::uint64_t> bytes;
  for_each_live(d.timeline, d.peak_event, [&](std::uint32_t owner, std::uint64_t size, trace::StackId) {
    bytes[(owner & kBaseFlag) != 0 ? trace::kNoNote : d.timeline.event(owner).note] += size;
  });
  for (const auto& [note, size] : bytes) {
    const trace::EventNote& text = snapshot.notes[note];
    d.notes.push_back({size, std::string(snapshot.text(text.user_metadata).substr(0, 300)),
                       std::string(snapshot.text(text.compile_context).substr(0, 300))});
  }
  std::stable_sort(d.notes.begin(), d.notes.end(),
                   [](const NoteRow& a, const NoteRow& b) { return a.bytes > b.bytes; });
}

/// Out-of-memory events in the window and how often memory was given back to serve an allocation.
void find_failures(DeviceExplanation& d) {
  const DeviceTimeline& t = d.timeline;
  std::vector<std::uint32_t> at;
  bool gave = false;
  for (std::uint32_t i = d.from; i < d.to; ++i) {
    switch (t.event(i).action) {
      case AllocatorAction::OutOfMemory:
        at.push_back(i);
        gave = false;
        break;
      case AllocatorAction::SegmentFree:
      case AllocatorAction::SegmentUnmap:
        gave = true;
        break;
      case AllocatorAction::SegmentAlloc:
      case AllocatorAction::SegmentMap:
        if (gave) ++d.retries;
        gave = false;
        break;
      case AllocatorAction::FreeCompleted:
        break;
      default:
        gave = false;
    }
  }
  d.oom_count = at.size();
  if (at.empty()) return;
  std::vector<std::uint32_t> keep{at.front()};
  if (at.size() > 1) keep.push_back(at.back());
  for (const std::uint32_t i : keep) {
    OomState oom;
    oom.event = i;
    oom.requested = t.event(i).size;
    oom.device_free = t.event(i).address < (std::uint64_t{1} << 50) ? t.event(i).address : 0;
    oom.stream = t.event(i).stream;
    oom.pool = t.event(i).pool;
    oom.memory = free_memory_at(t, i);
    oom.usable = oom.memory.reserved + oom.device_free;
    d.ooms.push_back(std::move(oom));
  }
}

}  // namespace

Explanation explain(const trace::AllocatorSnapshot& snapshot, const ExplainOptions& options) {
  Explanation out;
  out.snapshot = &snapshot;
  out.attribution = std::make_shared<Attribution>(snapshot);
  for (DeviceTimeline& timeline : compute_timelines(snapshot)) {
    DeviceExplanation d;
    d.timeline = std::move(timeline);
    d.steps = find_steps(d.timeline, *out.attribution);
    choose_window(d, options);
    find_peak(d);
    count_left_out(d, options.min_size);
    d.owners = compute_owners(d.timeline, *out.attribution, d.peak_event, options.min_size);
    for (const OwnerRow& row : d.owners) d.by_category[static_cast<std::size_t>(row.category)] += row.bytes;
    d.at_end = free_memory_at_end(d.timeline);
    find_notes(d);
    find_failures(d);
    if (options.device_memory) d.capacity = options.device_memory;
    else
      for (const OomState& oom : d.ooms) d.capacity = std::max(d.capacity.value_or(0), oom.usable);
    if (d.capacity && d.timeline.peak_reserved > *d.capacity) {
      if (options.device_memory) {
        ++d.timeline.violation_count;
        d.timeline.violations.push_back({d.timeline.peak_reserved_event, "more is reserved than the device has"});
      } else {
        d.capacity = d.timeline.peak_reserved;  // once it could have more: others took it since
      }
    }
    out.devices.push_back(std::move(d));
  }
  for (DeviceExplanation& d : out.devices) detail::judge(d, *out.attribution, options);
  return out;
}

}  // namespace memfit::analysis
