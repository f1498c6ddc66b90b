// A snapshot's history as one HTML page: verdicts in words, curves of reserved and allocated bytes that keep every
// peak, bytes by category, and the blocks that are live where you click. Opens without a network. Threads: any, no
// state. Cost: a page of a few megabytes, whatever the snapshot's size.
#pragma once

#include <string>

#include "memfit/analysis/explain.h"

namespace memfit::report {

std::string snapshot_html(const analysis::Explanation& explanation);

}  // namespace memfit::report
