// Reads the data opcodes of Python's pickle, protocols 2 to 5, into an AllocatorSnapshot, in one pass over a window.
// It cannot execute anything: every opcode that would import, call or build an object is refused by name and offset.
// Threads: one reader a thread. Cost: about a gigabyte in 2 s; memory follows the distinct content.
#pragma once

#include "memfit/trace/allocator_trace.h"

namespace memfit::snapshot::detail {

class ByteSource;

/// Requires: `source` stands at the start of a pickle.
/// Throws:   BadInput with the byte offset: not a pickle, refused opcode, truncated, not a snapshot.
void read_pickle(ByteSource& source, trace::AllocatorSnapshot& out);

/// The same content as plain JSON.
void read_json(ByteSource& source, trace::AllocatorSnapshot& out);

}  // namespace memfit::snapshot::detail
