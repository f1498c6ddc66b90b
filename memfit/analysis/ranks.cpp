#include "memfit/analysis/ranks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace memfit::analysis {

RankSummary summarize_rank(const std::string& file, const DeviceExplanation& d) {
  RankSummary rank;
  rank.file = file;
  rank.device = d.timeline.device;
  rank.peak_allocated = d.peak_allocated;
  rank.peak_reserved = d.timeline.peak_reserved;
  std::copy(std::begin(d.by_category), std::end(d.by_category), std::begin(rank.by_category));
  rank.owners = d.owners;
  for (const Verdict& verdict : d.verdicts) rank.verdicts.push_back(verdict.kind);
  return rank;
}

RankComparison compare_ranks(const std::vector<RankSummary>& ranks) {
  RankComparison out;
  if (ranks.empty()) return out;
  std::vector<std::size_t> order(ranks.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return ranks[a].peak_allocated < ranks[b].peak_allocated; });
  const std::size_t middle = order[(order.size() - 1) / 2];
  out.lowest = ranks[order.front()].peak_allocated;
  out.median = ranks[middle].peak_allocated;
  out.highest = ranks[order.back()].peak_allocated;
  out.typical = static_cast<std::int64_t>(middle);
  if (out.median > 0) out.imbalance = static_cast<double>(out.highest) / static_cast<double>(out.median) - 1;
  const std::uint64_t up = out.highest - out.median, down = out.median - out.lowest;
  const std::size_t furthest = up >= down ? order.back() : order.front();
  if (std::max(up, down) * 20 <= out.median || furthest == middle) return out;
  out.odd = static_cast<std::int64_t>(furthest);
  std::map<std::pair<std::string, Category>, std::int64_t> rows;
  for (const OwnerRow& row : ranks[furthest].owners)
    rows[{row.where, row.category}] += static_cast<std::int64_t>(row.bytes);
  for (const OwnerRow& row : ranks[middle].owners)
    rows[{row.where, row.category}] -= static_cast<std::int64_t>(row.bytes);
  for (const auto& [key, bytes] : rows)
    if (bytes != 0) out.differences.push_back({bytes, key.second, key.first});
  std::stable_sort(
      out.differences.begin(), out.differences.end(),
      [](const RankDifference& a, const RankDifference& b) { return std::llabs(a.bytes) > std::llabs(b.bytes); });
  return out;
}

}  // namespace memfit::analysis
