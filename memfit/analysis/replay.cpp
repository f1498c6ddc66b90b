#include "memfit/analysis/replay.h"

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>

#include "memfit/analysis/caching_allocator.h"
#include "memfit/analysis/detail/address_map.h"
#include "memfit/analysis/detail/block_layout.h"

namespace memfit::analysis {

using trace::AllocatorAction;
using trace::AllocatorEvent;
using Block = CachingAllocator::Block;
using Change = CachingAllocator::Change;

namespace {

bool is_segment(AllocatorAction action) {
  return action == AllocatorAction::SegmentAlloc || action == AllocatorAction::SegmentFree ||
         action == AllocatorAction::SegmentMap || action == AllocatorAction::SegmentUnmap;
}

bool gives_back(AllocatorAction action) {
  return action == AllocatorAction::SegmentFree || action == AllocatorAction::SegmentUnmap;
}

/// Where the address space of an expandable segment may begin: its front can be unmapped at the start of the recording
/// and be mapped again later, before anything is mapped at its end.
std::uint64_t lowest_address(const DeviceTimeline& t, std::uint16_t stream, std::uint16_t pool, bool small,
                             std::uint64_t known, std::uint64_t span) {
  std::uint64_t floor = known > span ? known - span : 0;
  for (const BaseSegment& segment : t.base_segments)
    if (segment.address < known) floor = std::max(floor, segment.address + segment.size);
  std::uint64_t lowest = known;
  for (std::uint32_t i = 0; i < t.count; ++i) {
    const AllocatorEvent& event = t.event(i);
    if (event.action != AllocatorAction::SegmentMap || event.stream != stream || event.pool != pool) continue;
    if ((event.size == kSmallSegment) == small && event.address >= floor && event.address < lowest)
      lowest = event.address;
  }
  return lowest;
}

/// Puts the state at the start of the recording into an allocator. Returns the base blocks' handles.
std::vector<Block*> adopt_base(const DeviceTimeline& t, CachingAllocator& allocator) {
  struct Key {
    std::uint16_t stream, pool;
    bool small;
    auto operator<=>(const Key&) const = default;
  };
  std::map<Key, std::vector<std::pair<std::uint64_t, std::uint64_t>>> expandable;
  for (const BaseSegment& segment : t.base_segments) {
    if (segment.expandable) {
      auto& pieces = expandable[{segment.stream, segment.pool, !segment.large}];
      if (!pieces.empty() && pieces.back().first + pieces.back().second == segment.address)
        pieces.back().second += segment.size;  // two maps, one range
      else pieces.emplace_back(segment.address, segment.size);
    } else {
      allocator.adopt_segment(segment.address, segment.size, segment.stream, segment.pool, !segment.large);
    }
  }
  constexpr std::uint64_t kSpan = std::uint64_t{1} << 40;
  for (const auto& [key, mapped] : expandable) {
    // Pieces further apart than one reservation are separate ones.
    for (std::size_t i = 0; i < mapped.size();) {
      std::size_t j = i;
      while (j + 1 < mapped.size() && mapped[j + 1].first + mapped[j + 1].second - mapped[i].first <= kSpan) ++j;
      const std::uint64_t begin = lowest_address(t, key.stream, key.pool, key.small, mapped[i].first, kSpan);
      const std::uint64_t span = std::max(kSpan, mapped[j].first + mapped[j].second - begin);
      allocator.adopt_expandable(begin, span, key.stream, key.pool, key.small,
                                 {mapped.begin() + static_cast<long>(i), mapped.begin() + static_cast<long>(j) + 1});
      i = j + 1;
    }
  }
  std::vector<Block*> blocks(t.base_blocks.size(), nullptr);
  std::vector<std::uint32_t> order(t.base_blocks.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return t.base_blocks[a].address < t.base_blocks[b].address; });
  for (const std::uint32_t i : order) {
    const BaseBlock& base = t.base_blocks[i];
    blocks[i] = allocator.adopt_block(base.address, base.size, base.requested);
    if (blocks[i] != nullptr && base.pending) allocator.request_free(blocks[i]);
  }
  return blocks;
}

/// Which alloc each free belongs to.
void link_frees(ReplayProgram& program) {
  const DeviceTimeline& t = *program.timeline;
  program.block_of.assign(t.count, kNever);
  detail::AddressMap live;
  for (std::uint32_t i = 0; i < t.base_blocks.size(); ++i) live.set(t.base_blocks[i].address, i | kBaseFlag);
  for (std::uint32_t i = 0; i < t.count; ++i) {
    const AllocatorEvent& event = t.event(i);
    if (event.action == AllocatorAction::Alloc) {
      live.set(event.address, i);
    } else if (event.action == AllocatorAction::FreeRequested || event.action == AllocatorAction::FreeCompleted) {
      program.block_of[i] = live.find(event.address);
      if (event.action == AllocatorAction::FreeCompleted || t.completes_on_request) live.erase(event.address);
    }
  }
}

/// Old recordings do not name the pool of an event: the segment it falls into does.
void find_pools(ReplayProgram& program) {
  const DeviceTimeline& t = *program.timeline;
  if (t.snapshot->pools.size() <= 1) return;
  bool missing = false;
  for (std::uint32_t i = 0; i < t.count && !missing; ++i)
    missing = t.event(i).action == AllocatorAction::Alloc && !t.event(i).has_pool;
  if (!missing) return;
  program.pool_of.assign(t.count, 0);
  std::unordered_map<std::uint64_t, std::uint16_t> pool_of_segment;
  for (const trace::AllocatorSegment& segment : t.snapshot->segments) pool_of_segment[segment.address] = segment.pool;
  play(t, [&](std::uint32_t i, const detail::BlockLayout& layout) {
    if (i == kNever || t.event(i).action != AllocatorAction::Alloc) return true;
    auto after = layout.chains().upper_bound(t.event(i).address);
    if (after == layout.chains().begin()) return true;
    const auto found = pool_of_segment.find(std::prev(after)->first);
    if (found != pool_of_segment.end()) program.pool_of[i] = found->second;
    return true;
  });
}

std::uint16_t pool_of(const ReplayProgram& program, std::uint32_t i) {
  return program.pool_of.empty() ? program.timeline->event(i).pool : program.pool_of[i];
}

/// Plays the recorded device: answers from the segment events that surround the allocation being replayed.
class RecordedDevice : public DeviceModel {
 public:
  explicit RecordedDevice(const DeviceTimeline& t) : t_(t) {}
  std::deque<std::uint32_t> queue;  // events of the current group that are not explained yet

