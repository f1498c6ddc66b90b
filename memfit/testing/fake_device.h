// A device of any size for tests: host memory, of which no more than so many bytes can be committed at once, and whose
// fresh pages hold rubbish. Checks that whole pages are committed once and released once.
// Threads: any. Cost: a page is written when it is committed.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "memfit/device/address_space.h"
#include "memfit/device/device.h"

namespace memfit::testing {

class FakeDevice final : public device::Device {
 public:
  explicit FakeDevice(std::uint64_t bytes, std::size_t page_bytes = 4096) : bytes_(bytes), page_(page_bytes) {}

  const char* name() const override { return "fake"; }
  std::size_t page_bytes() const override { return page_; }
  void* reserve(std::size_t bytes) override { return device::reserve_pages(bytes); }

  bool commit(void* address, std::size_t bytes) override {
    std::lock_guard lock(mutex_);
    if (committed() + bytes > bytes_) {
      ++refused_;
      return false;
    }
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    for (std::uintptr_t page = begin; page < begin + bytes; page += page_)
      require(page % page_ == 0 && pages_.insert(page).second, "a page was committed twice");
    if (!device::open_pages(address, bytes)) return false;
    std::memset(address, 0xcd, bytes);
    return true;
  }

  void release(void* address, std::size_t bytes) noexcept override {
    std::lock_guard lock(mutex_);
    const auto begin = reinterpret_cast<std::uintptr_t>(address);
    for (std::uintptr_t page = begin; page < begin + bytes; page += page_)
      require(pages_.erase(page) == 1, "a page was released that is not committed");
    device::discard_pages(address, bytes);
  }

  std::uint64_t committed() const { return pages_.size() * page_; }
  /// From now on. What is committed beyond it stays.
  void set_bytes(std::uint64_t bytes) { bytes_ = bytes; }
  /// How often it had not enough.
  std::uint64_t refused() const { return refused_; }

 private:
  static void require(bool ok, const char* what) {
    if (ok) return;
    std::fprintf(stderr, "fake device: %s\n", what);
    std::abort();
  }
  std::mutex mutex_;
  std::uint64_t bytes_;
  std::size_t page_;
  std::set<std::uintptr_t> pages_;
  std::uint64_t refused_ = 0;
};

}  // namespace memfit::testing
