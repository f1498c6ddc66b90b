// A hash table from addresses to small numbers: open addressing, erase by shifting back, no tombstones.
// Threads: one. Cost: about one cache miss a call.
#pragma once

#include <cstdint>
#include <vector>

namespace memfit::analysis::detail {

class AddressMap {
 public:
  static constexpr std::uint32_t kNone = 0xffffffff;

  std::uint32_t find(std::uint64_t address) const {
    for (std::size_t i = slot(address);; i = (i + 1) & mask_) {
      if (entries_[i].value == kNone) return kNone;
      if (entries_[i].address == address) return entries_[i].value;
    }
  }
  /// Insert, or change what stands there.
  void set(std::uint64_t address, std::uint32_t value) {
    if ((count_ + 1) * 2 > entries_.size()) grow();
    std::size_t i = slot(address);
    while (entries_[i].value != kNone && entries_[i].address != address) i = (i + 1) & mask_;
    if (entries_[i].value == kNone) ++count_;
    entries_[i] = {address, value};
  }
  void erase(std::uint64_t address) {
    std::size_t i = slot(address);
    for (;; i = (i + 1) & mask_) {
      if (entries_[i].value == kNone) return;
      if (entries_[i].address == address) break;
    }
    --count_;
    for (std::size_t next = (i + 1) & mask_; entries_[next].value != kNone; next = (next + 1) & mask_) {
      const std::size_t home = slot(entries_[next].address);
      if (((next - home) & mask_) >= ((next - i) & mask_)) {
        entries_[i] = entries_[next];
        i = next;
      }
    }
    entries_[i].value = kNone;
  }
  std::size_t size() const { return count_; }
  template <typename F>
  void for_each(F f) const {
    for (const Entry& entry : entries_)
      if (entry.value != kNone) f(entry.address, entry.value);
  }

 private:
  struct Entry {
    std::uint64_t address = 0;
    std::uint32_t value = kNone;
  };
  std::size_t slot(std::uint64_t address) const {
    return static_cast<std::size_t>((address >> 9) * 0x9e3779b97f4a7c15ull ^ address * 0xc2b2ae3d27d4eb4full) >> 20 &
           mask_;
  }
  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    mask_ = entries_.size() - 1;
    count_ = 0;
    for (const Entry& entry : old)
      if (entry.value != kNone) set(entry.address, entry.value);
  }
  std::vector<Entry> entries_{std::vector<Entry>(4096)};
  std::size_t mask_ = 4095;
  std::size_t count_ = 0;
};

}  // namespace memfit::analysis::detail
