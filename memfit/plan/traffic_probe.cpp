#include "memfit/plan/traffic_probe.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <chrono>
#include <cstring>
#include <vector>

#include "memfit/core/error.h"

namespace memfit::plan {
namespace {

constexpr std::size_t kBlock = 4u << 20, kBlocks = 16;

[[noreturn]] void refuse(const std::string& folder, const std::string& why) {
  throw UsageError(fmt::format("--offload: {} {}. Name a writable folder on a disk.", folder, why));
}

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Of this thread on a core.
double own_seconds() {
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

/// An open file that has no name any more: it goes when it is closed, even by a crash.
class NamelessFile {
 public:
  explicit NamelessFile(const std::string& folder) : name_(folder + "/memfit-probe-XXXXXX") {
    fd_ = ::mkostemp(name_.data(), O_CLOEXEC);
    if (fd_ < 0) refuse(folder, fmt::format("cannot be written ({})", std::strerror(errno)));
    ::unlink(name_.c_str());
  }
  ~NamelessFile() { ::close(fd_); }
  NamelessFile(const NamelessFile&) = delete;
  NamelessFile& operator=(const NamelessFile&) = delete;
  int fd() const { return fd_; }

 private:
  std::string name_;
  int fd_ = -1;
};

}  // namespace

OffloadPlace probe_offload_place(const std::string& folder) {
  struct stat about {};
  if (::stat(folder.c_str(), &about) != 0) refuse(folder, fmt::format("cannot be used ({})", std::strerror(errno)));
  if (!S_ISDIR(about.st_mode)) refuse(folder, "is no folder");
  struct statfs system {};
  if (::statfs(folder.c_str(), &system) != 0) refuse(folder, fmt::format("cannot be used ({})", std::strerror(errno)));
  if (system.f_type == TMPFS_MAGIC || system.f_type == RAMFS_MAGIC) refuse(folder, "lies in memory, where offloading saves nothing");
  OffloadPlace place;
  place.free = Bytes(static_cast<std::uint64_t>(system.f_bavail) * static_cast<std::uint64_t>(system.f_bsize));
  if (place.free < Bytes(2 * kBlock * kBlocks)) refuse(folder, fmt::format("has only {} left", format_bytes(place.free)));
  const NamelessFile file(folder);
  std::vector<char> block(kBlock);
  for (std::size_t i = 0; i < kBlock; ++i) block[i] = static_cast<char>(i * 2654435761u >> 13);
  auto start = std::chrono::steady_clock::now();
  const double busy = own_seconds();
  for (std::size_t i = 0; i < kBlocks; ++i)
    if (::pwrite(file.fd(), block.data(), kBlock, static_cast<off_t>(i * kBlock)) != static_cast<ssize_t>(kBlock))
      refuse(folder, fmt::format("cannot be written ({})", std::strerror(errno)));
  if (::fdatasync(file.fd()) != 0) refuse(folder, fmt::format("cannot be written ({})", std::strerror(errno)));
  place.traffic.write_bytes_per_second = static_cast<double>(kBlock * kBlocks) / seconds_since(start);
  ::posix_fadvise(file.fd(), 0, 0, POSIX_FADV_DONTNEED);
  start = std::chrono::steady_clock::now();
  if (::pread(file.fd(), block.data(), 4096, 0) != 4096) refuse(folder, "cannot be read back");
  place.traffic.latency = trace::Seconds(seconds_since(start));
  start = std::chrono::steady_clock::now();
  for (std::size_t i = 0; i < kBlocks; ++i)
    if (::pread(file.fd(), block.data(), kBlock, static_cast<off_t>(i * kBlock)) != static_cast<ssize_t>(kBlock)) refuse(folder, "cannot be read back");
  place.traffic.busy_seconds_per_byte = (own_seconds() - busy) / static_cast<double>(2 * kBlock * kBlocks);
  place.traffic.read_bytes_per_second = static_cast<double>(kBlock * kBlocks) / seconds_since(start);
  return place;
}

}  // namespace memfit::plan
