#include "memfit/cli/torch_verb.h"
#include "memfit/cli/verbs.h"

namespace memfit::cli {

void add_inspect(CLI::App& app, Context&) { add_torch_verb(app, "inspect", "Show what a model file holds and what training it takes"); }

}  // namespace memfit::cli
