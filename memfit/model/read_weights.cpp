#include <fmt/format.h>
#include <torch/types.h>

#include <nlohmann/json.hpp>
#include <stdexcept>
#include <tuple>

#include "memfit/model/detail/program.h"
#include "memfit/model/detail/schema_numbers.h"

namespace memfit::model::detail {
namespace {

using Json = nlohmann::json;

std::int64_t fixed_size(const Json& size) {
  if (!size.contains("as_int")) throw std::invalid_argument("its size is no number");
  const auto value = size.at("as_int").get<std::int64_t>();
  if (value < 0) throw std::invalid_argument("its size is negative");
  return value;
}

std::vector<std::int64_t> fixed_sizes(const Json& sizes) {
  std::vector<std::int64_t> values;
  for (const Json& size : sizes) values.push_back(fixed_size(size));
  return values;
}

/// Elements from the start of the record to the end of the tensor. Throws std::invalid_argument on overflow.
std::int64_t extent(const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides, std::int64_t offset) {
  if (sizes.size() != strides.size()) throw std::invalid_argument("it has another number of sizes than of strides");
  std::int64_t last = offset;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return 0;
    std::int64_t step = 0;
    if (__builtin_mul_overflow(sizes[i] - 1, strides[i], &step) || __builtin_add_overflow(last, step, &last)) throw std::invalid_argument("its size overflows 63 bits");
  }
  if (__builtin_add_overflow(last, 1, &last)) throw std::invalid_argument("its size overflows 63 bits");
  return last;
}

class TensorReader {
 public:
  TensorReader(Archive& archive, std::string folder) : archive_(archive), folder_(std::move(folder)) {}

  at::Tensor read(const Json& entry) {
    if (entry.value("use_pickle", false)) throw std::invalid_argument("it is a pickled object (a tensor subclass, quantized or sparse); export plain tensors");
    const Json& meta = entry.at("tensor_meta");
    const auto path = entry.at("path_name").get<std::string>();
    const auto sizes = fixed_sizes(meta.at("sizes")), strides = fixed_sizes(meta.at("strides"));
    const std::int64_t offset = fixed_size(meta.at("storage_offset"));
    const c10::ScalarType type = scalar_type_of(meta.at("dtype").get<int>());
    at::Tensor& tensor = tensors_[std::tuple(path, type, sizes, strides, offset)];
    if (tensor.defined()) return tensor;
    layout_of(meta.at("layout").get<int>());
    const std::int64_t elements = extent(sizes, strides, offset);
    const c10::Storage& storage = storages_.contains(path) ? storages_.at(path) : read_storage(path);
    if (static_cast<std::uint64_t>(elements) > storage.nbytes() / c10::elementSize(type)) {
      throw std::invalid_argument(fmt::format("it takes {} elements of {} bytes and its record {} has {} bytes", elements, c10::elementSize(type), path, storage.nbytes()));
    }
    tensor = at::empty({0}, type).set_(storage, offset, sizes, strides);
    tensor.set_requires_grad(meta.at("requires_grad").get<bool>() && entry.at("is_param").get<bool>());
    return tensor;
  }

 private:
  const c10::Storage& read_storage(const std::string& path) {
    auto [bytes, size] = archive_.read(folder_ + path);
    return storages_.emplace(path, c10::Storage(c10::Storage::use_byte_size_t(), size, std::move(bytes), c10::GetAllocator(c10::kCPU), true)).first->second;
  }

  Archive& archive_;
  std::string folder_;
  std::map<std::string, c10::Storage> storages_;
  std::map<std::tuple<std::string, c10::ScalarType, std::vector<std::int64_t>, std::vector<std::int64_t>, std::int64_t>, at::Tensor> tensors_;
};

}  // namespace

void read_tensors(Archive& archive, const std::string& folder, const std::string& config, std::map<std::string, at::Tensor>& tensors) {
  const std::string record = folder + config;
  if (!archive.has(record)) return;
  const Json json = archive.read_json(record);
  TensorReader reader(archive, folder);
  for (const auto& [name, entry] : json.at("config").items()) {
    try {
      tensors[name] = reader.read(entry);
    } catch (const std::invalid_argument& error) {
      archive.fail(fmt::format("tensor {}: {}", name, error.what()));
    }
  }
}

}  // namespace memfit::model::detail
