#include "memfit/memory/cpu_allocator.h"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

namespace memfit::memory {
namespace {
struct ThreadState {
  const char* op = "";
  bool replay = false;
};
thread_local ThreadState thread_state;

std::uint64_t round_up(std::uint64_t n, std::uint64_t unit) { return (n + unit - 1) / unit * unit; }
}  // namespace

const char* set_current_op(const char* name) {
  const char* old = thread_state.op;
  thread_state.op = name;
  return old;
}

bool set_allocating_for_replay(bool on) {
  const bool old = thread_state.replay;
  thread_state.replay = on;
  return old;
}

CpuAllocator& CpuAllocator::instance() {
  static CpuAllocator* const one = new CpuAllocator();  // never destroyed: tensors may outlive everything
  return *one;
}

CpuAllocator::CpuAllocator() {
  std::memset(static_cast<void*>(&live_head_), 0, sizeof(live_head_));
  live_head_.prev = live_head_.next = &live_head_;
}

void CpuAllocator::install() {
  c10::SetAllocator(c10::kCPU, this, /*priority=*/100);
  // A thread may be in the middle of an allocation when another one forks: the child must not find the lock taken.
  static const int registered = pthread_atfork([] { instance().lock_.lock(); }, [] { instance().lock_.unlock(); }, [] {
    // It is held by a thread of the parent, whose number this one has not got: only a new one can be used.
    new (&instance().lock_) Lock();
    instance().detach_after_fork();
  });
  TORCH_CHECK(registered == 0, "memfit: pthread_atfork failed");
}

void CpuAllocator::copy_data(void* destination, const void* source, std::size_t count) const {
  default_copy_data(destination, source, count);
}

c10::DataPtr CpuAllocator::allocate(std::size_t bytes) {
  Block* block = take(bytes);
  void* data = block == nullptr ? nullptr : block->data();
  return {data, data, &CpuAllocator::delete_block, c10::Device(c10::kCPU)};
}

void CpuAllocator::delete_block(void* data) {
  if (data == nullptr) return;   // oneDNN's wrappers free what they never got
  CpuAllocator& self = instance();
  std::lock_guard lock(self.lock_);
  Block* block = Block::of(data);
  if (block->magic != Block::kMagic) {
    std::fprintf(stderr, "memfit: a block at %p was freed twice or overrun\n", data);
    std::abort();
  }
  if (block->value != nullptr && self.pressure_ != nullptr && self.pressure_->keep_dropped(block)) {
    if (self.observer_ != nullptr) self.observer_->given(block);   // the program is done with it
    return;
  }
  if (!(block->flags & Block::kReplay)) self.program_shrank(block->requested);
  self.give(block);
}

std::uint64_t CpuAllocator::set_limit(std::uint64_t limit) {
  std::lock_guard lock(lock_);
  return std::exchange(limit_, limit);
}

// Warm blocks never take the total over the limit, and hardly over what was live at the highest: keeping them must
// not cost memory that the program would not have used. The slack lets sizes alternate without faulting pages in.
std::uint64_t CpuAllocator::ceiling(std::uint64_t bytes) const {
  const std::uint64_t high = std::max(ledger_.peak_live, ledger_.live + bytes);
  const std::uint64_t roomy = high + high / 16 + (std::uint64_t{4} << 20);
  return limit_ == 0 ? roomy : std::min(roomy, limit_);
}

Block* CpuAllocator::take(std::uint64_t bytes) {
  if (bytes == 0) return nullptr;
  if (bytes > (std::uint64_t{1} << 47)) throw std::bad_alloc();
  std::lock_guard lock(lock_);
  ++ledger_.allocations;
  const bool large = round_up(bytes + sizeof(Block), 64) >= kLarge;
  const std::uint64_t capacity = round_up(bytes + sizeof(Block), large ? pool_.device().page_bytes() : 64);
  if (failures_left_ != 0 && is_to_fail()) refuse(bytes);
  if (limit_ != 0 && ledger_.live + bytes > limit_) make_way(bytes);
  Block* block = large ? take_large(capacity, bytes) : take_small(capacity);
  block->capacity = capacity;
  ledger_.cached = small_cached_ + pool_.warm();
  keep_under(ceiling(bytes) - bytes);
  block->requested = bytes;
  block->birth = ledger_.allocations;
  block->value = nullptr;
  block->op = thread_state.op;
  block->flags = (large ? Block::kLarge : 0u) | (thread_state.replay ? Block::kReplay : 0u);
  block->magic = Block::kMagic;
  block->next = live_head_.next;
  block->prev = &live_head_;
  live_head_.next->prev = block;
  live_head_.next = block;
  ledger_.live += bytes;
  note_live();
  if (!thread_state.replay) program_grew(bytes);
  if (observer_ != nullptr && !thread_state.replay) observer_->taken(block);
  return block;
}

void CpuAllocator::make_way(std::uint64_t bytes) {
  while (ledger_.live + bytes > limit_) {
    const std::uint64_t missing = ledger_.live + bytes - limit_;
    if (pressure_ == nullptr || bytes > limit_) break;
    if (!pressure_->make_room(missing)) break;
  }
  if (ledger_.live + bytes > limit_) refuse(bytes);
}

void CpuAllocator::refuse(std::uint64_t bytes) {
  if (pressure_ != nullptr) pressure_->refuse(bytes);
  throw std::bad_alloc();
}

void CpuAllocator::fail_after(std::uint64_t allocations, std::uint64_t failures) {
  std::lock_guard lock(lock_);
  succeed_first_ = allocations;
  failures_left_ = failures;
}

bool CpuAllocator::is_to_fail() {
  if (succeed_first_ > 0) {
    --succeed_first_;
    return false;
  }
  --failures_left_;
  ++injected_failures_;
  return true;
}

void CpuAllocator::note_live() {
  ledger_.peak_live = std::max(ledger_.peak_live, ledger_.live);
  const std::uint64_t total = ledger_.live + ledger_.cached;
  if (total > ledger_.peak) {
    ledger_.peak = total;
    // Listing the holders costs a walk over all live blocks, so it waits for the peak to have grown by 0.5 %.
    if (total - holders_peak_ > holders_peak_ / 200) holders_stale_ = true;
  }
}

void CpuAllocator::give(Block* block) noexcept {
  if (holders_stale_) note_holders();
  if (observer_ != nullptr) observer_->given(block);
  block->prev->next = block->next;
  block->next->prev = block->prev;
  ledger_.live -= block->requested;
  block->magic = 0;
  block->value = nullptr;
  if (block->flags & Block::kLarge) {
    pool_.give(block, block->capacity);
  } else {
    Block*& head = small_cache_[block->capacity / 64];
    block->next = head;
    head = block;
    small_cached_ += block->payload();
  }
  ledger_.cached = small_cached_ + pool_.warm();
  keep_under(ceiling(0));
  // A cached block counts in full, a live one as requested: freeing may hold a few bytes more than before.
  ledger_.peak = std::max(ledger_.peak, ledger_.live + ledger_.cached);
}

/// Give back cached memory until live + cached is at most `top`.
void CpuAllocator::keep_under(std::uint64_t top) noexcept {
  if (ledger_.live + ledger_.cached > top) trim(top > ledger_.live ? top - ledger_.live : 0);
}

Block* CpuAllocator::take_small(std::uint64_t capacity) {
  Block*& head = small_cache_[capacity / 64];
  if (Block* block = head) {
    head = block->next;
    small_cached_ -= block->payload();
    return block;
  }
  auto* block = static_cast<Block*>(std::aligned_alloc(64, capacity));
  if (block == nullptr) {
    trim(0);
    block = static_cast<Block*>(std::aligned_alloc(64, capacity));
  }
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

/// A device may have less than the limit allows. Then what is warm goes first (it may lie in the wrong places), and after
/// it what the engine can do without.
Block* CpuAllocator::take_large(std::uint64_t capacity, std::uint64_t bytes) {
  void* pages = pool_.take(capacity);
  while (pages == nullptr) {
    if (trim(small_cached_) == 0 && (pressure_ == nullptr || !pressure_->make_room(bytes))) refuse(bytes);
    pages = pool_.take(capacity);
  }
  ledger_.served_cold = pool_.served_cold();
  return static_cast<Block*>(pages);
}

void CpuAllocator::set_device(device::Device& device) {
  std::lock_guard lock(lock_);
  pool_.set_device(device);
}

std::uint64_t CpuAllocator::trim(std::uint64_t keep) noexcept {
  std::lock_guard lock(lock_);
  if (ledger_.cached <= keep) return 0;
  std::uint64_t given = pool_.discard(ledger_.cached - keep);
  for (std::size_t i = small_cache_.size(); ledger_.cached - given > keep && i-- > 0;) {
    while (small_cache_[i] != nullptr && ledger_.cached - given > keep) {
      Block* block = small_cache_[i];
      small_cache_[i] = block->next;
      small_cached_ -= block->payload();
      given += block->payload();
      std::free(block);
    }
  }
  ledger_.cached = small_cached_ + pool_.warm();
  return given;
}

void CpuAllocator::adopt(std::uint64_t bytes) {
  std::lock_guard lock(lock_);
  if (failures_left_ != 0 && is_to_fail()) refuse(bytes);
  if (limit_ != 0 && ledger_.live + bytes > limit_) make_way(bytes);
  keep_under(ceiling(bytes) - bytes);
  ledger_.live += bytes;
  program_grew(bytes);
  note_live();
}

void CpuAllocator::disown(std::uint64_t bytes) noexcept {
  std::lock_guard lock(lock_);
  ledger_.live -= bytes;
  program_shrank(bytes);
}

void CpuAllocator::program_grew(std::uint64_t bytes) {
  ledger_.program += bytes;
  ledger_.peak_program = std::max(ledger_.peak_program, ledger_.program);
}

void CpuAllocator::program_shrank(std::uint64_t bytes) noexcept { ledger_.program -= bytes; }

void CpuAllocator::note_holders() {
  holders_stale_ = false;
  holders_peak_ = ledger_.peak;
  constexpr std::size_t kCount = 16;
  std::vector<const Block*> largest;
  for (Block* b = live_head_.next; b != &live_head_; b = b->next) {
    if (largest.size() == kCount && b->requested <= largest.back()->requested) continue;
    const auto place = std::upper_bound(largest.begin(), largest.end(), b,
                                        [](const Block* x, const Block* y) { return x->requested > y->requested; });
    largest.insert(place, b);
    if (largest.size() > kCount) largest.pop_back();
  }
  holders_.clear();
  for (const Block* b : largest) holders_.push_back({b->requested, b->op});
}

std::vector<CpuAllocator::Holder> CpuAllocator::holders_at_peak() const {
  std::lock_guard lock(lock_);
  if (holders_stale_) const_cast<CpuAllocator*>(this)->note_holders();
  return holders_;
}

void CpuAllocator::reset_peaks() {
  std::lock_guard lock(lock_);
  ledger_.peak = ledger_.live + ledger_.cached;
  ledger_.peak_live = ledger_.live;
  ledger_.peak_program = ledger_.program;
  holders_peak_ = 0;
  holders_stale_ = true;
}

void CpuAllocator::detach_after_fork() { limit_ = 0; }

void CpuAllocator::check_invariants() const {
  std::lock_guard lock(lock_);
  std::uint64_t live = 0;
  for (const Block* b = live_head_.next; b != &live_head_; b = b->next) {
    TORCH_INTERNAL_ASSERT(b->magic == Block::kMagic && b->requested <= b->payload() && b->next->prev == b);
    live += b->requested;
  }
  pool_.check_invariants();
  std::uint64_t small = 0;
  for (const Block* head : small_cache_) {
    for (const Block* b = head; b != nullptr; b = b->next) small += b->payload();
  }
  TORCH_INTERNAL_ASSERT(live <= ledger_.live, "live blocks exceed the ledger");
  TORCH_INTERNAL_ASSERT(small == small_cached_ && pool_.warm() + small == ledger_.cached, "cached blocks and ledger differ");
  TORCH_INTERNAL_ASSERT(ledger_.peak >= ledger_.live + ledger_.cached);
  TORCH_INTERNAL_ASSERT(limit_ == 0 || ledger_.peak_live >= ledger_.live);
}

}  // namespace memfit::memory
