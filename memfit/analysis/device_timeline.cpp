#include "memfit/analysis/device_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "memfit/analysis/detail/block_layout.h"

namespace memfit::analysis {

using detail::BlockLayout;
using trace::AllocatorAction;
using trace::AllocatorEvent;

std::string_view name_of(UnrecordedReason reason) {
  switch (reason) {
    case UnrecordedReason::None:
      return "";
    case UnrecordedReason::Overflow:
      return "overflow";
    case UnrecordedReason::NotRecording:
      return "not_recording";
    case UnrecordedReason::Unknown:
      return "unknown";
  }
  return "";
}

namespace {

/// Mapped address ranges of expandable segments, to be undone from the end to the start.
class MappedRanges {
 public:
  struct Range {
    std::uint64_t end;
    std::uint16_t stream, pool;
    bool large;
    trace::StackId stack;
  };
  void add(std::uint64_t begin, const Range& range) {
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin() && std::prev(at)->second.end > begin) return;  // overlaps: already there
    if (at != ranges_.end() && at->first < range.end) return;
    ranges_[begin] = range;
  }
  /// Take [begin, end) out wherever it is mapped.
  void remove(std::uint64_t begin, std::uint64_t end) {
    auto at = ranges_.upper_bound(begin);
    if (at != ranges_.begin()) --at;
    while (at != ranges_.end() && at->first < end) {
      if (at->second.end <= begin) {
        ++at;
        continue;
      }
      const std::uint64_t from = at->first;
      const Range range = at->second;
      at = ranges_.erase(at);
      if (from < begin) ranges_[from] = Range{begin, range.stream, range.pool, range.large, range.stack};
      if (range.end > end) at = ranges_.emplace(end, range).first;
    }
  }
  const std::map<std::uint64_t, Range>& ranges() const { return ranges_; }

 private:
  std::map<std::uint64_t, Range> ranges_;
};

class TimelineBuilder {
 public:
  TimelineBuilder(const trace::AllocatorSnapshot& snapshot, const trace::DeviceEvents& events,
                  const AllocatorSettings& settings)
      : snapshot_(snapshot) {
    t_.snapshot = &snapshot;
    t_.device = events.device;
    t_.first = events.first;
    t_.count = static_cast<std::uint32_t>(std::min<std::size_t>(events.count, kNever - 1));
    t_.settings = settings;
  }

  DeviceTimeline build() {
    t_.shows_segments = std::any_of(snapshot_.segments.begin(), snapshot_.segments.end(),
                                    [&](const trace::AllocatorSegment& s) { return s.device == t_.device; });
    find_base_blocks();
    find_base_segments();
    stretch_base_blocks();
    find_reason();
    play_forward();
    compare_end();
    return std::move(t_);
  }

 private:
  void find_base_blocks();
  void find_base_segments();
  void stretch_base_blocks();
  void find_reason();
  void play_forward();
  void compare_end();
  void violation(std::uint32_t event, std::string what) {
    // Without segments in a file whose first events are lost, nothing says where memory is: that is no contradiction.
    if (!t_.shows_segments && !t_.base_blocks.empty()) return;
    if (t_.violation_count++ < 20) t_.violations.push_back({event, std::move(what)});
  }

