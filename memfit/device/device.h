// A device as memory/ and engine/ see it: addresses, and pages that are put behind them and taken away.
// Implementations: host() here, testing/fake_device.h of any size; a CUDA device commits and releases by its driver's
// virtual memory calls. Not here: counting and limits (memory/), which tensors are whose (engine/).
// Threads: any, each call stands alone.
#pragma once

#include <cstddef>

namespace memfit::device {

class Device {
 public:
  virtual ~Device() = default;
  virtual const char* name() const = 0;
  /// Bytes of the smallest piece that can be committed or released.
  virtual std::size_t page_bytes() const = 0;
  /// `bytes` of addresses with nothing behind them, for as long as the process lives. Returns nullptr when there are
  /// none.
  virtual void* reserve(std::size_t bytes) = 0;
  /// Put memory behind whole pages of a reservation that have none; their content is anything. Returns false, having
  /// done nothing, when the device has not so much left.
  virtual bool commit(void* address, std::size_t bytes) = 0;
  /// The memory behind whole committed pages goes back, their content is lost.
  virtual void release(void* address, std::size_t bytes) noexcept = 0;
};

/// The process's own memory. The operating system makes pages at first touch, so `commit` fails only where it refuses
/// to promise them (ulimit -d, vm.overcommit_memory = 2).
Device& host();

}  // namespace memfit::device
