#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <utility>

#include "memfit/core/error.h"
#include "memfit/data/array_file.h"
#include "memfit/data/detail/checked_array.h"

namespace memfit::data {
namespace {

using Json = nlohmann::json;

// The format's own limit.
constexpr std::uint64_t kMaxHeader = 100'000'000;
// { "name": { "shape": [ ... ] } }: what is deeper is no safetensors header.
constexpr int kMaxDepth = 3;

constexpr std::array<std::pair<std::string_view, ElementType>, 13> kTypes{{{"BOOL", ElementType::Bool}, {"U8", ElementType::UInt8},
    {"I8", ElementType::Int8}, {"U16", ElementType::UInt16}, {"I16", ElementType::Int16}, {"U32", ElementType::UInt32}, {"I32", ElementType::Int32},
    {"U64", ElementType::UInt64}, {"I64", ElementType::Int64}, {"F16", ElementType::Float16}, {"BF16", ElementType::BFloat16},
    {"F32", ElementType::Float32}, {"F64", ElementType::Float64}}};

Json parse_header(std::string_view header, const std::string& file) {
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) throw BadInput(file, 8, "the header is nested deeper than that of a safetensors file");
    return true;
  };
  try {
    Json json = Json::parse(header, shallow);
    if (!json.is_object()) throw BadInput(file, 8, "the header is not a JSON object");
    return json;
  } catch (const Json::parse_error& error) {
    throw BadInput(file, 8 + error.byte, fmt::format("the header is not JSON ({})", error.what()));
  } catch (const Json::exception& error) {  // a number that no double holds
    throw BadInput(file, 8, fmt::format("the header cannot be read ({})", error.what()));
  }
}

std::uint64_t number(const Json& json, const std::string& name, const std::string& file) {
  if (!json.is_number_unsigned()) throw BadInput(file, 8, fmt::format("tensor {}: a size or an offset is not a whole number", name));
  return json.get<std::uint64_t>();
}

ArrayInfo read_entry(const std::string& name, const Json& entry, std::uint64_t data, const std::string& file, std::uint64_t size) {
  const auto fail = [&](const std::string& reason) { throw BadInput(file, 8, fmt::format("tensor {}: {}", name, reason)); };
  if (!entry.is_object() || !entry.contains("dtype") || !entry.contains("shape") || !entry.contains("data_offsets")) fail("dtype, shape or data_offsets is missing");
  const Json &dtype = entry["dtype"], &shape = entry["shape"], &offsets = entry["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2) fail("dtype, shape or data_offsets is malformed");
  ArrayInfo array;
  array.name = name;
  const auto type = std::ranges::find(kTypes, std::string_view(dtype.get_ref<const std::string&>()), &std::pair<std::string_view, ElementType>::first);
  if (type == kTypes.end()) fail(fmt::format("elements of type {} are not known", dtype.get_ref<const std::string&>()));
  array.type = type->second;
  for (const Json& dimension : shape) {
    const std::uint64_t value = number(dimension, name, file);
    if (value > static_cast<std::uint64_t>(INT64_MAX)) fail("a dimension of more than 63 bits");
    array.shape.push_back(static_cast<std::int64_t>(value));
  }
  const std::uint64_t begin = number(offsets[0], name, file), end = number(offsets[1], name, file);
  array.bytes = detail::array_bytes(array.type, array.shape, file, 8);
  if (begin > end || end - begin != array.bytes.count()) {
    fail(fmt::format("{} {} takes {} bytes and its offsets are {} to {}", element_name(array.type), detail::shape_text(array.shape), array.bytes.count(), begin, end));
  }
  if (end > size - data) fail(fmt::format("ends at byte {} of the data, of which {} are there; the file is cut off", end, size - data));
  array.offset = data + begin;
  return array;
}

}  // namespace

std::vector<ArrayInfo> read_safetensors(std::string_view bytes, const std::string& file) {
  if (bytes.size() < 8) throw BadInput(file, bytes.size(), "a safetensors file starts with the 8 bytes of its header's length");
  const std::uint64_t length = detail::little_endian(bytes, 0, 8);
  if (length > bytes.size() - 8 || length > kMaxHeader) {
    throw BadInput(file, 0, fmt::format("a header of {} bytes; {} follow, and {} is the most allowed", length, bytes.size() - 8, kMaxHeader));
  }
  const Json header = parse_header(bytes.substr(8, length), file);
  std::vector<ArrayInfo> arrays;
  for (const auto& [name, entry] : header.items()) {
    if (name != "__metadata__") arrays.push_back(read_entry(name, entry, 8 + length, file, bytes.size()));
  }
  std::ranges::stable_sort(arrays, {}, &ArrayInfo::offset);
  for (std::size_t i = 1; i < arrays.size(); ++i) {
    if (arrays[i].offset < arrays[i - 1].offset + arrays[i - 1].bytes.count()) {
      throw BadInput(file, arrays[i].offset, fmt::format("tensors {} and {} overlap", arrays[i - 1].name, arrays[i].name));
    }
  }
  return arrays;
}

}  // namespace memfit::data