  const trace::AllocatorSnapshot& snapshot_;
  DeviceTimeline t_;
  std::uint64_t base_with_stack_ = 0, base_without_stack_ = 0;
  bool events_have_stacks_ = false;
  bool cut_ = false;  // the first events belong to something that began before
};

void TimelineBuilder::find_base_blocks() {
  detail::AddressMap open;  // address -> alloc event, or base block index | kBase
  constexpr std::uint32_t kBase = 0x80000000;
  bool completed = false, requested = false;
  for (std::uint32_t i = 0; i < t_.count && !(completed && requested); ++i) {
    completed = completed || t_.event(i).action == AllocatorAction::FreeCompleted;
    requested = requested || t_.event(i).action == AllocatorAction::FreeRequested;
  }
  t_.completes_on_request = requested && !completed;
  for (std::uint32_t i = 0; i < t_.count; ++i) {
    const AllocatorEvent& event = t_.event(i);
    if (event.stack != trace::kNoStack) events_have_stacks_ = true;
    if (event.action == AllocatorAction::Alloc) {
      open.set(event.address, i);
      continue;
    }
    const bool is_request = event.action == AllocatorAction::FreeRequested;
    if (!is_request && event.action != AllocatorAction::FreeCompleted) continue;
    const std::uint32_t found = open.find(event.address);
    if (found == detail::AddressMap::kNone) {
      BaseBlock block;
      block.address = event.address;
      block.requested = event.size;
      block.size = t_.settings.round(event.size);
      block.stack = event.stack;
      block.stream = event.stream;
      block.pool = event.pool;
      block.freed_at = i;
      block.pending = !is_request;
      if (!is_request && i < 4) cut_ = true;
      t_.base_blocks.push_back(block);
      if (is_request && !t_.completes_on_request)
        open.set(event.address, static_cast<std::uint32_t>(t_.base_blocks.size() - 1) | kBase);
    } else if (!is_request || t_.completes_on_request) {
      open.erase(event.address);
    }
  }
  for (const trace::AllocatorSegment& segment : snapshot_.segments) {
    if (segment.device != t_.device) continue;
    for (std::uint32_t b = segment.first_block; b < segment.first_block + segment.block_count; ++b) {
      const trace::AllocatorBlock& block = snapshot_.blocks[b];
      if (block.state == trace::BlockState::Inactive || block.size == 0) continue;
      const std::uint32_t found = open.find(block.address);
      if (found != detail::AddressMap::kNone) {
        if ((found & kBase) != 0)
          t_.base_blocks[found & ~kBase].size = std::max(t_.base_blocks[found & ~kBase].size, block.size);
        continue;
      }
      BaseBlock base;
      base.address = block.address;
      base.size = block.size;
      base.requested = block.requested;
      base.stack = block.stack;
      base.stream = segment.stream;
      base.pool = segment.pool;
      base.exact = true;
      base.pending = block.state == trace::BlockState::PendingFree;
      t_.base_blocks.push_back(base);
      (block.stack == trace::kNoStack ? base_without_stack_ : base_with_stack_) += block.size;
    }
  }
}

void TimelineBuilder::find_base_segments() {
  std::unordered_map<std::uint64_t, std::uint32_t> open;  // address -> segment_alloc event
  bool maps = false;
  for (std::uint32_t i = 0; i < t_.count; ++i) {
    const AllocatorEvent& event = t_.event(i);
    if (event.action == AllocatorAction::SegmentAlloc) {
      open[event.address] = i;
    } else if (event.action == AllocatorAction::SegmentFree) {
      if (open.erase(event.address) == 0)
        t_.base_segments.push_back(
            {event.address, event.size, event.stack, event.stream, event.pool, false, event.size > kSmallSegment});
    } else if (event.action == AllocatorAction::SegmentMap || event.action == AllocatorAction::SegmentUnmap) {
      maps = true;
    }
  }
  MappedRanges mapped;
  for (const trace::AllocatorSegment& segment : snapshot_.segments) {
    if (segment.device != t_.device || segment.total == 0) continue;
    if (segment.expandable) {
      mapped.add(segment.address,
                 {segment.address + segment.total, segment.stream, segment.pool, segment.large, segment.stack});
    } else if (!open.contains(segment.address)) {
      t_.base_segments.push_back(
          {segment.address, segment.total, segment.stack, segment.stream, segment.pool, false, segment.large});
    }
  }
  if (maps) {
    for (std::uint32_t i = t_.count; i-- > 0;) {
      const AllocatorEvent& event = t_.event(i);
      if (event.action == AllocatorAction::SegmentMap) {
        mapped.remove(event.address, event.address + event.size);
      } else if (event.action == AllocatorAction::SegmentUnmap) {
        mapped.add(event.address,
                   {event.address + event.size, event.stream, event.pool, event.size > kSmallSegment, event.stack});
      }
    }
  }
  for (const auto& [begin, range] : mapped.ranges())
    t_.base_segments.push_back({begin, range.end - begin, range.stack, range.stream, range.pool, true, range.large});
  std::sort(t_.base_segments.begin(), t_.base_segments.end(),
            [](const BaseSegment& a, const BaseSegment& b) { return a.address < b.address; });
  // A segment known twice (freed and, unseen, taken again) counts once.
  const auto same = [](const BaseSegment& a, const BaseSegment& b) { return a.address == b.address; };
  t_.base_segments.erase(std::unique(t_.base_segments.begin(), t_.base_segments.end(), same), t_.base_segments.end());
}

/// A block that an event freed is known by its request only, but it may own a tail that was too small to split off. Two
/// things tell: nothing in a large segment is free in pieces of at most the split remainder, and an allocation that
/// lands behind the block while it lives begins where the block ends.
void TimelineBuilder::stretch_base_blocks() {
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < t_.base_blocks.size(); ++i) order.push_back(i);
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return t_.base_blocks[a].address < t_.base_blocks[b].address; });
  const auto longest_tail = [&](const BaseBlock& block) -> std::uint64_t {
    if (block.exact || block.size <= kSmallLimit) return 0;
    return block.size >= t_.settings.max_split_size ? t_.settings.max_non_split_rounding : kSmallLimit;
  };
  const auto segment_of = [&](std::uint64_t address) -> const BaseSegment* {
    const auto after = std::upper_bound(t_.base_segments.begin(), t_.base_segments.end(), address,
                                        [](std::uint64_t a, const BaseSegment& b) { return a < b.address; });
    if (after == t_.base_segments.begin()) return nullptr;
    const BaseSegment& segment = *std::prev(after);
    return address < segment.address + segment.size && !segment.expandable ? &segment : nullptr;
  };
  const auto next_start = [&](std::size_t k, const BaseSegment& segment) {
    const std::uint64_t end = segment.address + segment.size;
    return k + 1 < order.size() ? std::min(end, t_.base_blocks[order[k + 1]].address) : end;
  };
  for (std::size_t k = 0; k < order.size(); ++k) {
    BaseBlock& block = t_.base_blocks[order[k]];
    const std::uint64_t tail = longest_tail(block);
    const BaseSegment* segment = tail != 0 ? segment_of(block.address) : nullptr;
    if (segment == nullptr) continue;
    const std::uint64_t next = next_start(k, *segment);
    if (next > block.address + block.size && next - block.address - block.size <= tail) {
      block.size = next - block.address;
      block.exact = true;
    }
  }
  std::size_t unsure = 0;
  for (const BaseBlock& block : t_.base_blocks) unsure += longest_tail(block) != 0 ? 1 : 0;
  for (std::uint32_t i = 0; i < t_.count && unsure > 0; ++i) {
    const AllocatorEvent& event = t_.event(i);
    if (event.action != AllocatorAction::Alloc) continue;
    const auto after =
        std::upper_bound(order.begin(), order.end(), event.address,
                         [&](std::uint64_t a, std::uint32_t b) { return a < t_.base_blocks[b].address; });
    if (after == order.begin()) continue;
    BaseBlock& block = t_.base_blocks[*std::prev(after)];
    const std::uint64_t tail = longest_tail(block);
    if (tail == 0 || block.freed_at <= i) continue;
    const std::uint64_t end = block.address + block.size;
    const BaseSegment* segment = segment_of(block.address);
    if (segment == nullptr || event.address < end || event.address - end > tail ||
        event.address >= segment->address + segment->size)
      continue;
    block.size = event.address - block.address;
    block.exact = true;
    --unsure;
  }
}

