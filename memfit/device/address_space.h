// Anonymous memory of the operating system, and address ranges that stand for evicted tensors.
// Not here: counting and limits (memory/).
// Threads: any, each call stands alone; FaultHandler is installed once per process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memfit::device {

/// Bytes of a page of the operating system (4096 on x86-64).
std::size_t page_bytes();

/// Reserve `bytes` of addresses without memory, aligned to 2 MiB. Returns nullptr when there are none.
void* reserve_pages(std::size_t bytes);
/// Make part of a reservation ordinary memory: zeroed, offered to huge pages, made at first touch.
/// Returns false when the system refuses to commit it.
bool open_pages(void* address, std::size_t bytes);
/// The pages go back to the system, the addresses stay; the next touch finds zeros.
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
  std::size_t class_bytes_ = 0;
};

/// Calls `on_fault(address)` when a thread touches an address of the reservation; true means: made accessible, retry.
/// Other faults go to the handler that was there before. Async-signal rules: the fault is synchronous in the thread
/// that read a tensor's bytes, so the callback may take locks that such code does not hold.
void install_fault_handler(bool (*on_fault)(void* address));

}  // namespace memfit::device
