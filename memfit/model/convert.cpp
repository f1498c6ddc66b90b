// Python's operators take more than their schemas say: a number for a tensor, an int for a float, one int for a list.
#include <ATen/ScalarOps.h>

#include "memfit/model/detail/graph.h"

namespace memfit::model::detail {
namespace {

c10::IValue convert_list(const c10::IValue& value, const c10::ListType& type, std::optional<int> length) {
  const c10::TypePtr element = type.getElementType();
  c10::impl::GenericList list(element);
  if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) list.push_back(convert(item, element, std::nullopt));
  } else {
    for (int i = 0; i < length.value_or(1); ++i) list.push_back(convert(value, element, std::nullopt));
  }
  return list;
}

}  // namespace

c10::IValue convert(c10::IValue value, const c10::TypePtr& type, std::optional<int> length) {
  switch (type->kind()) {
    case c10::TypeKind::OptionalType:
      if (value.isNone()) return value;
      return convert(std::move(value), type->castRaw<c10::OptionalType>()->getElementType(), length);
    case c10::TypeKind::TensorType:
      if (value.isNone()) return at::Tensor();
      // "Wrapped": does not take part in choosing the result's type, as a Python number does not.
      if (value.isScalar()) return at::native::wrapped_scalar_tensor(value.toScalar());
      return value;
    case c10::TypeKind::FloatType:
      if (value.isInt()) return static_cast<double>(value.toInt());
      return value;
    case c10::TypeKind::ListType: return convert_list(value, *type->castRaw<c10::ListType>(), length);
    default: return value;
  }
}

}  // namespace memfit::model::detail
