// A torch.export program as a Model.
// Not here: how its graph runs (graph.h). Threads: one. Cost: see model.h.
#pragma once

#include <memory>
#include <string>

#include "memfit/model/detail/archive.h"
#include "memfit/model/model.h"

namespace memfit::model::detail {

/// `eval` may be null.
std::unique_ptr<Model> load_exported(Archive& archive, Archive* eval);
/// `archive` is TorchScript; opened again by PyTorch's own reader.
std::unique_ptr<Model> load_torchscript(Archive& archive, Archive* eval);

}  // namespace memfit::model::detail
