// The numbers that the serialized form of torch.export gives to types, layouts and memory formats: not PyTorch's own.
// Not here: anything else. Threads: any. Cost: none.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Layout.h>
#include <c10/core/MemoryFormat.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json_fwd.hpp>

namespace memfit::model::detail {

/// Each throws std::invalid_argument when the number is unknown or names what training on this device cannot use.
c10::ScalarType scalar_type_of(int number);
c10::MemoryFormat memory_format_of(int number);
c10::Layout layout_of(int number);
c10::Device device_of(const nlohmann::json& device);

}  // namespace memfit::model::detail
