#include "memfit/core/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <optional>

#include "memfit/core/error.h"

namespace memfit {
namespace {

std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// A new file in the folder of its final path, removed again unless it got its final name.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& final_path) {
    // Hidden, in the same folder: rename works only inside one file system.
    path_ = folder_of(final_path) + "/.memfit-XXXXXX";
    fd_ = ::mkostemp(path_.data(), O_CLOEXEC);
    error_ = fd_ < 0 ? errno : 0;
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  ~TemporaryFile() {
    if (fd_ < 0) return;
    ::close(fd_);
    if (!renamed_) ::unlink(path_.c_str());
  }

  /// 0 or the errno of what failed.
  int error() const { return error_; }

  int write(std::string_view text) {
    while (!text.empty()) {
      const ssize_t n = ::write(fd_, text.data(), text.size());
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return errno;
      text.remove_prefix(static_cast<std::size_t>(n));
    }
    // mkostemp makes files for their owner only; a result has the permissions any new file would have.
    const mode_t mask = ::umask(0);
    ::umask(mask);
    if (::fchmod(fd_, 0666 & ~mask) != 0) return errno;
    return ::fsync(fd_) == 0 ? 0 : errno;
  }

  int rename_to(const std::string& final_path, Replace replace) {
    if (replace == Replace::Yes) {
      if (::rename(path_.c_str(), final_path.c_str()) != 0) return errno;
    } else {
      // A second name fails where one exists, which rename() does not on every file system.
      if (::link(path_.c_str(), final_path.c_str()) != 0) return errno;
      ::unlink(path_.c_str());
    }
    renamed_ = true;
    return 0;
  }

 private:
  std::string path_;
  int fd_ = -1;
  int error_ = 0;
  bool renamed_ = false;
};

/// Why `path` cannot be written, as the end of a sentence; nothing when it can.
std::optional<std::string> obstacle(const std::string& path, Replace replace) {
  if (path.empty()) return "is empty";
  if (path.back() == '/') return "names a folder";
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) {
    if (S_ISDIR(info.st_mode)) return "is a folder";
    if (!S_ISREG(info.st_mode)) return "is not a regular file";
    if (replace == Replace::No) return "exists already (--force replaces it)";
  }
  if (const int error = TemporaryFile(path).error(); error != 0) {
    return fmt::format("cannot be written ({})", std::strerror(error));
  }
  return std::nullopt;
}

void sync_folder(const std::string& path) {
  const int fd = ::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;  // not readable: the name is safe a little later, when the kernel writes it
  ::fsync(fd);
  ::close(fd);
}

}  // namespace

void check_output_file(const std::string& path, std::string_view flag, Replace replace) {
  if (const auto reason = obstacle(path, replace)) {
    throw UsageError(fmt::format("{}: \"{}\" {}. Name a file that can be made, for example {} memfit-run.json.", flag,
                                 path, *reason, flag));
  }
}

void write_output_file(const std::string& path, std::string_view text, Replace replace) {
  auto fail = [&](int error) {
    return Error(ExitStatus::Failed, fmt::format("{}: cannot be written ({})", path, std::strerror(error)));
  };
  TemporaryFile file(path);
  if (file.error() != 0) throw fail(file.error());
  if (const int error = file.write(text); error != 0) throw fail(error);
  if (const int error = file.rename_to(path, replace); error != 0) throw fail(error);
  sync_folder(path);
}

std::string path_with_word(const std::string& path, std::string_view word) {
  const auto slash = path.rfind('/');
  const auto dot = path.rfind('.');
  const auto name = slash == std::string::npos ? 0 : slash + 1;
  const bool has_extension = dot != std::string::npos && dot > name;
  return has_extension ? fmt::format("{}.{}{}", path.substr(0, dot), word, path.substr(dot)) : fmt::format("{}.{}", path, word);
}

}  // namespace memfit