  std::uint64_t allocate(std::uint64_t size) override {
    if (!queue.empty()) return next() == AllocatorAction::SegmentAlloc ? t_.event(queue.front()).address : 0;
    if (refuse_when_empty) return 0;
    const std::uint64_t address = invented_;
    invented_ += size + kSmallSegment;
    return address;
  }
  void free(std::uint64_t, std::uint64_t) override {}
  bool map(std::uint64_t) override {
    return queue.empty() ? !refuse_when_empty : next() == AllocatorAction::SegmentMap;
  }
  void unmap(std::uint64_t) override {}
  std::uint64_t reserve(std::uint64_t size) override {
    if (!queue.empty() && next() == AllocatorAction::SegmentMap) return t_.event(queue.front()).address;
    const std::uint64_t address = invented_;
    invented_ += size;
    return address;
  }
  std::uint64_t span() const override { return std::uint64_t{1} << 40; }
  AllocatorAction next() const { return t_.event(queue.front()).action; }
  bool refuse_when_empty = false;

 private:
  const DeviceTimeline& t_;
  std::uint64_t invented_ = std::uint64_t{1} << 61;
};

class Validator {
 public:
  Validator(const DeviceTimeline& t, std::optional<std::uint64_t> device_total)
      : t_(t), device_(t), sim_(t.settings, device_) {
    out_.program.timeline = &t;
    link_frees(out_.program);
    find_pools(out_.program);
    if (t.settings.memory_fraction && device_total)
      sim_.set_limit(static_cast<std::uint64_t>(*t.settings.memory_fraction * static_cast<double>(*device_total)));
    base_ = adopt_base(t, sim_);
    blocks_.assign(t.count, nullptr);
    sim_.set_observer([this](Change change, std::uint64_t, std::uint64_t size) { explain(change, size); });
    sim_.set_on_sync([this] { complete_waiting(); });
  }

  ReplayValidation run() {
    recorded_ = t_.base_reserved;
    peak(kNever);
    for (std::uint32_t i = 0; i < t_.count;) i = step(i);
    out_.result.events = t_.count;
    out_.result.retries = sim_.retries();
    return std::move(out_);
  }

