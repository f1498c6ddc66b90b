// The verbs of the command line. Each is one file `cli/<verb>.cpp` with one function `add_<verb>`, named in the
// list `MEMFIT_VERBS` of cli/CMakeLists.txt, from which the declarations and the table are made.
// A verb parses its flags, calls one library function and prints through report/. stdout is the result, stderr is talk.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <string>
#include <vector>

namespace memfit::cli {

/// What main gives to a verb and takes back from it.
struct Context {
  std::vector<std::string> program;            // the words after the first "--"
  std::vector<const CLI::App*> program_verbs;  // verbs that take such words; to the others they are a usage error
  int exit_status = 0;                         // of ExitStatus, or that of the program that was run
};

/// Adds the verb `add_<verb>` to `app`: its flags, its help, and a callback that does the work, may throw
/// memfit::Error (main prints it and exits with its status), and otherwise sets `context.exit_status`.
using AddVerb = void (*)(CLI::App& app, Context& context);

#define MEMFIT_DECLARE_VERB(name) void add_##name(CLI::App& app, Context& context);
#include "memfit_verbs.inc"  // made by CMake: MEMFIT_VERBS(X) is X(run) X(explain) ...
MEMFIT_VERBS(MEMFIT_DECLARE_VERB)
#undef MEMFIT_DECLARE_VERB

}  // namespace memfit::cli