void TimelineBuilder::find_reason() {
  for (const BaseBlock& block : t_.base_blocks) t_.unrecorded += block.size;
  if (t_.unrecorded == 0) return;
  if (t_.count == 0) {
    t_.reason = UnrecordedReason::NotRecording;
    return;
  }
  // A ring that lost events still left its stacks in the blocks; blocks from before the recording have none.
  const auto full_ring = [](std::uint64_t n) { return n >= 1000 && (n % 1000 == 0 || (n & (n - 1)) == 0); };
  if (events_have_stacks_ && base_with_stack_ + base_without_stack_ > 0) {
    t_.reason = base_with_stack_ >= base_without_stack_ ? UnrecordedReason::Overflow : UnrecordedReason::NotRecording;
    if (full_ring(t_.count) || cut_) t_.reason = UnrecordedReason::Overflow;
  } else if (full_ring(t_.count) || cut_) {
    t_.reason = UnrecordedReason::Overflow;
  } else {
    t_.reason = UnrecordedReason::Unknown;
  }
}

/// The layout at the start of the recording. Returns through `note` what does not fit.
void lay_base(const DeviceTimeline& t, BlockLayout& layout, const std::function<void(const char*)>& note,
              const std::function<void(std::uint32_t, std::uint64_t)>& sized = {}) {
  const auto check = [&](const BlockLayout::Outcome& outcome) {
    if (outcome.violation != nullptr) note(outcome.violation);
  };
  for (const BaseSegment& segment : t.base_segments) {
    if (segment.expandable) check(layout.map(segment.address, segment.size, segment.stream, segment.pool));
    else check(layout.add_segment(segment.address, segment.size, segment.stream, segment.pool, false, segment.large));
  }
  // Exactly known blocks first; one address may be listed again by an old block that was freed before.
  for (std::uint32_t i = 0; i < t.base_blocks.size(); ++i) {
    const BaseBlock& block = t.base_blocks[i];
    const BlockLayout::Outcome outcome = layout.allocate(block.address, block.requested, i | kBaseFlag, block.size);
    check(outcome);
    if (sized) sized(i, outcome.bytes);
    if (block.pending) check(layout.request_free(block.address));
  }
}

