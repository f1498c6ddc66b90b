#include "memfit/snapshot/detail/byte_source.h"

#include <cstring>
#include <filesystem>
#include <system_error>

#include "memfit/core/error.h"

namespace memfit::snapshot::detail {
namespace {
constexpr std::size_t kWindow = std::size_t{512} << 10;
}

ByteSource::ByteSource(const std::string& path) : name_(path) {
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (error) throw BadInput(path, 0, "cannot be opened: " + error.message());
  if (std::filesystem::is_directory(status)) throw BadInput(path, 0, "is a folder, not a snapshot");
  file_.rdbuf()->pubsetbuf(nullptr, 0);  // the window is the buffer
  file_.open(path, std::ios::binary);
  if (!file_) throw BadInput(path, 0, "cannot be opened");
  if (std::filesystem::is_regular_file(status)) {
    size_ = std::filesystem::file_size(path, error);
    if (error) size_ = 0;
  }
  buffer_.resize(kWindow);
  p = end = window_begin_ = buffer_.data();
}

ByteSource::ByteSource(std::string_view bytes, std::string name)
    : name_(std::move(name)), at_end_(true), size_(bytes.size()) {
  p = window_begin_ = reinterpret_cast<const std::uint8_t*>(bytes.data());
  end = p + bytes.size();
}

bool ByteSource::fill(std::uint64_t count) {
  std::size_t have = static_cast<std::size_t>(end - p);
  if (have >= count) return true;
  if (at_end_) return false;
  if (size_ != 0 && count > size_ - offset()) return false;  // the file is known to end before
  window_offset_ = offset();
  if (have > 0 && p != buffer_.data()) std::memmove(buffer_.data(), p, have);
  while (have < count && !at_end_) {
    if (have == buffer_.size()) buffer_.resize(buffer_.size() * 2);  // only after that many bytes really came
    const std::streamsize got = file_.rdbuf()->sgetn(reinterpret_cast<char*>(buffer_.data() + have),
                                                     static_cast<std::streamsize>(buffer_.size() - have));
    if (got <= 0) {
      at_end_ = true;
      break;
    }
    have += static_cast<std::size_t>(got);
  }
  p = window_begin_ = buffer_.data();
  end = p + have;
  return have >= count;
}

}  // namespace memfit::snapshot::detail
