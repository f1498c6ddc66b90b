// What arrays a file holds and where in it their bytes lie: .npy, .npz (stored), safetensors, IDX. Hostile input is refused.
// Not here: the tensors over those bytes (arrays.h), pictures (image_folder.h), tokens (token_file.h).
// Threads: any; pure functions of the bytes. Cost: that of the headers; the arrays themselves are not touched.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::data {

enum class ElementType { Bool, UInt8, Int8, UInt16, Int16, UInt32, Int32, UInt64, Int64, Float16, BFloat16, Float32, Float64 };

Bytes element_size(ElementType type);
/// As PyTorch says it: "float32", "int64", "bool".
std::string_view element_name(ElementType type);

/// An array in a file: little-endian, row-major, at a byte offset of the file.
struct ArrayInfo {
  std::string name;  // key in the file; "" where the format has no names
  ElementType type = ElementType::UInt8;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;
  Bytes bytes;
};

enum class ArrayFormat { Npy, Npz, Safetensors, Idx };

/// The format as the first bytes tell it; `file` stands in messages.
/// Throws:   BadInput naming what is known.
ArrayFormat array_format(std::string_view bytes, const std::string& file);

/// All arrays of a file, in the file's order. `bytes` is the whole file.
/// Throws:   BadInput naming the file, the byte, what was expected and what was found.
std::vector<ArrayInfo> read_array_file(std::string_view bytes, const std::string& file);

std::vector<ArrayInfo> read_npz(std::string_view bytes, const std::string& file);
std::vector<ArrayInfo> read_safetensors(std::string_view bytes, const std::string& file);
ArrayInfo read_idx(std::string_view bytes, const std::string& file);
/// The array that starts at `begin` and must end by `end`.
ArrayInfo read_npy(std::string_view bytes, std::uint64_t begin, std::uint64_t end, const std::string& file);

}  // namespace memfit::data
