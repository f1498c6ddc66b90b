#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "memfit/device/address_space.h"
#include "memfit/device/device.h"

namespace memfit::device {
namespace {

class Host final : public Device {
 public:
  const char* name() const override { return "cpu"; }
  std::size_t page_bytes() const override { return device::page_bytes(); }

  void* reserve(std::size_t bytes) override {
    void* base = reserve_pages(bytes);
    if (base == nullptr) return nullptr;
    const auto begin = reinterpret_cast<std::uintptr_t>(base);
    std::lock_guard lock(mutex_);
    ranges_.push_back({begin, begin + bytes, begin});
    return base;
  }

  // Addresses are opened from the bottom up in large steps, and stay open: what is released is made anew at its next
  // touch. So most calls need nothing of the system.
  bool commit(void* address, std::size_t bytes) override {
    const std::uintptr_t end = reinterpret_cast<std::uintptr_t>(address) + bytes;
    std::lock_guard lock(mutex_);
    const auto range = std::find_if(ranges_.begin(), ranges_.end(), [&](const Range& r) { return end > r.begin && end <= r.end; });
    if (range == ranges_.end()) return false;
    if (end <= range->open) return true;
    const std::uintptr_t to = std::min(range->end, range->open + (end - range->open + kStep - 1) / kStep * kStep);
    if (!open_pages(reinterpret_cast<void*>(range->open), to - range->open)) return false;
    range->open = to;
    return true;
  }

  void release(void* address, std::size_t bytes) noexcept override { discard_pages(address, bytes); }

 private:
  static constexpr std::uintptr_t kStep = std::uintptr_t{64} << 20;
  struct Range {
    std::uintptr_t begin, end, open;  // what lies below `open` is accessible
  };
  std::mutex mutex_;
  std::vector<Range> ranges_;
};

}  // namespace

Device& host() {
  static Host* const one = new Host();  // tensors may outlive everything
  return *one;
}

}  // namespace memfit::device
