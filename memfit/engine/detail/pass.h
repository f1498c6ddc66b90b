// What one round of replays knows of itself.
#pragma once

#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "memfit/engine/engine.h"

namespace memfit::engine {

struct Engine::Pass {
  enum class Kind : std::uint8_t {
    Region,   // the ops of `order`, with `members` counted down to their last use
    Frugal,   // one op, for `wanted`
    Planned,  // one op of a plan: all its results come to life, and the plan says when they go
  };
  Kind kind = Kind::Region;
  std::vector<Recipe*> order;
  std::vector<Value*> members;
  std::uint64_t id = 0;
  Value* wanted = nullptr;                                        // Frugal
  std::vector<Value*>* made = nullptr;                            // Frugal, Planned: where temporaries are noted
  bool preserve = false;                                          // Planned: what is written over is copied first
  c10::SmallVector<std::pair<Value*, c10::Storage>, 8> in_place;  // buffers of the running op's in-place arguments
};

}  // namespace memfit::engine
