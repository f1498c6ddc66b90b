#include "memfit/plan/plan.h"

namespace memfit::plan {

std::string_view action_name(Action action) {
  switch (action) {
    case Action::Replay: return "replay";
    case Action::Drop: return "drop";
    case Action::Pack: return "pack";
    case Action::Unpack: return "unpack";
    case Action::StartOffload: return "start_offload";
    case Action::FinishOffload: return "finish_offload";
    case Action::StartFetch: return "start_fetch";
    case Action::FinishFetch: return "finish_fetch";
    case Action::DropCopy: return "drop_copy";
  }
  return "?";
}

std::string_view fate_name(Fate fate) {
  switch (fate) {
    case Fate::Keep: return "keep";
    case Fate::Recompute: return "recompute";
    case Fate::Pack: return "pack";
    case Fate::Offload: return "offload";
  }
  return "?";
}

}  // namespace memfit::plan
