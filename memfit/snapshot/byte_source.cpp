#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/byte_source.h"

namespace memfit::snapshot::detail {
namespace {
constexpr std::size_t kWindow = std::size_t{512} << 10;
}

ByteSource::ByteSource(const std::string& path) : name_(path) {
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file_ < 0) throw BadInput(path, 0, std::string("cannot be opened: ") + std::strerror(errno));
  struct stat status {};
  if (::fstat(file_, &status) == 0) {
    if (S_ISDIR(status.st_mode)) {
      ::close(file_);
      throw BadInput(path, 0, "is a folder, not a snapshot");
    }
    if (S_ISREG(status.st_mode)) size_ = static_cast<std::uint64_t>(status.st_size);
  }
  ::posix_fadvise(file_, 0, 0, POSIX_FADV_SEQUENTIAL);
  buffer_.resize(kWindow);
  p = end = window_begin_ = buffer_.data();
}

ByteSource::ByteSource(std::string_view bytes, std::string name) : name_(std::move(name)), at_end_(true), size_(bytes.size()) {
  p = window_begin_ = reinterpret_cast<const std::uint8_t*>(bytes.data());
  end = p + bytes.size();
}

ByteSource::~ByteSource() {
  if (file_ >= 0) ::close(file_);
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
    const ssize_t got = ::read(file_, buffer_.data() + have, buffer_.size() - have);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw BadInput(name_, window_offset_ + have, std::string("cannot be read: ") + std::strerror(errno));
    }
    if (got == 0) at_end_ = true;
    have += static_cast<std::size_t>(got);
  }
  p = window_begin_ = buffer_.data();
  end = p + have;
  return have >= count;
}

}  // namespace memfit::snapshot::detail
