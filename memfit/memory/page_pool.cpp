#include "memfit/memory/page_pool.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <iterator>

namespace memfit::memory {
namespace {
constexpr std::uint64_t kReserve = std::uint64_t{1} << 41;
constexpr std::uint64_t kLeastReserve = std::uint64_t{64} << 20;
}  // namespace

void PagePool::insert(std::uint64_t address, std::uint64_t bytes, bool warm) {
  auto next = pieces_.lower_bound(address);
  if (next != pieces_.end() && next->first == address + bytes && next->second.warm == warm) {
    bytes += next->second.bytes;
    auto gone = next++;
    erase(gone);
  }
  if (next != pieces_.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second.bytes == address && previous->second.warm == warm) {
      address = previous->first;
      bytes += previous->second.bytes;
      erase(previous);
    }
  }
  pieces_.emplace(address, Piece{bytes, warm});
  sizes(warm).emplace(bytes, address);
  if (warm) warm_bytes_ += bytes;
}

void PagePool::erase(Pieces::iterator piece) {
  if (piece->second.warm) warm_bytes_ -= piece->second.bytes;
  sizes(piece->second.warm).erase({piece->second.bytes, piece->first});
  pieces_.erase(piece);
}

// Put memory behind the cold parts of [address, address + bytes), all or none.
bool PagePool::commit(std::uint64_t address, std::uint64_t bytes) {
  const std::uint64_t end = address + bytes;
  const auto cold_parts = [&](std::uint64_t until, auto visit) {
    for (auto piece = std::prev(pieces_.upper_bound(address)); piece != pieces_.end() && piece->first < until; ++piece) {
      const std::uint64_t from = std::max(piece->first, address);
      const std::uint64_t to = std::min(piece->first + piece->second.bytes, end);
      if (!piece->second.warm && !visit(reinterpret_cast<void*>(from), to - from)) return from;
    }
    return end;
  };
  const std::uint64_t done = cold_parts(end, [&](void* from, std::uint64_t part) { return device_->commit(from, part); });
  if (done == end) return true;
  if (done == address) return false;
  cold_parts(done, [&](void* from, std::uint64_t part) {
    device_->release(from, part);
    return true;
  });
  return false;
}

// Take [address, address + bytes) out of the free pieces that cover it. Returns nullptr when the device has no more.
void* PagePool::carve(std::uint64_t address, std::uint64_t bytes) {
  if (!commit(address, bytes)) return nullptr;
  auto piece = std::prev(pieces_.upper_bound(address));
  const std::uint64_t end = address + bytes;
  while (true) {
    const std::uint64_t begin = piece->first;
    const Piece old = piece->second;
    const std::uint64_t piece_end = begin + old.bytes;
    auto next = std::next(piece);
    erase(piece);
    if (!old.warm) served_cold_ += std::min(end, piece_end) - std::max(begin, address);
    if (begin < address) insert(begin, address - begin, old.warm);
    if (piece_end >= end) {
      if (piece_end > end) insert(end, piece_end - end, old.warm);
      break;
    }
    piece = next;
  }
  return reinterpret_cast<void*>(address);
}

// A warm piece that is too small, together with the cold one before or after it.
void* PagePool::take_beside_warm(std::uint64_t bytes) {
  int tried = 0;
  for (auto largest = warm_.rbegin(); largest != warm_.rend() && tried < 4; ++largest, ++tried) {
    const auto [size, address] = *largest;
    const auto piece = pieces_.find(address);
    const auto next = std::next(piece);
    if (next != pieces_.end() && next->first == address + size && size + next->second.bytes >= bytes) return carve(address, bytes);
    if (piece != pieces_.begin()) {
      const auto previous = std::prev(piece);
      if (previous->first + previous->second.bytes == address && size + previous->second.bytes >= bytes) {
        return carve(address + size - bytes, bytes);
      }
    }
  }
  return nullptr;
}

bool PagePool::grow() {
  if (reserved_) return false;
  for (std::uint64_t reserve = kReserve; reserve >= kLeastReserve; reserve /= 2) {
    if (void* base = device_->reserve(reserve)) {
      reserved_ = true;
      insert(reinterpret_cast<std::uint64_t>(base), reserve, false);
      return true;
    }
  }
  return false;
}

void PagePool::set_device(device::Device& device) {
  if (reserved_) {
    std::fputs("memfit: page pool: the device is changed after pages were taken from it\n", stderr);
    std::abort();
  }
  device_ = &device;
}

void* PagePool::take(std::uint64_t bytes) {
  if (const auto fit = warm_.lower_bound({bytes, 0}); fit != warm_.end()) return carve(fit->second, bytes);
  if (void* beside = take_beside_warm(bytes)) return beside;
  auto fit = cold_.lower_bound({bytes, 0});
  if (fit == cold_.end()) {
    if (!grow()) return nullptr;
    fit = cold_.lower_bound({bytes, 0});
    if (fit == cold_.end()) return nullptr;
  }
  return carve(fit->second, bytes);
}

void PagePool::give(void* address, std::uint64_t bytes) { insert(reinterpret_cast<std::uint64_t>(address), bytes, true); }

std::uint64_t PagePool::discard(std::uint64_t bytes) {
  std::uint64_t given = 0;
  while (given < bytes && !warm_.empty()) {
    // The smallest piece that is enough, else the largest; its end, so that what stays is one piece.
    auto fit = warm_.lower_bound({bytes - given, 0});
    if (fit == warm_.end()) --fit;
    const auto [size, address] = *fit;
    const std::uint64_t page = device_->page_bytes();
    const std::uint64_t part = std::min(size, (bytes - given + page - 1) / page * page);
    erase(pieces_.find(address));
    if (part < size) insert(address, size - part, true);
    device_->release(reinterpret_cast<void*>(address + size - part), part);
    insert(address + size - part, part, false);
    given += part;
  }
  return given;
}

void PagePool::check_invariants() const {
  std::uint64_t warm = 0;
  std::uint64_t last_end = 0;
  bool last_warm = false;
  auto require = [](bool ok, const char* what) {
    if (!ok) {
      std::fprintf(stderr, "memfit: page pool: %s\n", what);
      std::abort();
    }
  };
  for (const auto& [address, piece] : pieces_) {
    require(piece.bytes > 0 && piece.bytes % device_->page_bytes() == 0, "a piece is not whole pages");
    require(address >= last_end, "pieces overlap");
    require(address != last_end || piece.warm != last_warm, "neighbours of one kind are not joined");
    require((piece.warm ? warm_ : cold_).count({piece.bytes, address}) == 1, "a piece is missing among the sizes");
    if (piece.warm) warm += piece.bytes;
    last_end = address + piece.bytes;
    last_warm = piece.warm;
  }
  require(warm == warm_bytes_, "warm bytes are miscounted");
  require(warm_.size() + cold_.size() == pieces_.size(), "sizes and pieces differ in number");
}

}  // namespace memfit::memory
