// Opens a memory snapshot of PyTorch, whatever its form, without Python and without executing anything in it.
// Not here: what it means (analysis/).
// Threads: any, one call a file. Cost: one pass; see docs/formats/snapshot.md.
#pragma once

#include <string>
#include <string_view>

#include "memfit/trace/allocator_trace.h"

namespace memfit::snapshot {

/// Read `path`: a pickle of protocol 2 to 5 or the same content as JSON; the current form or the old list of segments.
/// Throws:   BadInput naming the file, the byte and the reason.
trace::AllocatorSnapshot read_allocator_snapshot(const std::string& path);

/// The same from memory; `name` stands for the file in messages. `bytes` must live during the call only.
trace::AllocatorSnapshot read_allocator_snapshot_bytes(std::string_view bytes, const std::string& name);

}  // namespace memfit::snapshot