 private:
  std::uint32_t step(std::uint32_t i);
  void group(std::uint32_t begin, std::uint32_t end);
  void allocate(std::uint32_t i);
  void explain(Change change, std::uint64_t size);
  void complete_waiting();
  void complete(std::uint32_t i) {
    if (Block* block = block_of(i)) sim_.complete_free(block);
    forget(i);
  }
  Block* block_of(std::uint32_t i) const {
    const std::uint32_t owner = out_.program.block_of[i];
    if (owner == kNever) return nullptr;
    return (owner & kBaseFlag) != 0 ? base_[owner & ~kBaseFlag] : blocks_[owner];
  }
  void forget(std::uint32_t i) {
    const std::uint32_t owner = out_.program.block_of[i];
    if (owner == kNever) return;
    ((owner & kBaseFlag) != 0 ? base_[owner & ~kBaseFlag] : blocks_[owner]) = nullptr;
  }
  void compare(std::uint32_t i) {
    if (sim_.reserved() == recorded_) return;
    ++out_.result.differ;
    if (out_.result.first_difference == kNever) out_.result.first_difference = i;
  }
  void peak(std::uint32_t i) {
    if (sim_.reserved() > out_.result.reserved_peak) {
      out_.result.reserved_peak = sim_.reserved();
      out_.result.reserved_peak_event = i;
    }
    out_.result.allocated_peak = std::max(out_.result.allocated_peak, sim_.allocated());
  }
  void record(std::uint32_t i) {  // what the recording says event i did
    const AllocatorAction action = t_.event(i).action;
    if (action == AllocatorAction::SegmentAlloc || action == AllocatorAction::SegmentMap) recorded_ += t_.size_of[i];
    if (gives_back(action)) recorded_ -= std::min(recorded_, t_.size_of[i]);
  }

  const DeviceTimeline& t_;
  RecordedDevice device_;
  CachingAllocator sim_;
  ReplayValidation out_;
  std::vector<Block*> base_, blocks_;
  std::uint64_t recorded_ = 0;
  std::vector<std::uint16_t> retired_;
};

/// The simulator took or gave back memory: the next event of the group should say the same.
void Validator::explain(Change change, std::uint64_t size) {
  static constexpr AllocatorAction kSame[] = {AllocatorAction::SegmentAlloc, AllocatorAction::SegmentFree,
                                              AllocatorAction::SegmentMap, AllocatorAction::SegmentUnmap};
  if (device_.queue.empty() || device_.next() != kSame[static_cast<int>(change)])
    return;  // compared at the group's end
  const std::uint32_t i = device_.queue.front();
  device_.queue.pop_front();
  record(i);
  peak(i);
  if (t_.event(i).size != size || sim_.reserved() != recorded_) compare(i);
}

/// The allocator waits for all streams: the recording's completed frees come now.
void Validator::complete_waiting() {
  while (!device_.queue.empty() && device_.next() == AllocatorAction::FreeCompleted) {
    const std::uint32_t i = device_.queue.front();
    device_.queue.pop_front();
    complete(i);
    compare(i);
  }
}

void Validator::allocate(std::uint32_t i) {
  const AllocatorEvent& event = t_.event(i);
  if (event.action == AllocatorAction::OutOfMemory) {
    device_.refuse_when_empty = true;
    Block* block = sim_.allocate(event.size, event.stream, pool_of(out_.program, i));
    device_.refuse_when_empty = false;
    if (block != nullptr) sim_.complete_free(block);  // the recording failed where the policy found room
    else if (!out_.result.oom) {
      out_.result.oom = true;
      out_.result.oom_event = i;
      out_.result.oom_requested = event.size;
      out_.result.oom_reserved = sim_.reserved();
      out_.result.oom_free_bytes = sim_.reserved() - sim_.allocated() - sim_.pending();
      out_.result.oom_largest_free = sim_.largest_free();
    }
  } else {
    blocks_[i] = sim_.allocate(event.size, event.stream, pool_of(out_.program, i));
  }
}

/// Events [begin, end): memory taken, given back and frees completed, up to the event `end` that they belong to.
void Validator::group(std::uint32_t begin, std::uint32_t end) {
  for (std::uint32_t i = begin; i < end; ++i) {
    device_.queue.push_back(i);
    const AllocatorEvent& event = t_.event(i);
    if (gives_back(event.action) && event.pool != 0 &&
        std::find(retired_.begin(), retired_.end(), event.pool) == retired_.end()) {
      retired_.push_back(event.pool);
      sim_.retire_pool(event.pool);
      out_.program.retired_pools.emplace_back(begin, event.pool);
    }
  }
  const bool serves = end < t_.count && (t_.event(end).action == AllocatorAction::Alloc ||
                                         t_.event(end).action == AllocatorAction::OutOfMemory);
  const bool starts_giving = gives_back(t_.event(begin).action);
  if (starts_giving &&
      (!serves || sim_.would_hit(t_.event(end).size, t_.event(end).stream, pool_of(out_.program, end)))) {
    out_.program.empty_caches.push_back(begin);
    sim_.empty_cache();
  }
  if (serves) allocate(end);
  while (!device_.queue.empty()) {  // what the policy did not do
    const std::uint32_t i = device_.queue.front();
    device_.queue.pop_front();
    record(i);
    if (t_.event(i).action == AllocatorAction::FreeCompleted) complete(i);
    compare(i);
  }
}

std::uint32_t Validator::step(std::uint32_t i) {
  const AllocatorEvent& event = t_.event(i);
  if (is_segment(event.action)) {
    std::uint32_t end = i;
    while (end < t_.count &&
           (is_segment(t_.event(end).action) || t_.event(end).action == AllocatorAction::FreeCompleted))
      ++end;
    // Completed frees behind the last segment event are events of their own.
    const bool serves = end < t_.count && (t_.event(end).action == AllocatorAction::Alloc ||
                                           t_.event(end).action == AllocatorAction::OutOfMemory);
    if (!serves)
      while (end > i + 1 && !is_segment(t_.event(end - 1).action)) --end;
    group(i, end);
    if (!serves) return end;
    peak(end);
    compare(end);
    return end + 1;
  }
  switch (event.action) {
    case AllocatorAction::Alloc:
    case AllocatorAction::OutOfMemory:
      allocate(i);
      break;
    case AllocatorAction::FreeRequested:
      if (t_.completes_on_request) complete(i);
      else if (Block* block = block_of(i)) sim_.request_free(block);
      break;
    case AllocatorAction::FreeCompleted:
      complete(i);
      break;
    default:
      break;
  }
  peak(i);
  compare(i);
  return i + 1;
}

}  // namespace

