// The allocator under every CPU tensor: counts requests exactly, holds the limit where memory is taken, keeps freed
// blocks warm for requests of the same size and gives them back to the system when the limit or the peak asks for it.
// Small blocks are pieces of the host's heap, large ones pages of a device::Device.
// Not here: which tensor to evict (engine/evictor.h decides through MemoryPressure).
// Threads: any; one recursive lock, shared with the engine. Cost: about 60 ns for a block that is reused.
#pragma once

#include <c10/core/Allocator.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/memory/block.h"
#include "memfit/memory/page_pool.h"

namespace memfit::memory {

/// A recursive lock that knows how deep its owner is in.
class Lock {
 public:
  void lock() {
    mutex_.lock();
    ++depth_;
  }
  void unlock() {
    --depth_;
    mutex_.unlock();
  }
  /// Only for the owner.
  int depth() const { return depth_; }
  /// The owner lets others in, however deep it is; returns the depth for take_back.
  int lend() {
    const int depth = depth_;
    for (int i = 0; i < depth; ++i) unlock();
    return depth;
  }
  void take_back(int depth) {
    for (int i = 0; i < depth; ++i) lock();
  }

 private:
  std::recursive_mutex mutex_;
  int depth_ = 0;
};

/// What the allocator asks of the one who can free tensors. Called with the lock held.
class MemoryPressure {
 public:
  virtual ~MemoryPressure() = default;
  /// Free at least `bytes` of live blocks if possible. Returns false when nothing more can be freed.
  virtual bool make_room(std::uint64_t bytes) = 0;
  /// The program dropped the storage of `block`. True: the block is kept (its content is still needed).
  virtual bool keep_dropped(Block* block) noexcept = 0;
  /// Throw the out-of-budget error for a request of `bytes`.
  [[noreturn]] virtual void refuse(std::uint64_t bytes) = 0;
};

/// Told of every block that comes and goes, with the lock held. May not touch the allocator.
class BlockObserver {
 public:
  virtual ~BlockObserver() = default;
  virtual void taken(Block* block) noexcept = 0;
  virtual void given(Block* block) noexcept = 0;
};

/// Byte counts of one device. All exact.
struct Ledger {
  std::uint64_t live = 0;            // requested bytes of blocks in use, and of memory adopted from elsewhere
  std::uint64_t cached = 0;          // bytes of blocks kept warm
  std::uint64_t peak = 0;            // highest live + cached
  std::uint64_t peak_live = 0;       // highest live
  std::uint64_t program = 0;         // what live would be without evictions and replays
  std::uint64_t peak_program = 0;
  std::uint64_t allocations = 0;
  std::uint64_t served_cold = 0;     // bytes of large blocks whose pages had to be made
};

class CpuAllocator final : public c10::Allocator {
 public:
  static CpuAllocator& instance();

  c10::DataPtr allocate(std::size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &CpuAllocator::delete_block; }
  void copy_data(void* destination, const void* source, std::size_t count) const override;

  /// Take large blocks from another device than the host: before the first of them. Tests use it.
  void set_device(device::Device& device);
  const device::Device& device() const { return pool_.device(); }
  /// Which tensors have their memory from here.
  static constexpr c10::DeviceType kDeviceType = c10::kCPU;

  /// Make this PyTorch's CPU allocator. Storages that exist stay with the old one.
  void install();

  /// Tensor bytes may never exceed `limit` (0: no limit). Returns the old one. Lowering it below what is live takes
  /// effect with the next allocation.
  std::uint64_t set_limit(std::uint64_t limit);
  std::uint64_t limit() const { return limit_; }
  void set_pressure(MemoryPressure* pressure) { pressure_ = pressure; }
  /// nullptr for none. With the lock held.
  void set_observer(BlockObserver* observer) { observer_ = observer; }

  /// The lock of ledger, blocks and engine. Recursive.
  Lock& lock() { return lock_; }
  const Ledger& ledger() const { return ledger_; }

  /// Allocate a block as `allocate` does. Returns nullptr for 0 bytes. Throws: what MemoryPressure::refuse throws.
  Block* take(std::uint64_t bytes);
  /// Free a block, into the cache if there is room. The storage's owner must be done with it. With the lock held.
  void give(Block* block) noexcept;
  /// Count memory that another allocator owns as live, or no longer. Throws like `take` when it does not fit.
  void adopt(std::uint64_t bytes);
  void disown(std::uint64_t bytes) noexcept;
  /// Storages of the program that are evicted keep counting in Ledger::program.
  void program_grew(std::uint64_t bytes);
  void program_shrank(std::uint64_t bytes) noexcept;

  /// Give cached blocks back to the system until at most `keep` bytes are cached. Returns bytes given back.
  std::uint64_t trim(std::uint64_t keep = 0) noexcept;

  struct Holder {
    std::uint64_t bytes;
    std::string op;
  };
  /// The largest live blocks when the peak was last set (within 0.5 % of it), largest first.
  std::vector<Holder> holders_at_peak() const;
  /// Peaks start anew from what is held now.
  void reset_peaks();
  /// Calls `visit(block)` for each live block, with the lock held.
  template <class Visit>
  void for_each_live(Visit visit) {
    std::lock_guard lock(lock_);
    for (Block* b = live_head_.next; b != &live_head_; b = b->next) visit(b);
  }
  /// In a forked child: no limit, same blocks.
  void detach_after_fork();

  /// For tests only: `allocations` more requests succeed, the `failures` after them are refused as if they did not
  /// fit, then all is as usual. fail_after(0, 0) calls it off.
  void fail_after(std::uint64_t allocations, std::uint64_t failures = 1);
  /// Requests refused by fail_after so far.
  std::uint64_t injected_failures() const { return injected_failures_; }

  static void delete_block(void* data);
  void check_invariants() const;

 private:
  CpuAllocator();
  Block* take_small(std::uint64_t capacity);
  Block* take_large(std::uint64_t capacity, std::uint64_t bytes);
  void keep_under(std::uint64_t top) noexcept;
  void make_way(std::uint64_t bytes);
  std::uint64_t ceiling(std::uint64_t bytes) const;
  void note_live();
  void note_holders();
  [[noreturn]] void refuse(std::uint64_t bytes);
  bool is_to_fail();

  mutable Lock lock_;
  Ledger ledger_;
  std::uint64_t limit_ = 0;
  MemoryPressure* pressure_ = nullptr;
  BlockObserver* observer_ = nullptr;
  static constexpr std::uint64_t kLarge = 64 << 10;      // blocks of at least this come from the page pool
  std::array<Block*, kLarge / 64> small_cache_{};        // by capacity
  std::uint64_t small_cached_ = 0;
  PagePool pool_{device::host()};
  Block live_head_;                               // list of live blocks
  std::uint64_t holders_peak_ = 0;
  bool holders_stale_ = false;
  std::vector<Holder> holders_;
  std::uint64_t succeed_first_ = 0;               // fail_after
  std::uint64_t failures_left_ = 0;
  std::uint64_t injected_failures_ = 0;
};

/// Name of the op that the calling thread is running, for blocks it allocates. Returns the old one.
const char* set_current_op(const char* name);
/// While true, blocks the calling thread allocates are the engine's own. Returns the old value.
bool set_allocating_for_replay(bool on);

}  // namespace memfit::memory
