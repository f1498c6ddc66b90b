// A file without a name in a folder: nobody else can open it, and it is gone when the process is, however it ends.
// Not here: what lies where in it (engine/offload_store.h).
// Threads: any; reads and writes at different places may overlap. Cost: system calls.
#pragma once

#include <cstdint>
#include <string>

namespace memfit::device {

class ScratchFile {
 public:
  /// Throws: UsageError naming `folder` when no file can be made there.
  explicit ScratchFile(const std::string& folder);
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// Returns: 0, or the system's error number (ENOSPC: the disk is full). What was written in part is worthless.
  int write(const void* data, std::uint64_t bytes, std::uint64_t at) noexcept;
  int read(void* data, std::uint64_t bytes, std::uint64_t at) noexcept;

 private:
  int fd_ = -1;
};

}  // namespace memfit::device
