#include "memfit/device/address_space.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <bit>
#include <mutex>
#include <vector>

namespace memfit::device {
namespace {
constexpr std::size_t kHuge = std::size_t{2} << 20;
constexpr int kClasses = 28;                                 // 4 KiB ... 512 GiB
constexpr std::size_t kMostClassBytes = std::size_t{1} << 39;    // addresses for each class, where there are so many
constexpr std::size_t kLeastClassBytes = std::size_t{1} << 31;
struct sigaction previous_handler;
bool (*fault_callback)(void*) = nullptr;

void on_signal(int signal, siginfo_t* info, void* context) {
  if (signal == SIGSEGV && info->si_code > 0 && AddressReservation::instance().contains(info->si_addr) &&
      fault_callback(info->si_addr)) {
    return;
  }
  if ((previous_handler.sa_flags & SA_SIGINFO) && previous_handler.sa_sigaction != nullptr) {
    previous_handler.sa_sigaction(signal, info, context);
  } else if (previous_handler.sa_handler != SIG_DFL && previous_handler.sa_handler != SIG_IGN) {
    previous_handler.sa_handler(signal);
  } else {
    // The default action is taken when the faulting instruction runs again.
    ::signal(SIGSEGV, SIG_DFL);
  }
}
}  // namespace

std::size_t page_bytes() {
  static const std::size_t bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

void* reserve_pages(std::size_t bytes) {
  void* raw = mmap(nullptr, bytes + kHuge, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  return reinterpret_cast<void*>((reinterpret_cast<std::uintptr_t>(raw) + kHuge - 1) & ~(kHuge - 1));
}

bool open_pages(void* address, std::size_t bytes) {
  if (mprotect(address, bytes, PROT_READ | PROT_WRITE) != 0) return false;
  madvise(address, bytes, MADV_HUGEPAGE);
  return true;
}

void discard_pages(void* address, std::size_t bytes) noexcept { madvise(address, bytes, MADV_DONTNEED); }

struct AddressReservation::Slots {
  struct Class {
    std::vector<void*> owners;
    std::vector<bool> accessible;
    std::vector<std::uint32_t> free;
  };
  mutable std::mutex mutex;
  Class classes[kClasses];
};

AddressReservation& AddressReservation::instance() {
  static AddressReservation* const one = new AddressReservation();  // never destroyed: faults may come until the end
  return *one;
}

AddressReservation::AddressReservation() {
  slots_ = new Slots();
  // Limits on address space and sanitizers leave less.
  for (class_bytes_ = kMostClassBytes; class_bytes_ >= kLeastClassBytes; class_bytes_ /= 2) {
    void* raw = mmap(nullptr, kClasses * class_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) continue;
    base_ = static_cast<char*>(raw);
    return;
  }
}

void* AddressReservation::reserve(std::size_t bytes, void* owner) {
  if (base_ == nullptr || bytes == 0) return nullptr;
  const int index = bytes <= 4096 ? 0 : std::bit_width(bytes - 1) - 12;
  if (index >= kClasses) return nullptr;
  const std::size_t slot_bytes = std::size_t{4096} << index;
  std::lock_guard lock(slots_->mutex);
  auto& c = slots_->classes[index];
  std::uint32_t slot;
  if (!c.free.empty()) {
    slot = c.free.back();
    c.free.pop_back();
    c.owners[slot] = owner;
  } else {
    slot = static_cast<std::uint32_t>(c.owners.size());
    if ((slot + 1) * slot_bytes > class_bytes_) return nullptr;
    c.owners.push_back(owner);
    c.accessible.push_back(false);
  }
  return base_ + index * class_bytes_ + slot * slot_bytes;
}

bool AddressReservation::contains(const void* address) const noexcept {
  const char* p = static_cast<const char*>(address);
  return base_ != nullptr && p >= base_ && p < base_ + kClasses * class_bytes_;
}

namespace {
struct Place {
  int index;
  std::uint32_t slot;
  std::size_t slot_bytes;
};
Place place_of(const char* base, std::size_t class_bytes, const void* address) {
  const std::size_t offset = static_cast<std::size_t>(static_cast<const char*>(address) - base);
  const int index = static_cast<int>(offset / class_bytes);
  const std::size_t slot_bytes = std::size_t{4096} << index;
  return {index, static_cast<std::uint32_t>((offset % class_bytes) / slot_bytes), slot_bytes};
}
}  // namespace

void AddressReservation::release(void* address) noexcept {
  const Place p = place_of(base_, class_bytes_, address);
  std::lock_guard lock(slots_->mutex);
  auto& c = slots_->classes[p.index];
  if (c.accessible[p.slot]) {
    // A fresh inaccessible mapping over the old one gives the pages back and forgets them.
    mmap(address, p.slot_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    c.accessible[p.slot] = false;
  }
  c.owners[p.slot] = nullptr;
  c.free.push_back(p.slot);
}

bool AddressReservation::make_accessible(void* address) noexcept {
  const Place p = place_of(base_, class_bytes_, address);
  if (mprotect(address, p.slot_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  std::lock_guard lock(slots_->mutex);
  slots_->classes[p.index].accessible[p.slot] = true;
  return true;
}

void* AddressReservation::owner_of(const void* address, void** start) const noexcept {
  const Place p = place_of(base_, class_bytes_, address);
  std::lock_guard lock(slots_->mutex);
  const auto& c = slots_->classes[p.index];
  if (p.slot >= c.owners.size()) return nullptr;
  *start = base_ + p.index * class_bytes_ + p.slot * p.slot_bytes;
  return c.owners[p.slot];
}

void install_fault_handler(bool (*on_fault)(void* address)) {
  const bool first = fault_callback == nullptr;
  fault_callback = on_fault;
  if (!first) return;
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  sigaction(SIGSEGV, &action, &previous_handler);
}

}  // namespace memfit::device
