// What the operating system says of this process's memory. Threads: any.
#pragma once

#include "memfit/core/bytes.h"

namespace memfit::device {

/// Resident bytes now (VmRSS). Cost: one read of /proc, about 2 us. Zero when the system does not say.
Bytes resident_memory();
/// Highest resident bytes so far (VmHWM).
Bytes peak_resident_memory();
/// Free heap pages go back to the system.
void trim_heap();

}  // namespace memfit::device
