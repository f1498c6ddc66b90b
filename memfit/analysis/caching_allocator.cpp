#include "memfit/analysis/caching_allocator.h"

#include <algorithm>
#include <stdexcept>

namespace memfit::analysis {

std::uint64_t SizedDevice::allocate(std::uint64_t size) {
  if (size > capacity_ - used_) return 0;
  used_ += size;
  if (const auto hole = holes_.find(size); hole != holes_.end()) {
    const std::uint64_t address = hole->second;
    holes_.erase(hole);
    return address;
  }
  const std::uint64_t address = next_;
  next_ += (size + kSmallSegment - 1) / kSmallSegment * kSmallSegment;
  return address;
}

void SizedDevice::free(std::uint64_t address, std::uint64_t size) {
  used_ -= size;
  holes_.emplace(size, address);
}

bool SizedDevice::map(std::uint64_t size) {
  if (size > capacity_ - used_) return false;
  used_ += size;
  return true;
}

std::uint64_t SizedDevice::reserve(std::uint64_t size) {
  const std::uint64_t address = next_;
  next_ += size + (std::uint64_t{1} << 30);
  return address;
}

std::uint64_t SizedDevice::span() const {
  // PyTorch reserves 1 1/8 of the card; without a limit a span that no trace fills.
  constexpr std::uint64_t kMost = std::uint64_t{1} << 46;
  return capacity_ >= kMost ? kMost : capacity_ + capacity_ / 8;
}

bool CachingAllocator::BySize::operator()(const Block* a, const Block* b) const {
  if (a->range->stream != b->range->stream) return a->range->stream < b->range->stream;
  if (a->size != b->size) return a->size < b->size;
  if (a->address != b->address) return a->address < b->address;
  return a < b;
}

bool CachingAllocator::ByAddress::operator()(const Block* a, const Block* b) const {
  if (a->range->stream != b->range->stream) return a->range->stream < b->range->stream;
  if (a->address != b->address) return a->address < b->address;
  return a < b;
}

CachingAllocator::CachingAllocator(const AllocatorSettings& settings, DeviceModel& device)
    : settings_(settings), device_(device) {}

CachingAllocator::~CachingAllocator() {
  for (Range* range : ranges_) delete range;
}

CachingAllocator::Pool& CachingAllocator::pool_at(std::uint32_t index) {
  while (pools_.size() <= index) {
    pools_.push_back(std::make_unique<Pool>());
    pools_.back()->small = pools_.size() % 2 == 0;
  }
  return *pools_[index];
}

CachingAllocator::Block* CachingAllocator::new_block(Range* range, std::uint64_t address, std::uint64_t size,
                                                     State state) {
  if (spare_blocks_.empty()) {
    constexpr std::size_t kPiece = 1024;
    block_store_.push_back(std::make_unique<Block[]>(kPiece));
    for (std::size_t i = kPiece; i-- > 0;) spare_blocks_.push_back(&block_store_.back()[i]);
  }
  Block* block = spare_blocks_.back();
  spare_blocks_.pop_back();
  *block = Block{};
  block->range = range;
  block->address = address;
  block->size = size;
  block->state = state;
  return block;
}

void CachingAllocator::delete_block(Block* block) { spare_blocks_.push_back(block); }

CachingAllocator::Range* CachingAllocator::new_range(const Range& range) {
  Range* made = new Range(range);
  ranges_.insert(made);
  return made;
}

void CachingAllocator::delete_range(Range* range) {
  ranges_.erase(range);
  delete range;
}

void CachingAllocator::put_free(Pool& pool, Block* block) {
  block->born = pool.calls;
  pool.free.insert(block);
}

CachingAllocator::Block* CachingAllocator::allocate(std::uint64_t requested, std::uint16_t stream,
                                                    std::uint16_t private_pool) {
  const std::uint64_t size = settings_.round(requested);
  const std::uint32_t index = private_pool * 2u + (size <= kSmallLimit ? 1 : 0);
  Pool& pool = pool_at(index);
  if (collects()) ++pool.calls;
  Block* block = nullptr;
  if (const auto fit = find_fit(pool, size, stream); fit != pool.free.end()) {
    block = *fit;
    pool.free.erase(fit);
  } else {
    if (collects()) collect_garbage();
    block = grow(pool, index, size, stream);
    if (block == nullptr && release_oversize(pool, size, stream)) block = grow(pool, index, size, stream);
    if (block == nullptr) {
      release_cached();
      ++retries_;
      block = grow(pool, index, size, stream);
    }
    if (block == nullptr) return nullptr;
  }
  carve(pool, block, size);
  block->state = State::Used;
  block->requested = requested;
  allocated_ += block->size;
  return block;
}

bool CachingAllocator::would_hit(std::uint64_t requested, std::uint16_t stream, std::uint16_t private_pool) {
  const std::uint64_t size = settings_.round(requested);
  Pool& pool = pool_at(private_pool * 2u + (size <= kSmallLimit ? 1 : 0));
  return find_fit(pool, size, stream) != pool.free.end();
}

std::set<CachingAllocator::Block*, CachingAllocator::BySize>::iterator CachingAllocator::find_fit(
    Pool& pool, std::uint64_t size, std::uint16_t stream) {
  Range key_range;
  key_range.stream = stream;
  Block key;
  key.range = &key_range;
  key.size = size;
  auto at = pool.free.lower_bound(&key);
  const auto end = pool.free.end();
  if (at == end || (*at)->range->stream != stream) return end;
  if ((*at)->range->expandable) {
    if (settings_.expandable_segments) {
      // A block that can still grow counts as large as it can grow, so that others are used up first.
      const auto room = [](const Block* b) {
        return b->size + (b->next != nullptr && b->next->state == State::Unmapped ? b->next->size : 0);
      };
      for (auto next = std::next(at);
           (*at)->range->expandable && next != end && (*next)->range->stream == stream && room(*next) < room(*at);
           ++next)
        at = next;
    } else {
      do ++at;
      while (at != end && (*at)->range->expandable && (*at)->range->stream == stream);
      if (at == end || (*at)->range->stream != stream) return end;
    }
  }
  if (size < settings_.max_split_size && (*at)->size >= settings_.max_split_size) return end;
  if (size >= settings_.max_split_size && (*at)->size >= size + settings_.max_non_split_rounding) return end;
  return at;
}

void CachingAllocator::carve(Pool& pool, Block* block, std::uint64_t size) {
  const std::uint64_t rest = block->size - size;
  if (!settings_.splits(size, rest)) return;
  Block* tail = new_block(block->range, block->address + size, rest, State::Free);
  tail->prev = block;
  tail->next = block->next;
  if (tail->next != nullptr) tail->next->prev = tail;
  block->next = tail;
  block->size = size;
  put_free(pool, tail);
}

CachingAllocator::Block* CachingAllocator::grow(Pool& pool, std::uint32_t pool_index, std::uint64_t size,
                                                std::uint16_t stream) {
  const std::uint64_t want = settings_.segment_size(size);
  if (limit_ != 0 && reserved_ + want > limit_) return nullptr;
  if (settings_.expandable_segments) return expand(pool, pool_index, size, stream);
  const std::uint64_t address = device_.allocate(want);
  if (address == 0) return nullptr;
  Range* range = new_range({address, want, 0, pool_index, stream, false});
  Block* block = new_block(range, address, want, State::Free);
  heads_[address] = block;
  reserved_ += want;
  tell(Change::SegmentAlloc, address, want);
  return block;
}

CachingAllocator::Block* CachingAllocator::find_expandable(Pool& pool, std::uint32_t pool_index, std::uint64_t size,
                                                           std::uint16_t stream) {
  const auto open = [](const Block* b) {
    return b != nullptr && (b->state == State::Free || b->state == State::Unmapped);
  };
  Range key_range;
  key_range.stream = stream;
  Block key;
  key.range = &key_range;
  for (auto at = pool.unmapped.lower_bound(&key); at != pool.unmapped.end() && (*at)->range->stream == stream; ++at) {
    Block* first = *at;
    if (open(first->prev)) first = first->prev;
    std::uint64_t room = 0;
    for (const Block* b = first; room < size && open(b); b = b->next) room += b->size;
    if (room >= size) return first;
  }
  const std::uint64_t granule = pool.small ? kSmallSegment : settings_.large_segment;
  const std::uint64_t span = (std::max(device_.span(), size) + granule - 1) / granule * granule;
  Range* range = new_range({device_.reserve(span), span, granule, pool_index, stream, true});
  Block* block = new_block(range, range->begin, span, State::Unmapped);
  heads_[range->begin] = block;
  pool.unmapped.insert(block);
  return block;
}

CachingAllocator::Block* CachingAllocator::expand(Pool& pool, std::uint32_t pool_index, std::uint64_t size,
                                                  std::uint16_t stream) {
  Block* block = find_expandable(pool, pool_index, size, stream);
  if (block->state == State::Unmapped) {
    block = map_block(pool, block, std::min(block->size, size));
    if (block == nullptr) return nullptr;
  }
  while (block->size < size) {
    block = map_block(pool, block->next, std::min(size - block->size, block->next->size));
    if (block == nullptr) return nullptr;
  }
  pool.free.erase(block);
  return block;
}

/// Back the first `size` bytes of an unmapped block. Returns: the free block they are part of, or nullptr.
CachingAllocator::Block* CachingAllocator::map_block(Pool& pool, Block* block, std::uint64_t size) {
  const std::uint64_t granule = block->range->granule;
  const std::uint64_t length = (size + granule - 1) / granule * granule;
  if (!device_.map(length)) return nullptr;
  pool.unmapped.erase(block);
  const std::uint64_t address = block->address;
  if (length < block->size) {
    Block* rest = new_block(block->range, address + length, block->size - length, State::Unmapped);
    rest->prev = block;
    rest->next = block->next;
    if (rest->next != nullptr) rest->next->prev = rest;
    block->next = rest;
    block->size = length;
    pool.unmapped.insert(rest);
  }
  block->state = State::Free;
  absorb(pool, block, block->prev);
  absorb(pool, block, block->next);
  put_free(pool, block);
  reserved_ += length;
  tell(Change::Map, address, length);
  return block;
}

/// Join `neighbour` into `block` (which is in no set) when both are of one kind.
void CachingAllocator::absorb(Pool& pool, Block* block, Block* neighbour) {
  if (neighbour == nullptr || neighbour->state != block->state || block->state == State::Used ||
      block->state == State::Pending)
    return;
  if (block->state == State::Free) pool.free.erase(neighbour);
  else pool.unmapped.erase(neighbour);
  if (neighbour == block->prev) {
    if (neighbour->prev == nullptr) heads_[neighbour->address] = block;
    block->address = neighbour->address;
    block->prev = neighbour->prev;
    if (block->prev != nullptr) block->prev->next = block;
  } else {
    block->next = neighbour->next;
    if (block->next != nullptr) block->next->prev = block;
  }
  block->size += neighbour->size;
  delete_block(neighbour);
}

void CachingAllocator::request_free(Block* block) {
  if (block->state != State::Used) return;
  block->state = State::Pending;
  allocated_ -= block->size;
  pending_ += block->size;
}

void CachingAllocator::complete_free(Block* block) {
  if (block->state == State::Used) allocated_ -= block->size;
  else if (block->state == State::Pending) pending_ -= block->size;
  else return;
  block->state = State::Free;
  block->event = 0xffffffff;
  Pool& pool = pool_at(block->range->pool);
  absorb(pool, block, block->prev);
  absorb(pool, block, block->next);
  put_free(pool, block);
}

void CachingAllocator::release_segment(Pool& pool, Block* block) {
  Range* range = block->range;
  pool.free.erase(block);
  heads_.erase(range->begin);
  reserved_ -= range->size;
  tell(Change::SegmentFree, range->begin, range->size);
  device_.free(range->begin, range->size);
  delete_block(block);
  delete_range(range);
}

/// Give back the whole granules inside a free block of an expandable segment.
void CachingAllocator::unmap_block(Pool& pool, Block* block) {
  Range* range = block->range;
  const std::uint64_t granule = range->granule;
  const std::uint64_t from = (block->address - range->begin + granule - 1) / granule * granule + range->begin;
  const std::uint64_t to = (block->address + block->size - range->begin) / granule * granule + range->begin;
  if (from >= to) return;
  pool.free.erase(block);
  if (from > block->address) {
    Block* before = new_block(range, block->address, from - block->address, State::Free);
    before->prev = block->prev;
    before->next = block;
    if (before->prev != nullptr) before->prev->next = before;
    else heads_[range->begin] = before;
    block->prev = before;
    put_free(pool, before);
  }
  if (const std::uint64_t end = block->address + block->size; end > to) {
    Block* after = new_block(range, to, end - to, State::Free);
    after->prev = block;
    after->next = block->next;
    if (after->next != nullptr) after->next->prev = after;
    block->next = after;
    put_free(pool, after);
  }
  block->address = from;
  block->size = to - from;
  block->state = State::Unmapped;
  absorb(pool, block, block->prev);
  absorb(pool, block, block->next);
  pool.unmapped.insert(block);
  reserved_ -= to - from;
  device_.unmap(to - from);
  tell(Change::Unmap, from, to - from);
  if (block->prev == nullptr && block->next == nullptr) {
    pool.unmapped.erase(block);
    heads_.erase(range->begin);
    delete_block(block);
    delete_range(range);
  }
}

void CachingAllocator::release_pool(Pool& pool) {
  std::vector<Block*> mapped;
  for (auto at = pool.free.begin(); at != pool.free.end();) {
    Block* block = *at++;
    if (block->range->expandable) mapped.push_back(block);
    else if (block->prev == nullptr && block->next == nullptr) release_segment(pool, block);
  }
  for (Block* block : mapped) unmap_block(pool, block);
}

void CachingAllocator::release_cached() {
  if (on_sync_) on_sync_();
  release_pool(pool_at(0));
  release_pool(pool_at(1));
  for (const std::uint16_t pool : retired_) {
    if (pool == 0) continue;
    release_pool(pool_at(pool * 2u + 1));
    release_pool(pool_at(pool * 2u));
  }
}

void CachingAllocator::empty_cache() { release_cached(); }

bool CachingAllocator::release_oversize(Pool& pool, std::uint64_t size, std::uint16_t stream) {
  if (settings_.max_split_size == kNoSplitLimit || settings_.expandable_segments) return false;
  Range key_range;
  key_range.stream = stream;
  Block key;
  key.range = &key_range;
  key.size = std::max(size, settings_.max_split_size);
  auto at = pool.free.lower_bound(&key);
  const auto whole = [](const Block* b) { return b->prev == nullptr && b->next == nullptr && !b->range->expandable; };
  if (at != pool.free.end() && (*at)->range->stream == stream) {
    if (!whole(*at)) return false;
    release_segment(pool, *at);
    return true;
  }
  std::uint64_t released = 0;
  while (at != pool.free.begin() && released < key.size) {
    Block* block = *--at;
    if (block->range->stream != stream || block->size < settings_.max_split_size || !whole(block)) break;
    released += block->size;
    ++at;  // stays valid when the block before it goes
    release_segment(pool, block);
  }
  return released >= key.size;
}

void CachingAllocator::collect_garbage() {
  const auto line = static_cast<std::uint64_t>(settings_.garbage_collection_threshold * static_cast<double>(limit_));
  if (reserved_ <= line) return;
  const std::uint64_t target = reserved_ - line;
  Pool& pool = pool_at(0);
  const auto collectable = [](const Block* b) {
    return b->prev == nullptr && b->next == nullptr && !b->range->expandable;
  };
  std::uint64_t age = 0, count = 0, reclaimed = 0;
  for (const Block* block : pool.free) {
    if (!collectable(block)) continue;
    age += pool.calls - block->born;
    ++count;
  }
  bool freed = true;
  while (reclaimed < target && freed && count > 0) {
    const double mean = static_cast<double>(age) / static_cast<double>(count);
    freed = false;
    for (auto at = pool.free.begin(); at != pool.free.end();) {
      Block* block = *at++;
      const std::uint64_t old = pool.calls - block->born;
      if (!collectable(block) || static_cast<double>(old) < mean) continue;
      freed = true;
      reclaimed += block->size;
      age -= old;
      --count;
      release_segment(pool, block);
    }
  }
}

void CachingAllocator::adopt_segment(std::uint64_t address, std::uint64_t size, std::uint16_t stream,
                                     std::uint16_t pool, bool small) {
  const std::uint32_t index = pool * 2u + (small ? 1 : 0);
  Range* range = new_range({address, size, 0, index, stream, false});
  Block* block = new_block(range, address, size, State::Free);
  heads_[address] = block;
  put_free(pool_at(index), block);
  reserved_ += size;
}

void CachingAllocator::adopt_expandable(std::uint64_t begin, std::uint64_t span, std::uint16_t stream,
                                        std::uint16_t pool, bool small,
                                        const std::vector<std::pair<std::uint64_t, std::uint64_t>>& mapped) {
  const std::uint32_t index = pool * 2u + (small ? 1 : 0);
  Pool& home = pool_at(index);
  Range* range = new_range({begin, span, small ? kSmallSegment : settings_.large_segment, index, stream, true});
  Block* last = nullptr;
  const auto add = [&](std::uint64_t from, std::uint64_t to, State state) {
    if (from >= to) return;
    Block* block = new_block(range, from, to - from, state);
    block->prev = last;
    if (last != nullptr) last->next = block;
    else heads_[begin] = block;
    last = block;
    if (state == State::Free) {
      put_free(home, block);
      reserved_ += to - from;
    } else {
      home.unmapped.insert(block);
    }
  };
  std::uint64_t at = begin;
  for (const auto& [from, size] : mapped) {
    add(at, from, State::Unmapped);
    add(from, from + size, State::Free);
    at = from + size;
  }
  add(at, begin + span, State::Unmapped);
}

CachingAllocator::Block* CachingAllocator::adopt_block(std::uint64_t address, std::uint64_t size,
                                                       std::uint64_t requested) {
  auto after = heads_.upper_bound(address);
  if (after == heads_.begin()) return nullptr;
  Block* block = std::prev(after)->second;
  if (adopted_ != nullptr && adopted_->range == block->range && adopted_->address < address) block = adopted_;
  while (block != nullptr && block->address + block->size <= address) block = block->next;
  if (block == nullptr || block->state != State::Free || block->address > address ||
      block->address + block->size < address + size)
    return nullptr;
  Pool& pool = pool_at(block->range->pool);
  pool.free.erase(block);
  if (block->address < address) {
    Block* used = new_block(block->range, address, block->address + block->size - address, State::Free);
    used->prev = block;
    used->next = block->next;
    if (used->next != nullptr) used->next->prev = used;
    block->next = used;
    block->size = address - block->address;
    put_free(pool, block);
    block = used;
  }
  if (block->size > size) {
    Block* tail = new_block(block->range, address + size, block->size - size, State::Free);
    tail->prev = block;
    tail->next = block->next;
    if (tail->next != nullptr) tail->next->prev = tail;
    block->next = tail;
    block->size = size;
    put_free(pool, tail);
  }
  block->state = State::Used;
  block->requested = requested;
  allocated_ += size;
  adopted_ = block;
  return block;
}

std::uint64_t CachingAllocator::largest_free() const {
  std::uint64_t largest = 0;
  for (const auto& pool : pools_)
    for (const Block* block : pool->free) largest = std::max(largest, block->size);
  return largest;
}

void CachingAllocator::check_invariants() const {
  std::uint64_t used = 0, pending = 0, reserved = 0;
  std::size_t free_blocks = 0, unmapped_blocks = 0;
  for (const auto& [begin, head] : heads_) {
    std::uint64_t at = begin;
    const Block* last = nullptr;
    for (const Block* block = head; block != nullptr; block = block->next) {
      if (block->address != at || block->prev != last) throw std::logic_error("caching allocator: broken chain");
      if (last != nullptr && last->state == block->state &&
          (block->state == State::Free || block->state == State::Unmapped))
        throw std::logic_error("caching allocator: neighbours that should be one");
      at += block->size;
      last = block;
      if (block->state == State::Used) used += block->size;
      if (block->state == State::Pending) pending += block->size;
      if (block->state == State::Free) ++free_blocks;
      if (block->state == State::Unmapped) ++unmapped_blocks;
      else reserved += block->size;
    }
    if (at != begin + head->range->size) throw std::logic_error("caching allocator: a segment's blocks do not fill it");
  }
  std::size_t in_free = 0, in_unmapped = 0;
  for (const auto& pool : pools_) in_free += pool->free.size(), in_unmapped += pool->unmapped.size();
  if (in_free != free_blocks || in_unmapped != unmapped_blocks)
    throw std::logic_error("caching allocator: sets do not match the chains");
  if (used != allocated_ || pending != pending_ || reserved != reserved_)
    throw std::logic_error("caching allocator: sums do not match");
}

}  // namespace memfit::analysis
