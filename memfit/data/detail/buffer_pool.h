// Memory of batches: used again where the size is the same, and never more than a bound together with what is in use.
// Not here: the queue. Threads: any (a batch may be dropped by any). Cost: one lock a batch.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::data::detail {

/// One block of memory that holds all fields of a batch.
struct Buffer {
  c10::DataPtr memory;
  Bytes size;
  std::byte* data() const { return static_cast<std::byte*>(memory.get()); }
};

class BufferPool : public std::enable_shared_from_this<BufferPool> {
 public:
  explicit BufferPool(Bytes bound) : bound_(bound) {}

  /// Throws:   what PyTorch's CPU allocator throws.
  Buffer take(Bytes size);
  /// Of a batch that was never handed out.
  void give_back(Buffer buffer) noexcept;
  /// The buffer goes to the program: it no longer counts here until its tensors are gone.
  void hand_out(Bytes size) noexcept;
  /// Kept if it fits beside what is queued, else freed.
  void recycle(Buffer buffer) noexcept;
  /// Free what is kept.
  void trim() noexcept;

  /// Being read or waiting to be taken.
  Bytes in_use() const;
  /// That and what is kept.
  Bytes in_queue() const;
  Bytes peak() const;

 private:
  mutable std::mutex mutex_;
  Bytes bound_, queued_, kept_bytes_, peak_;
  std::vector<Buffer> kept_;
};

}  // namespace memfit::data::detail
