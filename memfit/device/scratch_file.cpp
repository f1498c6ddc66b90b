#include "memfit/device/scratch_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "memfit/core/error.h"

namespace memfit::device {
namespace {
constexpr std::uint64_t kMostAtOnce = std::uint64_t{1} << 30;  // one call moves less than 2 GiB
}

ScratchFile::ScratchFile(const std::string& folder) {
  std::string name = folder + "/memfit-offload-XXXXXX";
  fd_ = ::mkostemp(name.data(), O_CLOEXEC);  // mode 0600
  if (fd_ < 0)
    throw UsageError(fmt::format("--offload: {} cannot be written ({}). Name a writable folder on a disk.", folder,
                                 std::strerror(errno)));
  ::unlink(name.c_str());
}

ScratchFile::~ScratchFile() { ::close(fd_); }

int ScratchFile::write(const void* data, std::uint64_t bytes, std::uint64_t at) noexcept {
  const auto* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::pwrite(fd_, from, std::min(bytes, kMostAtOnce), static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done == 0 ? ENOSPC : errno;
    from += done;
    at += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::uint64_t>(done);
  }
  return 0;
}

int ScratchFile::read(void* data, std::uint64_t bytes, std::uint64_t at) noexcept {
  auto* to = static_cast<char*>(data);
  while (bytes > 0) {
    const ssize_t done = ::pread(fd_, to, std::min(bytes, kMostAtOnce), static_cast<off_t>(at));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) return done == 0 ? EIO : errno;
    to += done;
    at += static_cast<std::uint64_t>(done);
    bytes -= static_cast<std::uint64_t>(done);
  }
  return 0;
}

}  // namespace memfit::device
