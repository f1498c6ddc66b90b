#include "memfit/device/process_memory.h"

#include <fcntl.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdlib>

#include "memfit/device/address_space.h"

namespace memfit::device {

Bytes resident_memory() {
  char text[128];
  const int file = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
  if (file < 0) return Bytes();
  const ssize_t n = read(file, text, sizeof(text) - 1);
  close(file);
  if (n <= 0) return Bytes();
  text[n] = 0;
  char* rest = nullptr;
  std::strtoull(text, &rest, 10);
  return Bytes(std::strtoull(rest, nullptr, 10) * page_bytes());
}

Bytes peak_resident_memory() {
  struct rusage usage {};
  getrusage(RUSAGE_SELF, &usage);
  return Bytes(static_cast<std::uint64_t>(usage.ru_maxrss) * 1024);
}

void trim_heap() { malloc_trim(0); }

}  // namespace memfit::device
