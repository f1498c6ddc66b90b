// Looks at a folder that is to be offloaded to: is it usable, how much room is there, how fast is it?
// Not here: offloading (engine/).
// Threads: any. Cost: writes, flushes, reads and removes one file of 64 MiB.
#pragma once

#include <string>

#include "memfit/core/bytes.h"
#include "memfit/plan/simulate.h"

namespace memfit::plan {

struct OffloadPlace {
  Bytes free;       // to this user
  Traffic traffic;  // measured; reads past the page cache where the file system allows it
};

/// Throws:   UsageError when `folder` is missing, is no folder, cannot be written, lies in memory (tmpfs, ramfs), or is full.
OffloadPlace probe_offload_place(const std::string& folder);

}  // namespace memfit::plan
