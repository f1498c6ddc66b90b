// The keys and words of PyTorch's snapshots that the reader knows; a Key is the id of its interned text.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace memfit::snapshot::detail {

#define MEMFIT_SNAPSHOT_KEYS(X)                                                                                      \
  X(action)                                                                                                          \
  X(addr) X(size) X(stream) X(time_us) X(frames) X(device_free) X(compile_context) X(user_metadata) X(pool_id)       \
      X(device) X(address) X(total_size) X(allocated_size) X(active_size) X(requested_size) X(segment_type)          \
          X(segment_pool_id) X(is_expandable) X(blocks) X(state) X(history) X(real_size) X(filename) X(name) X(line) \
              X(fx_node_op) X(fx_node_name) X(fx_original_trace) X(fx_node_info) X(segments) X(device_traces)        \
                  X(allocator_settings) X(external_annotations) X(cpp_frames) X(registration_counter) X(gc_counter)  \
                      X(stage) X(alloc) X(free_requested) X(free_completed) X(segment_alloc) X(segment_free)         \
                          X(segment_map) X(segment_unmap) X(snapshot) X(oom) X(free) X(active_allocated)             \
                              X(active_pending_free) X(active_awaiting_free) X(inactive) X(small) X(large)           \
                                  X(max_split_size) X(garbage_collection_threshold) X(expandable_segments)           \
                                      X(roundup_power2_divisions) X(PYTORCH_CUDA_ALLOC_CONF) X(PYTORCH_ALLOC_CONF)   \
                                          X(PYTORCH_XPU_ALLOC_CONF) X(max_split_size_mb) X(version) X(host_segments) \
                                              X(host_traces) X(mempool_id)

enum class Key : std::uint32_t {
  empty,
#define MEMFIT_KEY(name) name,
  MEMFIT_SNAPSHOT_KEYS(MEMFIT_KEY)
#undef MEMFIT_KEY
      count,
};

inline constexpr std::array<std::string_view, static_cast<std::size_t>(Key::count) - 1> kKeyNames = {
#define MEMFIT_KEY(name) #name,
    MEMFIT_SNAPSHOT_KEYS(MEMFIT_KEY)
#undef MEMFIT_KEY
};

}  // namespace memfit::snapshot::detail
