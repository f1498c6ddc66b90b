// PyTorch's CUDA caching allocator as a simulation: the same requests in the same order take, split, keep and give back
// memory by the same rules, under any settings and on a device of any size.
// Its rules are those of c10/cuda/CUDACachingAllocator (2.11 to 2.14): rounding, a small and a large pool per stream
// and private pool, best fit by size then address, splitting, max_split_size, expandable segments, garbage collection
// by age, releasing oversize blocks and then everything unsplit before giving up. Not here: real memory; where requests
// come from (replay.h). Threads: one. Cost: one balanced-tree operation per allocation and per free.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "memfit/analysis/allocator_settings.h"

namespace memfit::analysis {

/// What stands for cudaMalloc and cuMemCreate.
class DeviceModel {
 public:
  virtual ~DeviceModel() = default;
  /// Returns: the address of new memory, or 0 when the device has not enough.
  virtual std::uint64_t allocate(std::uint64_t size) = 0;
  virtual void free(std::uint64_t address, std::uint64_t size) = 0;
  /// Physical memory for a mapped range of an expandable segment.
  virtual bool map(std::uint64_t size) = 0;
  virtual void unmap(std::uint64_t size) = 0;
  /// Address space of a new expandable segment.
  virtual std::uint64_t reserve(std::uint64_t size) = 0;
  /// Bytes of address space an expandable segment reserves.
  virtual std::uint64_t span() const = 0;
};

/// A device with `capacity` bytes for this process; kUnlimited never refuses.
class SizedDevice : public DeviceModel {
 public:
  static constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 60;
  explicit SizedDevice(std::uint64_t capacity) : capacity_(capacity) {}
  std::uint64_t allocate(std::uint64_t size) override;
  void free(std::uint64_t address, std::uint64_t size) override;
  bool map(std::uint64_t size) override;
  void unmap(std::uint64_t size) override { used_ -= size; }
  std::uint64_t reserve(std::uint64_t size) override;
  std::uint64_t span() const override;
  std::uint64_t used() const { return used_; }

 private:
  std::uint64_t capacity_;
  std::uint64_t used_ = 0;
  std::uint64_t next_ = std::uint64_t{1} << 40;
  std::multimap<std::uint64_t, std::uint64_t> holes_;  // size -> address, reused exactly
};

class CachingAllocator {
 public:
  enum class State : std::uint8_t { Free, Used, Pending, Unmapped };
  struct Range;  // a segment or an expandable segment's address space
  struct Block {
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t requested = 0;
    std::uint64_t born = 0;  // call count of its pool when it became free
    Block* prev = nullptr;
    Block* next = nullptr;
    Range* range = nullptr;
    std::uint32_t event = 0xffffffff;  // for the caller
    State state = State::Free;
  };
  struct Range {
    std::uint64_t begin = 0;
    std::uint64_t size = 0;
    std::uint64_t granule = 0;  // of an expandable segment
    std::uint32_t pool = 0;     // 2 * private pool + small
    std::uint16_t stream = 0;
    bool expandable = false;
  };
  enum class Change : std::uint8_t { SegmentAlloc, SegmentFree, Map, Unmap };
  using Observer = std::function<void(Change, std::uint64_t address, std::uint64_t size)>;

  CachingAllocator(const AllocatorSettings& settings, DeviceModel& device);
  ~CachingAllocator();
  CachingAllocator(const CachingAllocator&) = delete;
  CachingAllocator& operator=(const CachingAllocator&) = delete;

  /// Cap of set_per_process_memory_fraction in bytes; turns garbage collection on.
  void set_limit(std::uint64_t bytes) { limit_ = bytes; }
  void set_observer(Observer observer) { observer_ = std::move(observer); }
  /// Called where the allocator waits for all streams before it gives memory back: complete pending frees there.
  void set_on_sync(std::function<void()> on_sync) { on_sync_ = std::move(on_sync); }

