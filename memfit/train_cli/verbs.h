// The verbs that need LibTorch: of `memfit-train`, which `memfit` starts for them so that it need not link LibTorch itself.
// Not here: the other verbs (cli/). Each parses its flags, calls the library and prints; stdout is the result, stderr is talk.
// Threads: one. Cost: that of the verb.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <stdexcept>

namespace memfit::train_cli {

/// Adds the verb to `app`. Its callback may throw memfit::Error, which main prints and turns into the exit status.
void add_inspect(CLI::App& app);
void add_train(CLI::App& app);
void add_export(CLI::App& app);

/// The run ended because the user asked for it: exit status 130.
class Interrupted : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace memfit::train_cli
