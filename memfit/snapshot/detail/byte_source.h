// Bytes of a file or of memory, a window at a time, so that a reader's memory does not depend on the file's size.
// The window grows only by bytes that were really read: a length in the file that lies cannot make it allocate.
// Threads: one. Cost: one copy out of the page cache.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

namespace memfit::snapshot::detail {

class ByteSource {
 public:
  /// Throws:   BadInput when the file cannot be opened or read.
  explicit ByteSource(const std::string& path);
  /// Over bytes that outlive the source; `name` is used in messages.
  ByteSource(std::string_view bytes, std::string name);
  ByteSource(const ByteSource&) = delete;
  ByteSource& operator=(const ByteSource&) = delete;

  /// The unread part of the window. The caller moves `p` forward.
  const std::uint8_t* p = nullptr;
  const std::uint8_t* end = nullptr;

  /// Make at least `count` bytes available at `p`. Returns: false when the file ends before that.
  bool fill(std::uint64_t count);
  bool ensure(std::uint64_t count) { return static_cast<std::uint64_t>(end - p) >= count || fill(count); }

  /// Offset in the file of `p`.
  std::uint64_t offset() const { return window_offset_ + static_cast<std::uint64_t>(p - window_begin_); }
  /// Size of the file, or 0 when it cannot be known (a pipe).
  std::uint64_t size() const { return size_; }
  std::uint64_t bytes_read() const { return window_offset_ + static_cast<std::uint64_t>(end - window_begin_); }
  const std::string& name() const { return name_; }

 private:
  std::string name_;
  std::ifstream file_;
  bool at_end_ = false;
  std::uint64_t size_ = 0;
  std::vector<std::uint8_t> buffer_;
  const std::uint8_t* window_begin_ = nullptr;
  std::uint64_t window_offset_ = 0;  // of window_begin_
};

}  // namespace memfit::snapshot::detail
