// Anonymous memory of the operating system, and address ranges that stand for evicted tensors.
// Not here: counting and limits (memory/).
// Threads: any, each call stands alone; FaultHandler is installed once per process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memfit::device {

/// Bytes of a page of the operating system (4096 on x86-64).
std::size_t page_bytes();

/// Map `bytes` (a multiple of page_bytes) of zeroed memory, aligned to 2 MiB and offered to huge pages when it is that
/// large. Returns nullptr when the system has none. Cost: one or two system calls; pages are made at first touch.
void* map_pages(std::size_t bytes);
/// Give pages back; resident memory falls at once.
void unmap_pages(void* address, std::size_t bytes) noexcept;
/// Change a mapping's size, keeping its first min(old, new) bytes and their resident pages; may move.
/// Returns nullptr when the system refuses; the old mapping is then unchanged.
void* remap_pages(void* address, std::size_t old_bytes, std::size_t new_bytes) noexcept;
/// Zero-cost loss of content: the pages go back to the system, the addresses stay.
void discard_pages(void* address, std::size_t bytes) noexcept;

/// Addresses without memory: an evicted tensor's data pointer lies in one, so that a raw read is noticed as a fault.
class AddressReservation {
 public:
  static AddressReservation& instance();
  /// A range of at least `bytes` inaccessible addresses that knows its `owner`; nullptr when addresses have run out.
  void* reserve(std::size_t bytes, void* owner);
  /// The range back. If it was made accessible its pages are given back first.
  void release(void* address) noexcept;
  /// Make the range ordinary zeroed memory. Returns false when the system refuses.
  bool make_accessible(void* address) noexcept;
  bool contains(const void* address) const noexcept;
  /// Owner of the range that `address` lies in, nullptr if none. `start` gets the range's first address.
  void* owner_of(const void* address, void** start) const noexcept;

 private:
  AddressReservation();
  struct Slots;
  Slots* slots_ = nullptr;
  char* base_ = nullptr;
};

/// Calls `on_fault(address)` when a thread touches an address of the reservation; true means: made accessible, retry.
/// Other faults go to the handler that was there before. Async-signal rules: the fault is synchronous in the thread
/// that read a tensor's bytes, so the callback may take locks that such code does not hold.
void install_fault_handler(bool (*on_fault)(void* address));

}  // namespace memfit::device
