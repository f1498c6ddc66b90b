// Fuzz target: any bytes either become arrays that lie inside the file or are refused with BadInput; nothing else happens.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "memfit/core/error.h"
#include "memfit/data/array_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    for (const auto& array : memfit::data::read_array_file({reinterpret_cast<const char*>(data), size}, "fuzz")) {
      if (array.offset > size || array.bytes.count() > size - array.offset) std::abort();
    }
  } catch (const memfit::BadInput&) {}
  return 0;
}
