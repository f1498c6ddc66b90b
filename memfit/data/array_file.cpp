#include "memfit/data/array_file.h"

#include <fmt/ranges.h>

#include <array>

#include "memfit/core/error.h"
#include "memfit/data/detail/checked_array.h"

namespace memfit::data {
namespace {

struct ElementFacts {
  std::string_view name;
  std::uint64_t size;
};
// In the order of ElementType.
constexpr std::array<ElementFacts, 13> kElements{{{"bool", 1}, {"uint8", 1}, {"int8", 1}, {"uint16", 2}, {"int16", 2}, {"uint32", 4},
    {"int32", 4}, {"uint64", 8}, {"int64", 8}, {"float16", 2}, {"bfloat16", 2}, {"float32", 4}, {"float64", 8}}};
// NumPy allows 64; more is no array that anyone trains on.
constexpr std::size_t kMaxDimensions = 64;

}  // namespace

Bytes element_size(ElementType type) { return Bytes(kElements[static_cast<std::size_t>(type)].size); }
std::string_view element_name(ElementType type) { return kElements[static_cast<std::size_t>(type)].name; }

namespace detail {

std::uint64_t little_endian(std::string_view bytes, std::uint64_t offset, int width) {
  std::uint64_t value = 0;
  for (int i = width - 1; i >= 0; --i) value = value << 8 | static_cast<unsigned char>(bytes[offset + static_cast<std::uint64_t>(i)]);
  return value;
}

std::uint64_t big_endian(std::string_view bytes, std::uint64_t offset, int width) {
  std::uint64_t value = 0;
  for (int i = 0; i < width; ++i) value = value << 8 | static_cast<unsigned char>(bytes[offset + static_cast<std::uint64_t>(i)]);
  return value;
}

std::string shape_text(const std::vector<std::int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

Bytes array_bytes(ElementType type, const std::vector<std::int64_t>& shape, const std::string& file, std::uint64_t offset) {
  if (shape.size() > kMaxDimensions) {
    throw BadInput(file, offset, fmt::format("an array of {} dimensions; at most {} are allowed", shape.size(), kMaxDimensions));
  }
  // The product of the other dimensions must fit too where one of them is 0: strides are made from it.
  std::int64_t count = 1;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0) throw BadInput(file, offset, fmt::format("an array of the negative dimension {}", size));
    empty = empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(count, size, &count)) count = -1;
    if (count < 0) throw BadInput(file, offset, fmt::format("an array of shape {} has more elements than 63 bits count", shape_text(shape)));
  }
  if (__builtin_mul_overflow(count, static_cast<std::int64_t>(element_size(type).count()), &count)) {
    throw BadInput(file, offset, fmt::format("an array of shape {} has more bytes than 63 bits count", shape_text(shape)));
  }
  return Bytes(empty ? 0 : static_cast<std::uint64_t>(count));
}

void check_extent(const ArrayInfo& array, std::uint64_t end, const std::string& file) {
  const std::uint64_t found = array.offset > end ? 0 : end - array.offset;
  if (array.bytes.count() <= found) return;
  throw BadInput(file, array.offset,
                 fmt::format("array{}{} ({} {}) needs {} bytes from here and {} are there; the file is cut off or its header is wrong",
                             array.name.empty() ? "" : " ", array.name, element_name(array.type), shape_text(array.shape),
                             array.bytes.count(), found));
}

}  // namespace detail

ArrayFormat array_format(std::string_view bytes, const std::string& file) {
  if (bytes.starts_with("\x93NUMPY")) return ArrayFormat::Npy;
  if (bytes.starts_with("PK\x03\x04") || bytes.starts_with("PK\x05\x06")) return ArrayFormat::Npz;
  if (bytes.size() >= 4 && bytes[0] == 0 && bytes[1] == 0 && bytes[2] >= 8 && bytes[2] <= 14) return ArrayFormat::Idx;
  if (bytes.size() >= 9 && bytes[8] == '{') return ArrayFormat::Safetensors;
  if (bytes.starts_with("\x1f\x8b")) throw BadInput(file, 0, "this is gzip; unpack it first (gunzip), arrays are mapped where they lie");
  throw BadInput(file, 0, "no array file that memfit knows: .npy, .npz, .safetensors and IDX are read (tokens and pictures are named by flags)");
}

std::vector<ArrayInfo> read_array_file(std::string_view bytes, const std::string& file) {
  switch (array_format(bytes, file)) {
    case ArrayFormat::Npy: return {read_npy(bytes, 0, bytes.size(), file)};
    case ArrayFormat::Npz: return read_npz(bytes, file);
    case ArrayFormat::Safetensors: return read_safetensors(bytes, file);
    case ArrayFormat::Idx: return {read_idx(bytes, file)};
  }
  return {};
}

ArrayInfo read_idx(std::string_view bytes, const std::string& file) {
  if (bytes.size() < 4 || bytes[0] != 0 || bytes[1] != 0) throw BadInput(file, 0, "not an IDX file: it does not start with two zero bytes");
  ArrayInfo array;
  const int code = static_cast<unsigned char>(bytes[2]);
  if (code == 0x08) {
    array.type = ElementType::UInt8;
  } else if (code == 0x09) {
    array.type = ElementType::Int8;
  } else {
    throw BadInput(file, 2, fmt::format("an IDX file of element type 0x{:02x}; only bytes (0x08, 0x09) are mapped, others are stored "
                                        "big-endian. Write it as .npy instead (numpy.save)", code));
  }
  const std::uint64_t dimensions = static_cast<unsigned char>(bytes[3]);
  if (bytes.size() < 4 + 4 * dimensions) {
    throw BadInput(file, 4, fmt::format("an IDX header of {} dimensions takes {} bytes and {} are there", dimensions, 4 + 4 * dimensions, bytes.size()));
  }
  for (std::uint64_t i = 0; i < dimensions; ++i) array.shape.push_back(static_cast<std::int64_t>(detail::big_endian(bytes, 4 + 4 * i, 4)));
  array.offset = 4 + 4 * dimensions;
  array.bytes = detail::array_bytes(array.type, array.shape, file, 4);
  detail::check_extent(array, bytes.size(), file);
  return array;
}

}  // namespace memfit::data
