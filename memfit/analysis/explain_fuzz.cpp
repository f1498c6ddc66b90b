// Fuzz target: bytes become a history that may contradict itself in any way; its numbers must still add up, and
// replays must end.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "memfit/analysis/explain.h"
#include "memfit/analysis/snapshot_diff.h"
#include "memfit/analysis/timeline_view.h"
#include "memfit/core/error.h"

namespace {

using namespace memfit;
using trace::AllocatorAction;

class Bytes8 {
 public:
  Bytes8(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  std::uint8_t next() { return at_ == end_ ? 0 : *at_++; }
  bool empty() const { return at_ == end_; }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

/// Few addresses and sizes, so that events meet one another often.
std::uint64_t address_of(std::uint8_t b) {
  return (std::uint64_t{1} << 40) + (static_cast<std::uint64_t>(b & 31) << 19) +
         (static_cast<std::uint64_t>(b >> 5) << 36);
}
std::uint64_t size_of(std::uint8_t b) {
  return b < 64 ? b * 37u : b < 192 ? (std::uint64_t{b} - 63) << 19 : std::uint64_t{1} << (b - 170) % 50;
}

trace::AllocatorSnapshot build(Bytes8 in) {
  trace::AllocatorSnapshot s;
  s.strings = {"", "f", "torch/optim/adam.py", "a.py", "forward", "_engine_run_backward", "torch/autograd/graph.py"};
  s.frames = {{1, 3, 1, 0}, {1, 2, 2, 0}, {4, 3, 3, 0}, {5, 6, 4, 0}};
  s.stack_begin = {0, 0, 1, 2, 3, 4};
  s.stack_frames = {0, 1, 2, 3};
  s.streams = {0, 7};
  s.pools = {{0, 0}, {0, 1}};
  const std::uint8_t flags = in.next();
  s.settings.present = true;
  s.settings.expandable_segments = (flags & 1) != 0;
  if ((flags & 2) != 0) s.settings.max_split_size = std::uint64_t{32} << 20;
  if ((flags & 4) != 0) s.settings.roundup_power2_divisions = {{"1", 4}, {"2", 2}};
  const int segments = in.next() % 6;
  for (int k = 0; k < segments; ++k) {
    trace::AllocatorSegment segment;
    segment.address = address_of(in.next());
    segment.stream = in.next() & 1;
    segment.expandable = (in.next() & 1) != 0;
    segment.first_block = static_cast<std::uint32_t>(s.blocks.size());
    const int blocks = in.next() % 5;
    std::uint64_t at = segment.address;
    for (int b = 0; b < blocks; ++b) {
      trace::AllocatorBlock block;
      block.address = at;
      block.size = size_of(in.next());
      block.requested = block.size;
      block.state = static_cast<trace::BlockState>(in.next() % 3);
      block.stack = in.next() % 5;
      at += block.size;
      s.blocks.push_back(block);
      ++segment.block_count;
    }
    segment.total = at - segment.address + ((in.next() & 15) == 0 ? 4096 : 0);
    s.segments.push_back(segment);
  }
  trace::DeviceEvents events{0, 0, 0};
  while (!in.empty() && events.count < 4000) {
    trace::AllocatorEvent event;
    const std::uint8_t kind = in.next();
    event.action = static_cast<AllocatorAction>(kind % 10);
    event.stack = (kind / 10) % 5;
    event.stream = (kind / 50) & 1;
    event.pool = (kind / 100) & 1;
    event.has_pool = true;
    event.address = address_of(in.next());
    event.size = size_of(in.next());
    s.events.push_back(event);
    ++events.count;
  }
  s.devices.push_back(events);
  s.has_history = events.count > 0;
  return s;
}

void check(bool good) {
  if (!good) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 12'000) return 0;
  const trace::AllocatorSnapshot snapshot = build(Bytes8(data, size));
  analysis::ExplainOptions options;
  const analysis::Explanation explanation = analysis::explain(snapshot, options);
  for (const analysis::DeviceExplanation& d : explanation.devices) {
    std::uint64_t owners = 0, categories = 0;
    for (const analysis::OwnerRow& row : d.owners) owners += row.bytes;
    for (const std::uint64_t bytes : d.by_category) categories += bytes;
    check(owners == d.peak_allocated);
    check(categories == d.peak_allocated);
    check(d.at_end.free_bytes == d.at_end.stuck + d.at_end.releasable);
    std::uint64_t shares = 0;
    for (const analysis::PeakShare& share : analysis::compute_peak_shares(d, *explanation.attribution))
      shares += share.bytes;
    check(shares == d.peak_allocated);
    const analysis::TimelineView view = analysis::compute_view(d, *explanation.attribution, {64, 16, 8});
    for (std::size_t k = 0; k < view.at.size(); ++k) {
      std::uint64_t sum = 0;
      for (const auto& series : view.by_category) sum += series[k];
      check(sum < (std::uint64_t{1} << 62));
    }
    const analysis::ReplayValidation validation = analysis::validate_replay(d.timeline);
    for (const analysis::Candidate& candidate : analysis::search_settings(
             validation.program, {d.timeline.settings, std::uint64_t{2} << 30, std::nullopt, nullptr}))
      check(candidate.result.reserved_peak <= std::uint64_t{2} << 30);
  }
  return 0;
}
