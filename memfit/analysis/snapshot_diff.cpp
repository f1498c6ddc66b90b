#include "memfit/analysis/snapshot_diff.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>
#include <unordered_map>

namespace memfit::analysis {

std::vector<PeakShare> compute_peak_shares(const DeviceExplanation& d, const Attribution& attribution) {
  const DeviceTimeline& t = d.timeline;
  const auto outlives = [&](std::uint32_t born, std::uint32_t freed) {
    if (freed == kNever || born == kNever) return true;  // never freed, or older than the recording
    if (d.steps.size() >= 2) {
      // Past the end of the step it was made in.
      const auto end = std::upper_bound(d.steps.begin(), d.steps.end(), born);
      return end != d.steps.end() && freed > *end;
    }
    return freed - born > t.count / 2;
  };
  std::unordered_map<std::uint64_t, std::uint64_t> groups;  // place << 1 | persistent
  std::unordered_map<std::uint64_t, trace::StackId> stack_of;
  std::uint64_t unrecorded = 0;
  for_each_live(t, d.peak_event, [&](std::uint32_t owner, std::uint64_t bytes, trace::StackId stack) {
    const bool base = (owner & kBaseFlag) != 0;
    if (base && stack == trace::kNoStack) {
      unrecorded += bytes;
      return;
    }
    const bool persistent =
        base ? outlives(kNever, t.base_blocks[owner & ~kBaseFlag].freed_at) : outlives(owner, t.freed_at[owner]);
    const std::uint64_t key = attribution.place_key(stack) << 1 | (persistent ? 1 : 0);
    groups[key] += bytes;
    stack_of[key] = stack;
  });
  std::vector<PeakShare> shares;
  for (const auto& [key, bytes] : groups)
    shares.push_back({attribution.where(stack_of[key]), attribution.of(stack_of[key]).category, (key & 1) != 0, bytes});
  if (unrecorded > 0)
    shares.push_back({"(allocated before the recording, without a stack)", Category::Unrecorded, true, unrecorded});
  return shares;
}

SnapshotDiff compute_diff(std::int32_t device, std::uint64_t peak_before, const std::vector<PeakShare>& before,
                          std::uint64_t peak_after, const std::vector<PeakShare>& after) {
  SnapshotDiff out;
  out.device = device;
  out.peak_before = peak_before;
  out.peak_after = peak_after;
  std::map<std::tuple<std::string, Category, bool>, std::pair<std::uint64_t, std::uint64_t>> rows;
  for (const PeakShare& share : before) rows[{share.where, share.category, share.persistent}].first += share.bytes;
  for (const PeakShare& share : after) rows[{share.where, share.category, share.persistent}].second += share.bytes;
  for (const auto& [key, sizes] : rows) {
    if (sizes.first == sizes.second) continue;
    const auto delta = static_cast<std::int64_t>(sizes.second) - static_cast<std::int64_t>(sizes.first);
    out.rows.push_back({delta, std::get<0>(key), std::get<1>(key), std::get<2>(key), sizes.first, sizes.second});
  }
  std::stable_sort(out.rows.begin(), out.rows.end(),
                   [](const DiffRow& a, const DiffRow& b) { return std::llabs(a.bytes) > std::llabs(b.bytes); });
  return out;
}

}  // namespace memfit::analysis
