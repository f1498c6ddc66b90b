// What every array reader does with a header: numbers out of bytes, and the check that an array lies inside its file.
// Not here: any one format. Threads: any. Cost: none to speak of.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/data/array_file.h"

namespace memfit::data::detail {

/// An unsigned little-endian number of `width` bytes. Requires: offset + width <= bytes.size().
std::uint64_t little_endian(std::string_view bytes, std::uint64_t offset, int width);
std::uint64_t big_endian(std::string_view bytes, std::uint64_t offset, int width);

/// Bytes that an array of this shape takes.
/// Throws:   BadInput at `offset` when a dimension is negative, there are too many, or the size does not fit 63 bits.
Bytes array_bytes(ElementType type, const std::vector<std::int64_t>& shape, const std::string& file, std::uint64_t offset);

/// "expected N bytes of array NAME and found M": the array [offset, offset + bytes) must end by `end`.
void check_extent(const ArrayInfo& array, std::uint64_t end, const std::string& file);

std::string shape_text(const std::vector<std::int64_t>& shape);

}  // namespace memfit::data::detail
