// A growing array in fixed-size pieces: elements never move, and growing never needs the old and the new array at
// one time, so the peak of a reader is what it holds and no more.
// Not a std::vector: no contiguous data(), no erase.
// Threads: like a std::vector. Cost: one more indirection than a std::vector.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace memfit::trace {

template <typename T, unsigned kShift = 14>
class ChunkedVector {
 public:
  static constexpr std::size_t kChunk = std::size_t{1} << kShift;

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T& operator[](std::size_t i) { return chunks_[i >> kShift][i & (kChunk - 1)]; }
  const T& operator[](std::size_t i) const { return chunks_[i >> kShift][i & (kChunk - 1)]; }
  T& back() { return (*this)[size_ - 1]; }

  T& push_back(T value) {
    if ((size_ & (kChunk - 1)) == 0) chunks_.push_back(std::make_unique_for_overwrite<T[]>(kChunk));
    T& slot = (*this)[size_];
    slot = std::move(value);
    ++size_;
    return slot;
  }
  void clear() {
    chunks_.clear();
    chunks_.shrink_to_fit();
    size_ = 0;
  }

 private:
  std::vector<std::unique_ptr<T[]>> chunks_;
  std::size_t size_ = 0;
};

}  // namespace memfit::trace
