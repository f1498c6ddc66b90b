// Who asked for memory, from the stack of the request: a category by rules that are named, and a place in the program.
// Threads: an Attribution may be read by several; building is one pass over the distinct stacks. Cost: proportional to
// the distinct stacks, not to the events.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/trace/allocator_trace.h"

namespace memfit::analysis {

enum class Category : std::uint8_t {
  Parameter,
  Gradient,
  Optimizer,
  Activation,
  Input,
  Communication,
  Workspace,
  Other,
  Unknown,
  Unrecorded,
};
inline constexpr std::size_t kCategories = 10;
std::string_view name_of(Category category);

struct StackOwner {
  Category category = Category::Unknown;
  const char* rule = "";     // why this category, for people
  trace::FrameId place = 0;  // the frame that is called the place
  bool has_place = false;
};

class Attribution {
 public:
  explicit Attribution(const trace::AllocatorSnapshot& snapshot);
  const StackOwner& of(trace::StackId stack) const { return owners_[stack]; }
  /// "train.py:52 train_step", or "(no stack)".
  std::string where(trace::StackId stack) const;
  /// The same place, whatever came below it: rows are grouped by this. 0 for no place.
  std::uint64_t place_key(trace::StackId stack) const;

 private:
  const trace::AllocatorSnapshot& snapshot_;
  std::vector<StackOwner> owners_;
};

}  // namespace memfit::analysis
