#include "memfit/data/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "memfit/core/error.h"

namespace memfit::data {

std::shared_ptr<const MappedFile> MappedFile::open(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw BadInput(path, 0, std::string("cannot be opened: ") + std::strerror(errno));
  struct stat facts {};
  const bool known = ::fstat(file, &facts) == 0;
  if (!known || !S_ISREG(facts.st_mode)) {
    ::close(file);
    throw BadInput(path, 0, "is no regular file, so it cannot be mapped");
  }
  const auto size = static_cast<std::size_t>(facts.st_size);
  void* start = size == 0 ? nullptr : ::mmap(nullptr, size, PROT_READ, MAP_SHARED, file, 0);
  const int reason = errno;
  ::close(file);
  if (start == MAP_FAILED) throw BadInput(path, 0, std::string("cannot be mapped: ") + std::strerror(reason));
  return std::shared_ptr<const MappedFile>(new MappedFile(path, {static_cast<const char*>(start), size}));
}

MappedFile::~MappedFile() {
  if (!bytes_.empty()) ::munmap(const_cast<char*>(bytes_.data()), bytes_.size());
}

}  // namespace memfit::data
