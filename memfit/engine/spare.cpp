// Copies of values elsewhere: in a short form, or in a file. A value with one has an easy way back.
#include <algorithm>

#include "memfit/engine/detail/ticks.h"
#include "memfit/engine/engine.h"

namespace memfit::engine {

namespace {
/// Memory that the program has not asked for.
c10::DataPtr own_memory(memory::CpuAllocator& allocator, std::uint64_t bytes) {
  const bool old = memory::set_allocating_for_replay(true);
  try {
    c10::DataPtr data = allocator.allocate(bytes);
    memory::set_allocating_for_replay(old);
    return data;
  } catch (...) {
    memory::set_allocating_for_replay(old);
    throw;
  }
}
}  // namespace

void Engine::set_offload(const std::string& folder, Bytes limit) {
  auto store = std::make_unique<OffloadStore>(folder, limit);
  const Turn turn(*this);
  finish_moves();
  if (offload_) offload_stores_.push_back(std::move(offload_));  // copies in it may still be wanted
  offload_ = std::move(store);
  offload_full_ = false;
}

void Engine::close_offload() {
  const Turn turn(*this);
  finish_moves();
  offload_full_ = true;
}

/// Makes the short form. False: the content has none that fits.
bool Engine::pack(Value* value, caffe2::TypeMeta dtype, std::uint64_t capacity) {
  if (value->spare) return true;  // still good: it goes with the first write
  const std::size_t width = dtype.itemsize();
  if (width == 0 || width > 8 || (width & (width - 1)) != 0) return false;
  std::uint64_t likely = 0;
  const bool integer = c10::isIntegralType(c10::typeMetaToScalarType(dtype), false);
  auto spare = std::make_unique<Spare>();
  spare->form =
      memory::guess_form(value->block->data(), value->bytes, static_cast<std::uint8_t>(width), integer, &likely);
  if (spare->form.kind == memory::PackForm::Kind::None) return false;
  ++value->locks;
  try {
    spare->packed = own_memory(allocator_, capacity);
  } catch (...) {
    --value->locks;
    throw;
  }
  --value->locks;
  if (!memory::pack(spare->form, value->block->data(), value->bytes, spare->packed.get(), capacity)) return false;
  value->spare = std::move(spare);
  update_candidate(value);
  ++stats_.packed;
  return true;
}

// Nanoseconds to move `value` out and back.
double Engine::outside_cost(const Value* value) const {
  const plan::Traffic& traffic = offload_->traffic();
  const double bytes = static_cast<double>(value->bytes);
  const double back = bytes / traffic.read_bytes_per_second + traffic.latency.count();
  return 1e9 * (value->spare ? back : back + bytes / traffic.write_bytes_per_second + traffic.latency.count());
}

/// False: there is no room outside.
bool Engine::start_leaving(Value* value) {
  if (value->spare) return true;
  auto copy = offload_->start_write(value->block->data(), value->bytes);
  if (copy == nullptr) return false;
  value->spare = std::make_unique<Spare>();
  value->spare->outside = std::move(copy);
  value->spare->leaving = true;
  update_candidate(value);
  ++value->locks;
  moving_.push_back(value);
  stats_.offload_write_bytes += value->bytes;
  return true;
}

/// False: the copy could not be written, and the value stays.
bool Engine::finish_leaving(Value* value) {
  moving_.erase(std::find(moving_.begin(), moving_.end(), value));
  value->spare->leaving = false;
  --value->locks;
  const bool written = OffloadStore::wait(*value->spare->outside);
  if (!written) {
    offload_full_ = true;
    value->spare.reset();
    update_candidate(value);
  }
  release_if_unused(value);
  return written;
}

void Engine::start_arriving(Value* value) {
  if (!value->spare || !value->spare->outside || value->spare->arriving) return;
  value->spare->arriving = own_memory(allocator_, value->bytes);
  OffloadStore::start_read(value->spare->outside, value->spare->arriving.get());
  moving_.push_back(value);
  stats_.offload_read_bytes += value->bytes;
}

void Engine::finish_arriving(Value* value) {
  moving_.erase(std::find(moving_.begin(), moving_.end(), value));
  int error = 0;
  const bool read = OffloadStore::wait(*value->spare->outside, &error);
  c10::DataPtr data = std::move(value->spare->arriving);
  value->spare->arriving = c10::DataPtr();
  if (!read) {
    drop_spare(value);
    TORCH_CHECK(value->recipe != nullptr, "memfit: ", value->bytes,
                " bytes of a tensor were moved out (--offload) and cannot be read back: ",
                OffloadStore::error_text(error), ". The run cannot go on.");
    return;  // it is made again
  }
  if (value->bound) settle(value, std::move(data));
  else hold(value, std::move(data));
}

/// Copies `value` out, unless there is a spare copy. False: it cannot, and nothing more will.
bool Engine::keep_outside(Value* value) {
  if (!value->spare && offload_ && !offload_full_ && start_leaving(value)) finish_leaving(value);
  if (!value->spare) offload_full_ = true;
  return value->spare != nullptr;
}

// The plan that began them does not go on.
void Engine::finish_moves() {
  while (!moving_.empty()) {
    Value* value = moving_.back();
    if (value->spare->leaving) finish_leaving(value);
    else finish_arriving(value);
  }
}

/// Brings the bytes back from the spare copy, which stays beside them while a plan may count on it.
void Engine::fetch(Value* value) {
  Spare& spare = *value->spare;
  if (spare.outside) {
    start_arriving(value);
    finish_arriving(value);
    if (!value->resident) return restore(value);
  } else {
    c10::DataPtr data = own_memory(allocator_, value->bytes);
    memory::unpack(spare.form, spare.packed.get(), value->bytes, data.get());
    if (value->bound) settle(value, std::move(data));
    else hold(value, std::move(data));
  }
  TORCH_INTERNAL_ASSERT(value->resident, "memfit: a value did not come back from its spare copy");
  if (verify_) check_bytes(value, nullptr);
  // A file's copy takes no memory, so it may serve again.
  if (planned_.current() == nullptr && !value->spare->outside) drop_spare(value);
}

void Engine::drop_spare(Value* value) noexcept {
  if (!value->spare) return;
  const auto moving = std::find(moving_.begin(), moving_.end(), value);
  if (moving != moving_.end()) {
    moving_.erase(moving);
    if (value->spare->leaving) --value->locks;
  }
  value->spare.reset();
  update_candidate(value);
}

}  // namespace memfit::engine
