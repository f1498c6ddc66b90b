#include "memfit/data/array_dataset.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "memfit/core/error.h"

namespace memfit::data {
namespace {

// In the order of ElementType.
constexpr std::array<at::ScalarType, 13> kScalarTypes{at::kBool, at::kByte, at::kChar, at::kUInt16, at::kShort, at::kUInt32, at::kInt,
                                                      at::kUInt64, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble};

at::Tensor map_tensor(const ArrayInfo& array, const std::shared_ptr<const MappedFile>& file) {
  const at::TensorOptions options(scalar_type(array.type));
  if (array.bytes == Bytes(0)) return at::empty(array.shape, options);
  const char* start = file->bytes().data() + array.offset;
  if (array.offset % element_size(array.type).count() != 0) {
    const at::Tensor copy = at::empty(array.shape, options);
    std::memcpy(copy.data_ptr(), start, array.bytes.count());
    return copy;
  }
  return at::from_blob(const_cast<char*>(start), array.shape, [file](void*) {}, options);
}

std::string key_text(const std::string& key) { return key.empty() ? "the array" : "array " + key; }

}  // namespace

at::ScalarType scalar_type(ElementType type) { return kScalarTypes[static_cast<std::size_t>(type)]; }

std::vector<NamedArray> map_arrays(const std::string& path) {
  const auto file = MappedFile::open(path);
  std::vector<NamedArray> arrays;
  for (const ArrayInfo& array : read_array_file(file->bytes(), path)) arrays.push_back({array.name, map_tensor(array, file)});
  return arrays;
}

ArrayDataset::ArrayDataset(const std::string& path, const std::vector<std::string>& keys) : name_(path) {
  const auto file = MappedFile::open(path);
  const std::vector<ArrayInfo> arrays = read_array_file(file->bytes(), path);
  const auto add_array = [&](const ArrayInfo& array) {
    add(array.name, scalar_type(array.type), array.shape, {reinterpret_cast<const std::byte*>(file->bytes().data()) + array.offset, file});
  };
  if (keys.empty()) std::ranges::for_each(arrays, add_array);
  for (const std::string& key : keys) {
    const auto array = std::ranges::find(arrays, key, &ArrayInfo::name);
    if (array == arrays.end()) {
      std::vector<std::string> names;
      for (const ArrayInfo& there : arrays) names.push_back(there.name);
      throw UsageError(fmt::format("{} has no array {}. Its arrays: {}.", path, key, fmt::join(names, ", ")));
    }
    add_array(*array);
  }
  if (columns_.empty()) throw UsageError(fmt::format("{} holds no array.", path));
}

ArrayDataset::ArrayDataset(std::vector<NamedArray> arrays, std::string name) : name_(std::move(name)) {
  for (const NamedArray& array : arrays) {
    const auto tensor = std::make_shared<const at::Tensor>(array.tensor.contiguous());
    add(array.name, tensor->scalar_type(), tensor->sizes().vec(), {static_cast<const std::byte*>(tensor->const_data_ptr()), tensor});
  }
  if (columns_.empty()) throw UsageError(fmt::format("{} holds no array.", name_));
}

void ArrayDataset::add(const std::string& key, at::ScalarType type, const std::vector<std::int64_t>& shape, Column column) {
  if (shape.empty()) throw UsageError(fmt::format("{} of {} is a single number; its first dimension must be the rows.", key_text(key), name_));
  if (columns_.empty()) rows_ = shape.front();
  if (shape.front() != rows_) {
    throw UsageError(fmt::format("In {}, {} has {} rows and {} has {}; a dataset's arrays have the same number.", name_, key_text(fields_.front().name),
                                 rows_, key_text(key), shape.front()));
  }
  fields_.push_back({key, type, {shape.begin() + 1, shape.end()}});
  columns_.push_back(std::move(column));
}

void ArrayDataset::read(Row& row) const {
  for (std::size_t i = 0; i < columns_.size(); ++i) {
    const std::span<std::byte> slot = row.bytes(i);
    std::memcpy(slot.data(), columns_[i].start + static_cast<std::size_t>(row.index()) * slot.size(), slot.size());
  }
}

}  // namespace memfit::data
