#include "memfit/analysis/timeline_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <queue>
#include <unordered_map>

namespace memfit::analysis {

using trace::AllocatorAction;

namespace {

std::vector<std::string> frames_of(const trace::AllocatorSnapshot& snapshot, trace::StackId stack) {
  constexpr std::size_t kMost = 40, kLongest = 300;
  std::vector<std::string> lines;
  for (std::size_t k = 0; k < std::min(snapshot.stack_depth(stack), kMost); ++k) {
    const trace::Frame& frame = snapshot.frame_of(stack, k);
    lines.push_back(fmt::format("{}:{} {}", snapshot.text(frame.file).substr(0, kLongest), frame.line,
                                snapshot.text(frame.function).substr(0, kLongest)));
  }
  return lines;
}

}  // namespace

TimelineView compute_view(const DeviceExplanation& d, const Attribution& attribution, const ViewLimits& limits) {
  const DeviceTimeline& t = d.timeline;
  TimelineView view;
  view.curve = compute_curve(t, d.from, d.to, limits.curve_points);
  const std::uint32_t length = d.to - d.from;
  if (length == 0) return view;
  const auto width = static_cast<std::uint32_t>(
      std::max<std::size_t>(1, (length + limits.category_points - 1) / limits.category_points));
  // In each part the event with the most allocated stands for it: no peak is lost and steps make no moiré.
  std::uint64_t allocated = t.base_allocated, most = 0;
  for (std::uint32_t i = 0; i < d.to; ++i) {
    const AllocatorAction action = t.event(i).action;
    if (action == AllocatorAction::Alloc) allocated += t.size_of[i];
    else if (action == AllocatorAction::FreeRequested || action == AllocatorAction::FreeCompleted)
      allocated -= std::min(allocated, t.size_of[i]);
    if (i < d.from) continue;
    if ((i - d.from) % width == 0) {
      view.at.push_back(i);
      most = allocated;
    } else if (allocated > most) {
      view.at.back() = i;
      most = allocated;
    }
  }
  const std::size_t points = view.at.size();
  std::vector<std::vector<std::int64_t>> change(kCategories, std::vector<std::int64_t>(points + 1, 0));
  // Point k shows what is live after event at[k]: born at or before it, freed after it.
  // A change at `event` shows in the first point at or after it.
  const auto point_from = [&](std::uint32_t event) -> std::size_t {
    if (event < d.from) return 0;
    const std::size_t part = (event - d.from) / width;
    if (part >= points) return points;
    return view.at[part] >= event ? part : part + 1;
  };
  struct Larger {
    bool operator()(const ViewBlock& a, const ViewBlock& b) const { return a.bytes > b.bytes; }
  };
  std::priority_queue<ViewBlock, std::vector<ViewBlock>, Larger> largest;  // the smallest kept is on top
  std::uint64_t seen = 0;
  const auto add = [&](std::uint32_t born, std::uint32_t freed, std::uint64_t bytes, trace::StackId stack,
                       Category category) {
    if (bytes == 0 || (freed != kNever && freed < d.from)) return;
    const std::size_t from = born == kNever ? 0 : point_from(born);
    const std::size_t to = freed == kNever || freed >= d.to ? points : point_from(freed);
    auto& series = change[static_cast<std::size_t>(category)];
    if (from < to) {
      series[from] += static_cast<std::int64_t>(bytes);
      series[to] -= static_cast<std::int64_t>(bytes);
    }
    ++seen;
    if (largest.size() >= limits.blocks) {
      if (largest.top().bytes >= bytes) return;
      largest.pop();
    }
    largest.push({born, freed, bytes, stack});
  };
  for (const BaseBlock& block : t.base_blocks) {
    if (block.pending) continue;
    add(kNever, block.freed_at, block.size, block.stack,
        block.stack == trace::kNoStack ? Category::Unrecorded : attribution.of(block.stack).category);
  }
  for (std::uint32_t i = 0; i < d.to; ++i) {
    const trace::AllocatorEvent& event = t.event(i);
    if (event.action == AllocatorAction::Alloc)
      add(i, t.freed_at[i], t.size_of[i], event.stack, attribution.of(event.stack).category);
  }
  for (std::size_t c = 0; c < kCategories; ++c) {
    std::int64_t sum = 0;
    view.by_category[c].reserve(points);
    for (std::size_t k = 0; k < points; ++k)
      view.by_category[c].push_back(static_cast<std::uint64_t>(sum += change[c][k]));
  }
  view.blocks_left_out = seen - largest.size();
  std::unordered_map<trace::StackId, std::uint32_t> places;
  for (; !largest.empty(); largest.pop()) {
    ViewBlock block = largest.top();
    const trace::StackId stack = block.place;
    auto [found, fresh] = places.try_emplace(stack, static_cast<std::uint32_t>(view.places.size()));
    if (fresh)
      view.places.push_back({attribution.where(stack), attribution.of(stack).category, attribution.of(stack).rule,
                             frames_of(*t.snapshot, stack)});
    block.place = found->second;
    view.blocks.push_back(block);
  }
  std::reverse(view.blocks.begin(), view.blocks.end());  // largest first
  return view;
}

}  // namespace memfit::analysis
