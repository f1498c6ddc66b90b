// A run described in one file, as flags: {"model": "net.pt2", "batch": 64} or the same in TOML.
// Not here: what the flags mean (train.cpp). Threads: one. Cost: that of reading the file.
#pragma once

#include <set>
#include <string>
#include <vector>

namespace memfit::train_cli {

/// The words of the command line with those of `--config FILE` before them, where the command line does not say the same flag. Keys are
/// the long flags without dashes; a list gives the flag several times; true gives a flag without a value, false nothing.
/// Throws:   BadInput for a file that is neither JSON nor TOML, UsageError for a key that is no flag, with the nearest.
std::vector<std::string> with_config(const std::vector<std::string>& words, const std::set<std::string>& flags, const std::set<std::string>& values);

}  // namespace memfit::train_cli