ReplayValidation validate_replay(const DeviceTimeline& timeline, std::optional<std::uint64_t> device_total) {
  return Validator(timeline, device_total).run();
}

ReplayResult predict(const ReplayProgram& program, const WhatIf& what) {
  const DeviceTimeline& t = *program.timeline;
  SizedDevice device(what.capacity.value_or(SizedDevice::kUnlimited));
  CachingAllocator sim(what.settings, device);
  if (what.settings.memory_fraction) {
    if (const auto total = what.device_total ? what.device_total : what.capacity)
      sim.set_limit(static_cast<std::uint64_t>(*what.settings.memory_fraction * static_cast<double>(*total)));
  }
  ReplayResult result;
  std::vector<Block*> base(t.base_blocks.size(), nullptr), blocks(t.count, nullptr);
  std::vector<std::uint32_t> waiting;  // owners whose free is requested and not completed
  const auto slot = [&](std::uint32_t owner) -> Block*& {
    return (owner & kBaseFlag) != 0 ? base[owner & ~kBaseFlag] : blocks[owner];
  };
  const auto complete = [&](std::uint32_t owner) {
    Block*& block = slot(owner);
    if (block != nullptr) sim.complete_free(block);
    block = nullptr;
  };
  sim.set_on_sync([&] {
    for (const std::uint32_t owner : waiting) complete(owner);  // those already complete are null
    waiting.clear();
  });
  const auto fail = [&](std::uint32_t i, std::uint64_t requested) {
    result.oom = true;
    result.oom_event = i;
    result.oom_requested = requested;
    result.oom_reserved = sim.reserved();
    result.oom_free_bytes = sim.reserved() - sim.allocated() - sim.pending();
    result.oom_largest_free = sim.largest_free();
  };
  const auto peak = [&](std::uint32_t i) {
    if (sim.reserved() > result.reserved_peak) {
      result.reserved_peak = sim.reserved();
      result.reserved_peak_event = i;
    }
    if (sim.allocated() > result.allocated_peak) result.allocated_peak = sim.allocated();
  };
  const auto left_out = [&](trace::StackId stack) { return what.without != nullptr && (*what.without)[stack]; };
  // What was live before the recording is asked for again, in order of address: its own history is not known.
  std::vector<std::uint32_t> order(t.base_blocks.size());
  for (std::uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](std::uint32_t a, std::uint32_t b) { return t.base_blocks[a].address < t.base_blocks[b].address; });
  for (const std::uint32_t i : order) {
    const BaseBlock& block = t.base_blocks[i];
    if (block.size == 0 || left_out(block.stack)) continue;
    base[i] = sim.allocate(block.requested != 0 ? block.requested : block.size, block.stream, block.pool);
    peak(kNever);
    if (base[i] == nullptr) {
      fail(kNever, block.requested);
      return result;
    }
    if (block.pending) {
      sim.request_free(base[i]);
      waiting.push_back(i | kBaseFlag);
    }
  }
  std::size_t next_empty = 0, next_retired = 0;
  for (std::uint32_t i = 0; i < t.count && !result.oom; ++i) {
    const AllocatorEvent& event = t.event(i);
    while (next_retired < program.retired_pools.size() && program.retired_pools[next_retired].first <= i)
      sim.retire_pool(program.retired_pools[next_retired++].second);
    if (next_empty < program.empty_caches.size() && program.empty_caches[next_empty] <= i) {
      ++next_empty;
      sim.empty_cache();
    }
    switch (event.action) {
      case AllocatorAction::Alloc:
      case AllocatorAction::OutOfMemory: {
        if (left_out(event.stack)) break;
        Block* block = sim.allocate(event.size, event.stream, pool_of(program, i));
        peak(i);
        if (block == nullptr) fail(i, event.size);
        else if (event.action == AllocatorAction::OutOfMemory)
          sim.complete_free(block);  // what it would have been used for is not recorded
        else blocks[i] = block;
        break;
      }
      case AllocatorAction::FreeRequested: {
        const std::uint32_t owner = program.block_of[i];
        if (owner == kNever || slot(owner) == nullptr) break;
        if (t.completes_on_request) {
          complete(owner);
        } else {
          sim.request_free(slot(owner));
          // Almost always its completion is the next event.
          if (i + 1 >= t.count || program.block_of[i + 1] != owner) waiting.push_back(owner);
        }
        break;
      }
      case AllocatorAction::FreeCompleted: {
        const std::uint32_t owner = program.block_of[i];
        if (owner == kNever) break;
        complete(owner);
        break;
      }
      default:
        break;
    }
    ++result.events;
  }
  result.retries = sim.retries();
  return result;
}

