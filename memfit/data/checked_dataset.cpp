#include "memfit/data/checked_dataset.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "memfit/core/error.h"

namespace memfit::data {
namespace {

template <class T>
std::span<const T> view(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const T*>(bytes.data()), bytes.size() / sizeof(T)};
}

[[noreturn]] void bad(const Field& field, const std::string& what) {
  throw Error(ExitStatus::BadInput, fmt::format("{} holds {}.", field.name.empty() ? "the array" : field.name, what));
}

template <class T>
void check_floats(std::span<const std::byte> bytes, const Field& field, bool finite) {
  const std::span<const T> values = view<T>(bytes);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<float>(values[i]);
    if (std::isnan(value)) bad(field, fmt::format("nan, at element {} of the row", i));
    if (finite && std::isinf(value)) bad(field, fmt::format("{}, at element {} of the row", value, i));
  }
}

void check_floats(std::span<const std::byte> bytes, const Field& field, bool finite) {
  switch (field.type) {
    case at::kFloat: return check_floats<float>(bytes, field, finite);
    case at::kDouble: return check_floats<double>(bytes, field, finite);
    case at::kHalf: return check_floats<c10::Half>(bytes, field, finite);
    case at::kBFloat16: return check_floats<c10::BFloat16>(bytes, field, finite);
    default: return;
  }
}

template <class T>
void convert_classes(std::span<const std::byte> bytes, std::span<std::byte> into, const Field& field, const FieldCheck& check) {
  const std::span<const T> values = view<T>(bytes);
  auto* out = reinterpret_cast<std::int64_t*>(into.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto value = static_cast<std::int64_t>(values[i]);
    const bool known = value >= 0 && value < *check.classes;
    if (!known && !(check.ignored && value == *check.ignored)) {
      bad(field, fmt::format("class {}, at element {} of the row, and the model has {} classes, 0 to {}{}", value, i, *check.classes, *check.classes - 1,
                             check.ignored ? "" : "; targets that do not count are told with ignore_index"));
    }
    out[i] = value;
  }
}

void convert_classes(std::span<const std::byte> bytes, std::span<std::byte> into, const Field& field, const FieldCheck& check) {
  switch (field.type) {
    case at::kBool:
    case at::kByte: return convert_classes<std::uint8_t>(bytes, into, field, check);
    case at::kChar: return convert_classes<std::int8_t>(bytes, into, field, check);
    case at::kShort: return convert_classes<std::int16_t>(bytes, into, field, check);
    case at::kUInt16: return convert_classes<std::uint16_t>(bytes, into, field, check);
    case at::kInt: return convert_classes<std::int32_t>(bytes, into, field, check);
    case at::kUInt32: return convert_classes<std::uint32_t>(bytes, into, field, check);
    default: return convert_classes<std::int64_t>(bytes, into, field, check);  // uint64 above 2^63 becomes negative, no class
  }
}

}  // namespace

CheckedDataset::CheckedDataset(std::shared_ptr<const Dataset> dataset, std::vector<FieldCheck> checks)
    : dataset_(std::move(dataset)), checks_(dataset_->fields().size()), fields_(dataset_->fields()) {
  for (const FieldCheck& check : checks) {
    Field& field = fields_.at(check.field);
    checks_[check.field] = check;
    if (!check.classes) continue;
    if (at::isFloatingType(field.type)) {
      throw UsageError(fmt::format("{} of {} is {}; numbers of classes are whole numbers.", field.name, dataset_->name(), c10::toString(field.type)));
    }
    field.type = at::kLong;
  }
}

void CheckedDataset::read(Row& row) const {
  const std::vector<Field>& inner = dataset_->fields();
  std::vector<std::vector<std::byte>> narrow(inner.size());
  std::vector<std::byte*> slots;
  for (std::size_t i = 0; i < inner.size(); ++i) {
    if (inner[i].type != fields_[i].type) narrow[i].resize(inner[i].bytes().count());
    slots.push_back(inner[i].type != fields_[i].type ? narrow[i].data() : row.bytes(i).data());
  }
  Row read(row.index(), row.random, inner, slots);
  dataset_->read(read);
  for (std::size_t i = 0; i < inner.size(); ++i) {
    const std::span<const std::byte> bytes(slots[i], inner[i].bytes().count());
    if (checks_[i].classes) {
      convert_classes(bytes, row.bytes(i), inner[i], checks_[i]);
    } else {
      check_floats(bytes, inner[i], checks_[i].finite);
    }
  }
}

}  // namespace memfit::data
