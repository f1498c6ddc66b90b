// A file's bytes as memory that the kernel reads on demand and may drop at any time.
// Not here: what the bytes mean. Threads: any may read. Cost: a few system calls; memory as pages are touched.
// A file that is cut short while it is mapped ends the program with SIGBUS, as with every mapping: do not rewrite data in place.
#pragma once

#include <memory>
#include <string>
#include <string_view>

namespace memfit::data {

class MappedFile {
 public:
  /// Throws:   BadInput naming `path` when it cannot be opened or is no regular file.
  static std::shared_ptr<const MappedFile> open(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::string& path() const { return path_; }
  std::string_view bytes() const { return bytes_; }

 private:
  MappedFile(std::string path, std::string_view bytes) : path_(std::move(path)), bytes_(bytes) {}

  std::string path_;
  std::string_view bytes_;
};

}  // namespace memfit::data
