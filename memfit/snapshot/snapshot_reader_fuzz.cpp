// Fuzz target: any bytes either become a snapshot or are refused with BadInput; nothing else happens.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "memfit/core/error.h"
#include "memfit/snapshot/snapshot_reader.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    memfit::snapshot::read_allocator_snapshot_bytes({reinterpret_cast<const char*>(data), size}, "fuzz");
  } catch (const memfit::BadInput&) {}
  return 0;
}
