// Verbs that need LibTorch are those of another binary, memfit-train beside this one: here they are only handed over.
// Not here: what they do (train_cli/). Threads: one. Cost: one exec.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <string>

namespace memfit::cli {

/// Adds a verb whose words all go to memfit-train, which takes this process's place.
void add_torch_verb(CLI::App& app, const std::string& name, const std::string& what);

}  // namespace memfit::cli
