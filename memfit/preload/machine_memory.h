// How much memory this process could have at most: that of the machine or of its cgroup (container), whichever is
// smaller. Not here: how much is used (device/process_memory). Threads: any. Cost: some small files of /proc and /sys.
#pragma once

#include <string>

#include "memfit/core/bytes.h"

namespace memfit::preload {

/// The whole that a percentage is of. `root` stands before /proc and /sys (tests give a folder of their own).
/// Throws:   Error when the system does not say how much memory it has.
Bytes machine_memory(const std::string& root = "");

}  // namespace memfit::preload
