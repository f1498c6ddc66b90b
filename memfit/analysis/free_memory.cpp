#include "memfit/analysis/free_memory.h"

#include <algorithm>

#include "memfit/analysis/detail/block_layout.h"

namespace memfit::analysis {
namespace {

using detail::BlockLayout;

/// Takes segments one after another, each as its blocks.
class Counter {
 public:
  explicit Counter(const AllocatorSettings& settings) : settings_(settings) {}

  void begin(std::uint64_t address, std::uint16_t stream, std::uint16_t pool, bool expandable, bool large) {
    begin_ = address;
    stream_ = stream;
    pool_ = pool;
    granule_ = expandable ? (large ? settings_.large_segment : kSmallSegment) : 0;
    free_ = releasable_ = live_ = 0;
    smallest_ = Pin();
    blocks_ = 0;
  }
  void block(std::uint64_t address, std::uint64_t size, bool used, bool pending, std::uint32_t owner,
             trace::StackId stack) {
    ++blocks_;
    out_.reserved += size;
    if (used || pending) {
      (pending ? out_.pending : out_.allocated) += size;
      live_ += size;
      if (smallest_.block_bytes == 0 || size < smallest_.block_bytes) smallest_ = {0, size, 0, owner, stack};
      return;
    }
    free_ += size;
    out_.largest_free = std::max(out_.largest_free, size);
    if (granule_ != 0) {
      const std::uint64_t from = (address - begin_ + granule_ - 1) / granule_ * granule_;
      const std::uint64_t to = (address + size - begin_) / granule_ * granule_;
      if (to > from) releasable_ += to - from;
    }
  }
  void end() {
    if (blocks_ == 0) return;
    ++out_.segments;
    if (granule_ == 0 && live_ == 0) releasable_ = free_;
    const std::uint64_t stuck = free_ - releasable_;
    out_.free_bytes += free_;
    out_.releasable += releasable_;
    out_.stuck += stuck;
    if (stuck == 0) return;
    ++out_.stuck_segments;
    out_.stuck_by_pool[{stream_, pool_}] += stuck;
    smallest_.free_bytes = stuck;
    smallest_.live_bytes = live_;
    out_.pins.push_back(smallest_);
    if (out_.pins.size() > 4096) trim();
  }
  FreeMemory take() {
    trim();
    return std::move(out_);
  }

 private:
  void trim() {
    std::stable_sort(out_.pins.begin(), out_.pins.end(),
                     [](const Pin& a, const Pin& b) { return a.free_bytes > b.free_bytes; });
    if (out_.pins.size() > 10) out_.pins.resize(10);
  }
  AllocatorSettings settings_;
  FreeMemory out_;
  std::uint64_t begin_ = 0, granule_ = 0, free_ = 0, releasable_ = 0, live_ = 0, blocks_ = 0;
  std::uint16_t stream_ = 0, pool_ = 0;
  Pin smallest_;
};

}  // namespace

FreeMemory free_memory_at(const DeviceTimeline& t, std::uint32_t at) {
  Counter counter(t.settings);
  play(t, [&](std::uint32_t i, const BlockLayout& layout) {
    if (i != at) return true;
    for (const auto& [begin, chain] : layout.chains()) {
      counter.begin(begin, chain.stream, chain.pool, chain.expandable, chain.large);
      for (std::uint32_t n = chain.head; n != BlockLayout::kNone; n = layout.node(n).next) {
        const BlockLayout::Node& node = layout.node(n);
        const std::uint32_t owner = node.state == BlockLayout::State::Free ? kNever : node.event;
        trace::StackId stack = trace::kNoStack;
        if (owner != kNever)
          stack = (owner & kBaseFlag) != 0 ? t.base_blocks[owner & ~kBaseFlag].stack : t.event(owner).stack;
        counter.block(node.address, node.size, node.state == BlockLayout::State::Used,
                      node.state == BlockLayout::State::Pending, owner, stack);
      }
      counter.end();
    }
    return false;
  });
  return counter.take();
}

FreeMemory free_memory_at_end(const DeviceTimeline& t) {
  Counter counter(t.settings);
  for (const trace::AllocatorSegment& segment : t.snapshot->segments) {
    if (segment.device != t.device) continue;
    counter.begin(segment.address, segment.stream, segment.pool, segment.expandable, segment.large);
    for (std::uint32_t b = segment.first_block; b < segment.first_block + segment.block_count; ++b) {
      const trace::AllocatorBlock& block = t.snapshot->blocks[b];
      if (block.size == 0) continue;
      counter.block(block.address, block.size, block.state == trace::BlockState::Allocated,
                    block.state == trace::BlockState::PendingFree, kNever, block.stack);
    }
    counter.end();
  }
  return counter.take();
}

}  // namespace memfit::analysis
