#include "memfit/optim/autocast.h"

#include <ATen/autocast_mode.h>
#include <fmt/format.h>

#include "memfit/core/error.h"

namespace memfit::optim {

Autocast::Autocast(at::ScalarType type, c10::DeviceType device, bool on)
    : device_(device), enabled_before_(at::autocast::is_autocast_enabled(device)), type_before_(at::autocast::get_autocast_dtype(device)) {
  if (type != at::kBFloat16 && type != at::kHalf) {
    throw UsageError(fmt::format("Autocast: {} is not bfloat16 or float16.", c10::toString(type)));
  }
  at::autocast::set_autocast_enabled(device, on);
  at::autocast::set_autocast_dtype(device, type);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, enabled_before_);
  at::autocast::set_autocast_dtype(device_, type_before_);
}

void Autocast::forget_weights() { at::autocast::clear_cache(); }

}  // namespace memfit::optim
