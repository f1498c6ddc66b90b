// Pages for large blocks: one range of addresses in which freed neighbours join, so that pages once touched serve
// requests of any size without being faulted in and zeroed again.
// Note [Warm and cold]
//   A free piece is warm (its pages are resident, kept for the next request) or cold (addresses with nothing behind them). Warm pieces join
//   warm neighbours, cold ones cold. Discarding turns warm into cold and gives the pages back to the system at once.
//   Addresses are plentiful, so nothing is ever lost to fragmentation: a request that no warm piece fits is served cold.
// Not here: limits (memory/cpu_allocator.h). Threads: under the owner's lock. Cost: about 0.3 us a call.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

#include "memfit/device/device.h"

namespace memfit::memory {

class PagePool {
 public:
  explicit PagePool(device::Device& device) : device_(&device) {}
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  /// Take pages from another device from now on. Nothing may have been taken from the old one.
  void set_device(device::Device& device);
  device::Device& device() const { return *device_; }
  /// `bytes` (a multiple of the device's page) of memory. Returns nullptr when the device has not so much left, or not
  /// in one piece: then what is warm may stand in the way.
  void* take(std::uint64_t bytes);
  /// Free it; it becomes warm.
  void give(void* address, std::uint64_t bytes);
  /// Give at least `bytes` of warm pages back to the system, or all there are. Returns how many.
  std::uint64_t discard(std::uint64_t bytes);
  std::uint64_t warm() const { return warm_bytes_; }
  /// Bytes served cold so far: each of their pages costs a fault.
  std::uint64_t served_cold() const { return served_cold_; }
  void check_invariants() const;

 private:
  struct Piece {
    std::uint64_t bytes;
    bool warm;
  };
  using Pieces = std::map<std::uint64_t, Piece>;
  using Sizes = std::set<std::pair<std::uint64_t, std::uint64_t>>;   // bytes, address
  Sizes& sizes(bool warm) { return warm ? warm_ : cold_; }
  void insert(std::uint64_t address, std::uint64_t bytes, bool warm);
  void erase(Pieces::iterator piece);
  bool grow();
  bool commit(std::uint64_t address, std::uint64_t bytes);
  void* carve(std::uint64_t address, std::uint64_t bytes);
  void* take_beside_warm(std::uint64_t bytes);

  Pieces pieces_;
  Sizes warm_;
  Sizes cold_;
  std::uint64_t warm_bytes_ = 0;
  std::uint64_t served_cold_ = 0;
  bool reserved_ = false;
  device::Device* device_;
};

}  // namespace memfit::memory
