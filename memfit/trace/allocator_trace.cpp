#include "memfit/trace/allocator_trace.h"

namespace memfit::trace {

std::string_view name_of(AllocatorAction action) {
  switch (action) {
    case AllocatorAction::Alloc:
      return "alloc";
    case AllocatorAction::FreeRequested:
      return "free_requested";
    case AllocatorAction::FreeCompleted:
      return "free_completed";
    case AllocatorAction::SegmentAlloc:
      return "segment_alloc";
    case AllocatorAction::SegmentFree:
      return "segment_free";
    case AllocatorAction::SegmentMap:
      return "segment_map";
    case AllocatorAction::SegmentUnmap:
      return "segment_unmap";
    case AllocatorAction::Snapshot:
      return "snapshot";
    case AllocatorAction::OutOfMemory:
      return "oom";
    case AllocatorAction::Other:
      return "other";
  }
  return "other";
}

}  // namespace memfit::trace
