#include "memfit/analysis/owners.h"

#include <fmt/format.h>

#include <algorithm>
#include <unordered_map>

namespace memfit::analysis {

using trace::AllocatorAction;

void for_each_live(const DeviceTimeline& t, std::uint32_t at,
                   const std::function<void(std::uint32_t, std::uint64_t, trace::StackId)>& f) {
  const std::uint64_t now = at == kNever ? 0 : std::uint64_t{at} + 1;  // events [0, now) have happened
  for (std::uint32_t i = 0; i < t.base_blocks.size(); ++i) {
    const BaseBlock& block = t.base_blocks[i];
    if (block.pending || block.freed_at < now) continue;
    f(i | kBaseFlag, block.size, block.stack);
  }
  for (std::uint32_t i = 0; i < now && i < t.count; ++i) {
    const trace::AllocatorEvent& event = t.event(i);
    if (event.action == AllocatorAction::Alloc && t.freed_at[i] >= now) f(i, t.size_of[i], event.stack);
  }
}

std::vector<OwnerRow> compute_owners(const DeviceTimeline& t, const Attribution& attribution, std::uint32_t at,
                                     std::uint64_t min_size, std::size_t limit) {
  std::unordered_map<std::uint64_t, OwnerRow> groups;
  OwnerRow unrecorded, small;
  for_each_live(t, at, [&](std::uint32_t owner, std::uint64_t bytes, trace::StackId stack) {
    if (bytes < min_size) {
      small.bytes += bytes;
      ++small.blocks;
      return;
    }
    if ((owner & kBaseFlag) != 0 && stack == trace::kNoStack) {
      unrecorded.bytes += bytes;
      ++unrecorded.blocks;
      return;
    }
    OwnerRow& row = groups[attribution.place_key(stack)];
    row.bytes += bytes;
    ++row.blocks;
    row.stack = stack;
  });
  std::vector<OwnerRow> rows;
  for (auto& [key, row] : groups) {
    row.category = attribution.of(row.stack).category;
    row.rule = attribution.of(row.stack).rule;
    row.where = attribution.where(row.stack);
    rows.push_back(std::move(row));
  }
  std::sort(rows.begin(), rows.end(), [](const OwnerRow& a, const OwnerRow& b) {
    if (a.bytes != b.bytes) return a.bytes > b.bytes;
    return a.where < b.where;
  });
  if (rows.size() > limit) {
    OwnerRow rest;
    for (std::size_t i = limit; i < rows.size(); ++i) rest.bytes += rows[i].bytes, rest.blocks += rows[i].blocks;
    rest.category = Category::Other;
    rest.where = fmt::format("({} more places)", rows.size() - limit);
    rest.rule = "the smaller rows together";
    rows.resize(limit);
    rows.push_back(std::move(rest));
  }
  if (unrecorded.bytes > 0) {
    unrecorded.category = Category::Unrecorded;
    unrecorded.where = "(allocated before the recording, without a stack)";
    unrecorded.rule = t.reason == UnrecordedReason::Overflow       ? "the ring lost the events"
                      : t.reason == UnrecordedReason::NotRecording ? "recording was not on yet"
                                                                   : "the file does not say why";
    rows.push_back(std::move(unrecorded));
  }
  if (small.bytes > 0) {
    small.category = Category::Other;
    small.where = fmt::format("({} blocks below --min-size)", small.blocks);
    small.rule = "left out by --min-size";
    rows.push_back(std::move(small));
  }
  return rows;
}

std::vector<std::uint32_t> find_steps(const DeviceTimeline& t, const Attribution& attribution) {
  // A step begins where, after backward or optimizer, three forward allocations follow one another.
  std::vector<std::uint32_t> steps;
  bool after_backward = true;
  std::uint32_t run = 0, begin = 0;
  bool any_backward = false;
  for (std::uint32_t i = 0; i < t.count; ++i) {
    const trace::AllocatorEvent& event = t.event(i);
    if (event.action != AllocatorAction::Alloc) continue;
    switch (attribution.of(event.stack).category) {
      case Category::Gradient:
      case Category::Optimizer:
        after_backward = any_backward = true;
        run = 0;
        break;
      case Category::Activation:
        if (!after_backward) break;
        if (run++ == 0) begin = i;
        if (run == 3) {
          steps.push_back(begin);
          after_backward = false;
          run = 0;
        }
        break;
      default:
        break;
    }
  }
  if (!any_backward) steps.clear();
  return steps;
}

}  // namespace memfit::analysis
