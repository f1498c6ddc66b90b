#include "memfit/trace/run_status.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "memfit/core/error.h"

namespace memfit::trace {
namespace {

/// Closes a descriptor at the end of its scope; keeps errno.
struct Descriptor {
  int fd;
  ~Descriptor() {
    const int saved = errno;
    if (fd >= 0) ::close(fd);
    errno = saved;
  }
};

template <std::size_t N>
void check_text(const char (&text)[N], const char* name, const RunStatus& status, const std::string& path) {
  if (std::memchr(text, '\0', N) == nullptr) {
    const auto offset = static_cast<std::uint64_t>(text - reinterpret_cast<const char*>(&status));
    throw BadInput(path, offset, fmt::format("the text \"{}\" does not end", name));
  }
}

}  // namespace

RunStatus* create_run_status(const std::string& dir) {
  void* page = MAP_FAILED;
  if (dir.empty()) {
    page = ::mmap(nullptr, sizeof(RunStatus), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  } else {
    const std::string path = fmt::format("{}/{}.status", dir, ::getpid());
    constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW;
    Descriptor file{::open(path.c_str(), kFlags, 0600)};
    if (file.fd < 0 && errno == EEXIST && ::unlink(path.c_str()) == 0) file.fd = ::open(path.c_str(), kFlags, 0600);
    if (file.fd < 0) return nullptr;
    // Really take the room now: a full disk must fail here and not as SIGBUS at the first count.
    if (const int error = ::posix_fallocate(file.fd, 0, sizeof(RunStatus)); error != 0) {
      ::unlink(path.c_str());
      errno = error;
      return nullptr;
    }
    page = ::mmap(nullptr, sizeof(RunStatus), PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
  }
  if (page == MAP_FAILED) return nullptr;
  auto* status = static_cast<RunStatus*>(page);  // zero bytes are a valid RunStatus: every field is an integer
  status->magic = RunStatus::kMagic;
  status->version = RunStatus::kVersion;
  status->size = sizeof(RunStatus);
  status->pid = static_cast<std::uint64_t>(::getpid());
  status->rank = -1;
  return status;
}

std::unique_ptr<RunStatus> open_run_status(const std::string& path) {
  // O_NONBLOCK: a FIFO put in its place must not make us wait.
  Descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK)};
  if (file.fd < 0) throw BadInput(path, 0, fmt::format("cannot be opened ({})", std::strerror(errno)));
  struct stat info {};
  if (::fstat(file.fd, &info) != 0 || !S_ISREG(info.st_mode)) throw BadInput(path, 0, "is not a regular file");
  if (static_cast<std::uint64_t>(info.st_size) != sizeof(RunStatus)) {
    throw BadInput(path, static_cast<std::uint64_t>(info.st_size),
                   fmt::format("ends here, a status page has {} bytes", sizeof(RunStatus)));
  }
  auto status = std::make_unique<RunStatus>();
  auto* bytes = reinterpret_cast<char*>(status.get());
  std::size_t have = 0;
  while (have < sizeof(RunStatus)) {
    const ssize_t n = ::pread(file.fd, bytes + have, sizeof(RunStatus) - have, static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw BadInput(path, have, "ends too early");
    have += static_cast<std::size_t>(n);
  }
  if (status->magic != RunStatus::kMagic) throw BadInput(path, 0, "is not a memfit status page");
  if (status->version != RunStatus::kVersion || status->size != sizeof(RunStatus)) {
    throw BadInput(path, offsetof(RunStatus, version),
                   fmt::format("has version {} and size {}, this memfit reads version {} and size {}", status->version,
                               status->size, RunStatus::kVersion, sizeof(RunStatus)));
  }
  check_text(status->torch_version, "torch_version", *status, path);
  check_text(status->device, "device", *status, path);
  check_text(status->door, "door", *status, path);
  check_text(status->message, "message", *status, path);
  for (const RunStatus::Holder& holder : status->largest_holders) {
    check_text(holder.op, "op", *status, path);
    check_text(holder.shape, "shape", *status, path);
  }
  return status;
}

}  // namespace memfit::trace
