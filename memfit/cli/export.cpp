#include "memfit/cli/torch_verb.h"
#include "memfit/cli/verbs.h"

namespace memfit::cli {

void add_export(CLI::App& app, Context&) { add_torch_verb(app, "export", "Write the weights of a run for Python"); }

}  // namespace memfit::cli