std::optional<std::uint64_t> usable_at_oom(const DeviceTimeline& timeline) {
  std::optional<std::uint64_t> usable;
  std::uint64_t reserved = timeline.base_reserved;
  for (std::uint32_t i = 0; i < timeline.count; ++i) {
    const AllocatorEvent& event = timeline.event(i);
    if (event.action == AllocatorAction::SegmentAlloc || event.action == AllocatorAction::SegmentMap)
      reserved += timeline.size_of[i];
    else if (gives_back(event.action)) reserved -= std::min(reserved, timeline.size_of[i]);
    else if (event.action == AllocatorAction::OutOfMemory && event.address < (std::uint64_t{1} << 50))
      usable = reserved + event.address;
  }
  return usable;
}

std::vector<Candidate> search_settings(const ReplayProgram& program, const WhatIf& base) {
  std::vector<AllocatorSettings> tries;
  const auto add = [&](auto change) {
    AllocatorSettings settings = base.settings;
    change(settings);
    if (settings == base.settings || std::find(tries.begin(), tries.end(), settings) != tries.end()) return;
    tries.push_back(settings);
  };
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  add([](AllocatorSettings& s) {
    s.expandable_segments = true;
    s.max_split_size = kNoSplitLimit;
  });
  for (const std::uint64_t split : {64, 128, 256, 512, 1024})
    add([&](AllocatorSettings& s) {
      s.max_split_size = split * kMiB;
      s.expandable_segments = false;
    });
  for (const std::uint32_t divisions : {2u, 4u, 8u, 16u})
    add([&](AllocatorSettings& s) { s.roundup_power2_divisions.fill(divisions); });
  add([](AllocatorSettings& s) { s.roundup_power2_divisions.fill(0); });
  add([](AllocatorSettings& s) { s.max_split_size = kNoSplitLimit; });
  if (base.settings.memory_fraction)  // without a fraction it does nothing
    for (const double threshold : {0.6, 0.8})
      add([&](AllocatorSettings& s) { s.garbage_collection_threshold = threshold; });
  std::vector<Candidate> candidates;
  for (const AllocatorSettings& settings : tries) {
    WhatIf what = base;
    what.settings = settings;
    candidates.push_back({settings, predict(program, what)});
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    if (a.result.oom != b.result.oom) return b.result.oom;
    if (a.result.oom) return a.result.oom_event > b.result.oom_event;
    return a.result.reserved_peak < b.result.reserved_peak;
  });
  return candidates;
}

}  // namespace memfit::analysis