BlockLayout::Outcome apply_event(BlockLayout& layout, const AllocatorEvent& event, std::uint32_t index,
                                 bool completes_on_request) {
  switch (event.action) {
    case AllocatorAction::Alloc:
      return layout.allocate(event.address, event.size, index);
    case AllocatorAction::FreeRequested:
      return completes_on_request ? layout.complete_free(event.address) : layout.request_free(event.address);
    case AllocatorAction::FreeCompleted:
      return layout.complete_free(event.address);
    case AllocatorAction::SegmentAlloc:
      return layout.add_segment(event.address, event.size, event.stream, event.pool, false, event.size > kSmallSegment);
    case AllocatorAction::SegmentFree:
      return layout.remove_segment(event.address, event.size);
    case AllocatorAction::SegmentMap:
      return layout.map(event.address, event.size, event.stream, event.pool);
    case AllocatorAction::SegmentUnmap:
      return layout.unmap(event.address, event.size);
    default:
      return {};
  }
}

void TimelineBuilder::play_forward() {
  BlockLayout layout(t_.settings);
  const auto bury = [&](std::uint32_t event) {
    for (const std::uint32_t owner : layout.lost) {
      if ((owner & kBaseFlag) != 0) t_.base_blocks[owner & ~kBaseFlag].freed_at = event;
      else t_.freed_at[owner] = event;
    }
    layout.lost.clear();
  };
  lay_base(
      t_, layout, [&](const char* what) { violation(kNever, fmt::format("at the start of the recording: {}", what)); },
      [&](std::uint32_t i, std::uint64_t bytes) { t_.base_blocks[i].size = bytes; });
  for (const std::uint32_t owner : layout.lost) t_.base_blocks[owner & ~kBaseFlag].size = 0;
  layout.lost.clear();
  t_.unrecorded = layout.allocated() + layout.pending();
  t_.base_allocated = layout.allocated();
  t_.base_reserved = layout.reserved();
  t_.base_pending = layout.pending();
  t_.peak_allocated = layout.allocated();
  t_.reserved_at_peak = layout.reserved();
  t_.peak_reserved = layout.reserved();
  t_.size_of.assign(t_.count, 0);
  t_.freed_at.assign(t_.count, kNever);
  for (BaseBlock& block : t_.base_blocks) block.freed_at = kNever;  // from here on the layout says it
  bool above = layout.allocated() + layout.pending() > layout.reserved();
  if (above && !t_.base_segments.empty())
    violation(kNever, "at the start of the recording more is allocated than reserved");
  for (std::uint32_t i = 0; i < t_.count; ++i) {
    const AllocatorEvent& event = t_.event(i);
    const BlockLayout::Outcome outcome = apply_event(layout, event, i, t_.completes_on_request);
    const bool frees = event.action == AllocatorAction::FreeRequested || event.action == AllocatorAction::FreeCompleted;
    t_.size_of[i] = frees && outcome.owner == BlockLayout::kNone ? 0 : outcome.bytes;
    if (outcome.owner != BlockLayout::kNone) {
      if ((outcome.owner & kBaseFlag) != 0) t_.base_blocks[outcome.owner & ~kBaseFlag].freed_at = i;
      else t_.freed_at[outcome.owner] = i;
    }
    if (outcome.violation != nullptr) violation(i, outcome.violation);
    if (!layout.lost.empty()) bury(i);
    if (layout.allocated() > t_.peak_allocated) {
      t_.peak_allocated = layout.allocated();
      t_.peak_event = i;
      t_.reserved_at_peak = layout.reserved();
    }
    if (layout.reserved() > t_.peak_reserved) {
      t_.peak_reserved = layout.reserved();
      t_.peak_reserved_event = i;
    }
    const bool now_above = layout.allocated() + layout.pending() > layout.reserved();
    if (now_above && !above) violation(i, "more is allocated than reserved");
    above = now_above;
  }
  t_.final_allocated = layout.allocated();
  t_.final_reserved = layout.reserved();
  t_.final_pending = layout.pending();
}

