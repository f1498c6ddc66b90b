// Leaks and spikes: what the events say about time.
#include <algorithm>
#include <unordered_map>

#include "memfit/analysis/detail/verdicts.h"

namespace memfit::analysis::detail {

using trace::AllocatorAction;

std::vector<Growth> find_growth(const DeviceExplanation& d, const Attribution& attribution) {
  const DeviceTimeline& t = d.timeline;
  std::vector<std::uint32_t> bounds;
  for (const std::uint32_t step : d.steps) bounds.push_back(step);  // whatever the window: growth needs many steps
  // The first steps fill caches and make optimizer state.
  constexpr std::size_t kWarmUp = 2, kMost = 64;
  if (bounds.size() < kWarmUp + 4) return {};
  bounds.erase(bounds.begin(), bounds.begin() + kWarmUp);
  if (bounds.size() > kMost) {  // long runs: evenly chosen steps, so that each of them may add little
    std::vector<std::uint32_t> some;
    for (std::size_t k = 0; k < kMost; ++k) some.push_back(bounds[k * (bounds.size() - 1) / (kMost - 1)]);
    bounds = std::move(some);
  }
  struct Live {
    std::vector<std::uint64_t> bytes;
    std::uint64_t blocks_first = 0, blocks_last = 0;
    trace::StackId stack = trace::kNoStack;
  };
  std::unordered_map<std::uint64_t, Live> places;
  std::size_t next = 0;  // first bound after the current event
  for (std::uint32_t i = 0; i < t.count && next < bounds.size(); ++i) {
    while (next < bounds.size() && bounds[next] <= i) ++next;
    if (next == bounds.size()) break;
    if (t.event(i).action != AllocatorAction::Alloc || t.freed_at[i] < bounds[next]) continue;
    const trace::StackId stack = t.event(i).stack;
    Live& live = places[attribution.place_key(stack)];
    if (live.bytes.empty()) live.bytes.assign(bounds.size(), 0);
    live.stack = stack;
    for (std::size_t k = next; k < bounds.size() && t.freed_at[i] >= bounds[k]; ++k) {
      live.bytes[k] += t.size_of[i];
      if (k + 1 == bounds.size()) ++live.blocks_last;
    }
    if (next == 0) ++live.blocks_first;
  }
  std::vector<Growth> found;
  for (const auto& [place, live] : places) {
    bool grows = true;
    for (std::size_t k = 1; k < live.bytes.size() && grows; ++k) grows = live.bytes[k] > live.bytes[k - 1];
    if (!grows) continue;
    const std::uint64_t total = live.bytes.back() - live.bytes.front();
    const std::uint64_t last = live.bytes.back() - live.bytes[live.bytes.size() - 2];
    // A cache that fills up slows down; a leak does not.
    if (last * 2 * (live.bytes.size() - 1) < total) continue;
    found.push_back({place, live.stack, total,
                     live.blocks_last > live.blocks_first ? live.blocks_last - live.blocks_first : 0,
                     static_cast<std::uint32_t>(live.bytes.size() - 1)});
  }
  std::sort(found.begin(), found.end(), [](const Growth& a, const Growth& b) {
    return a.bytes > b.bytes || (a.bytes == b.bytes && a.place < b.place);
  });
  return found;
}

namespace {

/// The peak of the window if blocks of one place did not exist.
std::uint64_t peak_without(const DeviceExplanation& d, const Attribution& attribution, std::uint64_t place,
                           Spike& spike) {
  const DeviceTimeline& t = d.timeline;
  std::unordered_map<std::uint32_t, std::uint64_t> ends;  // event -> bytes of the place freed there
  std::uint64_t hidden = 0, peak = 0;
  for (const BaseBlock& block : t.base_blocks)
    if (attribution.place_key(block.stack) == place && !block.pending) {
      hidden += block.size;
      if (block.freed_at != kNever) ends[block.freed_at] += block.size;
    }
  std::uint64_t allocated = t.base_allocated;
  if (d.from == 0) peak = allocated - std::min(hidden, allocated);
  for (std::uint32_t i = 0; i < d.to; ++i) {
    const trace::AllocatorEvent& event = t.event(i);
    const bool frees = event.action == AllocatorAction::FreeRequested || event.action == AllocatorAction::FreeCompleted;
    const std::uint64_t freed = frees ? t.size_of[i] : 0;
    if (event.action == AllocatorAction::Alloc) {
      allocated += t.size_of[i];
      if (attribution.place_key(event.stack) == place) {
        hidden += t.size_of[i];
        ++spike.times;
        if (t.size_of[i] > spike.largest) {
          spike.largest = t.size_of[i];
          spike.event = i;
        }
        if (t.freed_at[i] != kNever) {
          ends[t.freed_at[i]] += t.size_of[i];
          spike.longest_life = std::max(spike.longest_life, t.freed_at[i] - i);
        }
      }
    } else if (freed != 0) {
      allocated -= std::min(allocated, freed);
      if (const auto end = ends.find(i); end != ends.end()) hidden -= std::min(hidden, end->second);
    }
    if (i >= d.from) peak = std::max(peak, allocated - std::min(hidden, allocated));
  }
  return peak;
}

}  // namespace

std::optional<Spike> find_spike(const DeviceExplanation& d, const Attribution& attribution) {
  const DeviceTimeline& t = d.timeline;
  if (d.peak_event == kNever || d.peak_allocated == 0) return std::nullopt;
  // Short-lived: freed within a small part of a step, or of the recording.
  const std::uint32_t step = d.steps.size() >= 2
                                 ? (d.steps.back() - d.steps.front()) / static_cast<std::uint32_t>(d.steps.size() - 1)
                                 : t.count;
  const std::uint32_t brief = std::max<std::uint32_t>(16, step / 20);
  std::unordered_map<std::uint64_t, std::pair<std::uint64_t, trace::StackId>> candidates;
  const std::uint32_t begin = d.peak_event > brief ? d.peak_event - brief : 0;
  for (std::uint32_t i = begin; i <= d.peak_event; ++i) {
    if (t.event(i).action != AllocatorAction::Alloc || t.freed_at[i] == kNever) continue;
    if (t.freed_at[i] <= d.peak_event || t.freed_at[i] - i > brief) continue;
    auto& [bytes, stack] = candidates[attribution.place_key(t.event(i).stack)];
    bytes += t.size_of[i];
    stack = t.event(i).stack;
  }
  std::optional<Spike> best;
  for (const auto& [place, candidate] : candidates) {
    if (place == 0 || candidate.first * 10 < d.peak_allocated) continue;  // less than a tenth of the peak cannot be it
    Spike spike;
    spike.place = place;
    spike.stack = candidate.second;
    const std::uint64_t peak = peak_without(d, attribution, place, spike);
    spike.bytes = d.peak_allocated > peak ? d.peak_allocated - peak : 0;
    if (spike.longest_life > brief) continue;  // it also holds on to some
    if (!best || spike.bytes > best->bytes) best = spike;
  }
  constexpr std::uint64_t kWorthSaying = std::uint64_t{32} << 20;
  if (best && (best->bytes < kWorthSaying || best->bytes * 20 < d.peak_allocated * 3)) return std::nullopt;  // 15 %
  return best;
}

}  // namespace memfit::analysis::detail
