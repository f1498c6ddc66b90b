// Each distinct string or sequence once, with a small number for a name.
// Threads: one. Cost: one hash of the content and one comparison a lookup.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

namespace memfit::snapshot::detail {

inline std::uint64_t mix(std::uint64_t h) {
  h ^= h >> 32;
  h *= 0xd6e8feb86659fd93ull;
  h ^= h >> 32;
  return h;
}

inline std::uint64_t hash_bytes(const char* data, std::size_t size) {
  std::uint64_t h = 0x9e3779b97f4a7c15ull ^ size;
  while (size >= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    h = (h ^ word) * 0xff51afd7ed558ccdull;
    h ^= h >> 29;
    data += 8;
    size -= 8;
  }
  std::uint64_t tail = 0;
  if (size > 0) std::memcpy(&tail, data, size);
  return mix((h ^ tail) * 0xc4ceb9fe1a85ec53ull);
}

/// Open-addressing table of ids; who owns the content compares.
class IdTable {
 public:
  template <typename Same>
  std::uint32_t* find(std::uint64_t hash, Same same) {
    const std::uint32_t tag = static_cast<std::uint32_t>(hash >> 32);
    for (std::size_t i = hash & mask_;; i = (i + 1) & mask_) {
      Entry& entry = entries_[i];
      if (entry.id == kEmpty) return nullptr;
      if (entry.tag == tag && same(entry.id)) return &entry.id;
    }
  }
  void insert(std::uint64_t hash, std::uint32_t id) {
    if (++count_ * 2 > entries_.size()) grow();
    place(hash, id);
  }

 private:
  static constexpr std::uint32_t kEmpty = 0xffffffff;
  struct Entry {
    std::uint32_t tag = 0;
    std::uint32_t id = kEmpty;
    std::uint32_t low = 0;
  };
  void place(std::uint64_t hash, std::uint32_t id) {
    std::size_t i = hash & mask_;
    while (entries_[i].id != kEmpty) i = (i + 1) & mask_;
    entries_[i] = {static_cast<std::uint32_t>(hash >> 32), id, static_cast<std::uint32_t>(hash)};
  }
  void grow() {
    std::vector<Entry> old(entries_.size() * 2);
    old.swap(entries_);
    mask_ = entries_.size() - 1;
    for (const Entry& entry : old)
      if (entry.id != kEmpty) place(std::uint64_t{entry.tag} << 32 | entry.low, entry.id);
  }
  std::vector<Entry> entries_{std::vector<Entry>(1024)};
  std::size_t mask_ = 1023;
  std::size_t count_ = 0;
};

class StringInterner {
 public:
  StringInterner(std::vector<std::string_view>& views, std::vector<std::unique_ptr<char[]>>& store)
      : views_(views), store_(store) {
    views_.clear();
    intern("");
  }
  std::uint32_t intern(std::string_view text) {
    const std::uint64_t hash = hash_bytes(text.data(), text.size());
    if (const std::uint32_t* id = table_.find(hash, [&](std::uint32_t i) { return views_[i] == text; })) return *id;
    const std::uint32_t id = static_cast<std::uint32_t>(views_.size());
    views_.push_back(keep(text));
    table_.insert(hash, id);
    return id;
  }

 private:
  std::string_view keep(std::string_view text) {
    if (text.empty()) return {};
    if (text.size() > left_) {
      const std::size_t piece = text.size() > kPiece / 4 ? text.size() : kPiece;
      store_.push_back(std::make_unique_for_overwrite<char[]>(piece));
      next_ = store_.back().get();
      left_ = piece;
    }
    std::memcpy(next_, text.data(), text.size());
    const std::string_view kept(next_, text.size());
    next_ += text.size();
    left_ -= text.size();
    return kept;
  }
  static constexpr std::size_t kPiece = 64 << 10;
  std::vector<std::string_view>& views_;
  std::vector<std::unique_ptr<char[]>>& store_;
  IdTable table_;
  char* next_ = nullptr;
  std::size_t left_ = 0;
};

/// Sequences of T in one flat array; sequence 0 is the empty one.
template <typename T>
class SequenceInterner {
 public:
  SequenceInterner(std::vector<std::uint32_t>& begin, std::vector<T>& items) : begin_(begin), items_(items) {
    begin_ = {0};
    items_.clear();
    intern({});
  }
  std::uint32_t intern(std::span<const T> sequence) {
    const std::uint64_t hash = hash_bytes(reinterpret_cast<const char*>(sequence.data()), sequence.size_bytes());
    const std::uint32_t* found = table_.find(hash, [&](std::uint32_t i) {
      return begin_[i + 1] - begin_[i] == sequence.size() &&
             (sequence.empty() || std::memcmp(items_.data() + begin_[i], sequence.data(), sequence.size_bytes()) == 0);
    });
    if (found) return *found;
    if (items_.size() + sequence.size() > 0xffffffffull) throw std::length_error("more than four billion frames");
    const std::uint32_t id = static_cast<std::uint32_t>(begin_.size() - 1);
    items_.insert(items_.end(), sequence.begin(), sequence.end());
    begin_.push_back(static_cast<std::uint32_t>(items_.size()));
    table_.insert(hash, id);
    return id;
  }
  std::span<const T> at(std::uint32_t id) const { return {items_.data() + begin_[id], items_.data() + begin_[id + 1]}; }

 private:
  std::vector<std::uint32_t>& begin_;
  std::vector<T>& items_;
  IdTable table_;
};

}  // namespace memfit::snapshot::detail
