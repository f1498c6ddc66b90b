#include "memfit/data/detail/buffer_pool.h"

#include <algorithm>
#include <new>

namespace memfit::data::detail {

Buffer BufferPool::take(Bytes size) {
  {
    std::lock_guard lock(mutex_);
    const auto fits = std::ranges::find(kept_, size, &Buffer::size);
    if (fits != kept_.end()) {
      Buffer buffer = std::move(*fits);
      kept_.erase(fits);
      kept_bytes_ -= size;
      queued_ += size;
      return buffer;
    }
  }
  trim();  // kept ones are of another size: the bound needs their room
  Buffer buffer{c10::GetAllocator(c10::kCPU)->allocate(size.count()), size};
  std::lock_guard lock(mutex_);
  queued_ += size;
  peak_ = std::max(peak_, queued_ + kept_bytes_);
  return buffer;
}

void BufferPool::give_back(Buffer buffer) noexcept {
  std::lock_guard lock(mutex_);
  queued_ -= buffer.size;
}

void BufferPool::hand_out(Bytes size) noexcept {
  std::lock_guard lock(mutex_);
  queued_ -= size;
}

void BufferPool::recycle(Buffer buffer) noexcept {
  std::lock_guard lock(mutex_);
  if (queued_ + kept_bytes_ + buffer.size > bound_) return;
  const Bytes size = buffer.size;
  try {
    kept_.push_back(std::move(buffer));
  } catch (const std::bad_alloc&) {
    return;  // freed instead of kept
  }
  kept_bytes_ += size;
  peak_ = std::max(peak_, queued_ + kept_bytes_);
}

void BufferPool::trim() noexcept {
  std::vector<Buffer> freed;
  std::lock_guard lock(mutex_);
  freed.swap(kept_);
  kept_bytes_ = {};
}

Bytes BufferPool::in_use() const {
  std::lock_guard lock(mutex_);
  return queued_;
}

Bytes BufferPool::in_queue() const {
  std::lock_guard lock(mutex_);
  return queued_ + kept_bytes_;
}

Bytes BufferPool::peak() const {
  std::lock_guard lock(mutex_);
  return peak_;
}

}  // namespace memfit::data::detail
