#include "memfit/cli/torch_verb.h"
#include "memfit/cli/verbs.h"

namespace memfit::cli {

void add_train(CLI::App& app, Context&) { add_torch_verb(app, "train", "Train an exported model on arrays of files, inside a limit"); }

}  // namespace memfit::cli