  /// Returns: the block, or nullptr when the device is out of memory.
  Block* allocate(std::uint64_t requested, std::uint16_t stream, std::uint16_t pool);
  /// Would a cached block serve this request?
  bool would_hit(std::uint64_t requested, std::uint16_t stream, std::uint16_t pool);
  void request_free(Block* block);  // no longer allocated, not yet free for others
  void complete_free(Block* block);
  void empty_cache();
  /// The private pool belongs to no graph any more: its memory may be given back.
  void retire_pool(std::uint16_t pool) { retired_.insert(pool); }

  // Starting from a recorded state: segments, then their used blocks in order of address.
  void adopt_segment(std::uint64_t address, std::uint64_t size, std::uint16_t stream, std::uint16_t pool, bool small);
  /// Mapped ranges that belong to one expandable segment of `span` bytes from `begin`.
  void adopt_expandable(std::uint64_t begin, std::uint64_t span, std::uint16_t stream, std::uint16_t pool, bool small,
                        const std::vector<std::pair<std::uint64_t, std::uint64_t>>& mapped);
  /// Returns: the block, or nullptr when [address, address + size) is not free.
  Block* adopt_block(std::uint64_t address, std::uint64_t size, std::uint64_t requested);

  std::uint64_t reserved() const { return reserved_; }
  std::uint64_t allocated() const { return allocated_; }
  std::uint64_t pending() const { return pending_; }
  std::uint64_t retries() const { return retries_; }
  std::uint64_t largest_free() const;
  void check_invariants() const;

 private:
  struct BySize {
    bool operator()(const Block* a, const Block* b) const;
  };
  struct ByAddress {
    bool operator()(const Block* a, const Block* b) const;
  };
  struct Pool {
    std::set<Block*, BySize> free;
    std::set<Block*, ByAddress> unmapped;
    std::uint64_t calls = 0;
    bool small = false;
  };

  Pool& pool_at(std::uint32_t index);
  Block* new_block(Range* range, std::uint64_t address, std::uint64_t size, State state);
  void delete_block(Block* block);
  Range* new_range(const Range& range);
  void delete_range(Range* range);
  void put_free(Pool& pool, Block* block);
  bool collects() const { return limit_ != 0 && settings_.garbage_collection_threshold > 0; }
  std::set<Block*, BySize>::iterator find_fit(Pool& pool, std::uint64_t size, std::uint16_t stream);
  Block* grow(Pool& pool, std::uint32_t pool_index, std::uint64_t size, std::uint16_t stream);
  Block* expand(Pool& pool, std::uint32_t pool_index, std::uint64_t size, std::uint16_t stream);
  Block* find_expandable(Pool& pool, std::uint32_t pool_index, std::uint64_t size, std::uint16_t stream);
  Block* map_block(Pool& pool, Block* block, std::uint64_t size);
  void unmap_block(Pool& pool, Block* block);
  void carve(Pool& pool, Block* block, std::uint64_t size);
  void absorb(Pool& pool, Block* block, Block* neighbour);
  void release_segment(Pool& pool, Block* block);
  void release_pool(Pool& pool);
  void release_cached();
  bool release_oversize(Pool& pool, std::uint64_t size, std::uint16_t stream);
  void collect_garbage();
  void tell(Change change, std::uint64_t address, std::uint64_t size) {
    if (observer_) observer_(change, address, size);
  }

  AllocatorSettings settings_;
  DeviceModel& device_;
  Observer observer_;
  std::function<void()> on_sync_;
  std::vector<std::unique_ptr<Pool>> pools_;  // 2 * private pool + small
  std::set<std::uint16_t> retired_;
  std::vector<std::unique_ptr<Block[]>> block_store_;
  std::vector<Block*> spare_blocks_;
  std::set<Range*> ranges_;
  std::map<std::uint64_t, Block*> heads_;  // first block of each range, for adoption and checks
  Block* adopted_ = nullptr;               // the last adopted block: the next one usually stands behind it
  std::uint64_t limit_ = 0;
  std::uint64_t reserved_ = 0, allocated_ = 0, pending_ = 0, retries_ = 0;
};

}  // namespace memfit::analysis