void TimelineBuilder::compare_end() {
  std::uint64_t allocated = 0, reserved = 0;
  bool any = false;
  for (const trace::AllocatorSegment& segment : snapshot_.segments) {
    if (segment.device != t_.device) continue;
    any = true;
    reserved += segment.total;
    std::uint64_t in_blocks = 0, used = 0;
    for (std::uint32_t b = segment.first_block; b < segment.first_block + segment.block_count; ++b) {
      in_blocks += snapshot_.blocks[b].size;
      if (snapshot_.blocks[b].state == trace::BlockState::Allocated) used += snapshot_.blocks[b].size;
    }
    allocated += used;
    if (segment.block_count > 0 && in_blocks != segment.total)
      violation(kNever, fmt::format("segment 0x{:x} of {} bytes lists blocks of {} bytes", segment.address,
                                    segment.total, in_blocks));
    if (segment.allocated != 0 && segment.block_count > 0 && segment.allocated != used)
      violation(kNever, fmt::format("segment 0x{:x} says {} bytes are allocated, its blocks say {}", segment.address,
                                    segment.allocated, used));
  }
  if (!any) return;
  if (allocated != t_.final_allocated)
    violation(kNever, fmt::format("the events end with {} bytes allocated, the segments show {}", t_.final_allocated,
                                  allocated));
  if (reserved != t_.final_reserved)
    violation(kNever,
              fmt::format("the events end with {} bytes reserved, the segments show {}", t_.final_reserved, reserved));
}

}  // namespace

std::vector<DeviceTimeline> compute_timelines(const trace::AllocatorSnapshot& snapshot) {
  const AllocatorSettings settings = settings_of(snapshot.settings);
  std::map<std::int32_t, trace::DeviceEvents> devices;
  for (const trace::DeviceEvents& events : snapshot.devices)
    if (events.count > 0) devices[events.device] = events;
  for (const trace::AllocatorSegment& segment : snapshot.segments)
    devices.try_emplace(segment.device, trace::DeviceEvents{segment.device, 0, 0});
  std::vector<DeviceTimeline> timelines;
  for (const auto& [device, events] : devices) timelines.push_back(TimelineBuilder(snapshot, events, settings).build());
  return timelines;
}

void play(const DeviceTimeline& timeline, const std::function<bool(std::uint32_t, const BlockLayout&)>& visit) {
  BlockLayout layout(timeline.settings);
  lay_base(timeline, layout, [](const char*) {});
  if (!visit(kNever, layout)) return;
  for (std::uint32_t i = 0; i < timeline.count; ++i) {
    apply_event(layout, timeline.event(i), i, timeline.completes_on_request);
    if (!visit(i, layout)) return;
  }
}

Curve compute_curve(const DeviceTimeline& t, std::uint32_t from, std::uint32_t to, std::size_t limit) {
  // In each bucket the lowest and the highest point of allocated are kept, in order, so that no peak is lost.
  Curve curve;
  const std::uint32_t length = to > from ? to - from : 0;
  const std::size_t buckets = std::max<std::size_t>(1, limit / 2);
  const std::uint32_t width = static_cast<std::uint32_t>(std::max<std::size_t>(1, (length + buckets - 1) / buckets));
  std::uint64_t allocated = t.base_allocated, reserved = t.base_reserved;
  struct Point {
    std::uint32_t event;
    std::uint64_t allocated, reserved;
  };
  Point low{}, high{};
  bool open = false;
  const auto flush = [&] {
    if (!open) return;
    Point first = low, second = high;
    if (second.event < first.event) std::swap(first, second);
    for (const Point& point : {first, second}) {
      if (!curve.event.empty() && curve.event.back() == point.event) continue;
      curve.event.push_back(point.event);
      curve.allocated.push_back(point.allocated);
      curve.reserved.push_back(point.reserved);
    }
    open = false;
  };
  play(t, [&](std::uint32_t i, const BlockLayout& layout) {
    if (i == kNever || i < from) return true;
    if (i >= to) return false;
    allocated = layout.allocated();
    reserved = layout.reserved();
    if (!open || allocated < low.allocated) low = {i, allocated, reserved};
    if (!open || allocated > high.allocated) high = {i, allocated, reserved};
    open = true;
    if ((i - from) % width == width - 1) flush();
    return true;
  });
  flush();
  return curve;
}

}  // namespace memfit::analysis
