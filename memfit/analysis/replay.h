// Would another setting have helped? A recorded history's requests, played through the caching allocator's policy:
// under the recorded settings to prove that the policy is right, under others to predict.
// Not here: the policy (caching_allocator.h), what to advise (verdicts.h).
// Threads: pure functions over a timeline. Cost: about half a microsecond an event and run.
//
// Note [Device answers]
// Validation lets the device answer as it was recorded: a new segment where the recording has one, "out of memory"
// where the recording gives memory back instead. Everything else is the policy's own: which block, split or not, what
// to give back, and so the reserved bytes after every event. Memory given back outside an allocation was given back by
// the program (torch.cuda.empty_cache); a prediction keeps those calls.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "memfit/analysis/device_timeline.h"

namespace memfit::analysis {

/// The requests of a timeline, ready to be replayed any number of times.
struct ReplayProgram {
  const DeviceTimeline* timeline = nullptr;
  std::vector<std::uint32_t> block_of;      // of each free event: the alloc event, or kBaseFlag | base block, or kNever
  std::vector<std::uint16_t> pool_of;       // of each alloc event, only when events do not say it themselves
  std::vector<std::uint32_t> empty_caches;  // events before which the program called empty_cache
  std::vector<std::pair<std::uint32_t, std::uint16_t>>
      retired_pools;  // event, pool: from there its memory may be given back
};

struct ReplayResult {
  std::uint64_t reserved_peak = 0;
  std::uint32_t reserved_peak_event = kNever;
  std::uint64_t allocated_peak = 0;
  bool oom = false;
  std::uint32_t oom_event = kNever;
  std::uint64_t oom_requested = 0;   // bytes
  std::uint64_t oom_free_bytes = 0;  // reserved and unused when it failed
  std::uint64_t oom_largest_free = 0;
  std::uint64_t oom_reserved = 0;
  std::uint64_t retries = 0;
  std::uint64_t events = 0;  // replayed
  std::uint64_t differ = 0;  // validation: events whose reserved bytes differ from the recording
  std::uint32_t first_difference = kNever;
};

struct ReplayValidation {
  ReplayResult result;
  ReplayProgram program;
};

/// Replay with the recorded settings and the recorded answers of the device.
/// `device_total`: the card's size where known; needed to replay garbage collection and memory fractions.
ReplayValidation validate_replay(const DeviceTimeline& timeline,
                                 std::optional<std::uint64_t> device_total = std::nullopt);

struct WhatIf {
  AllocatorSettings settings;
  std::optional<std::uint64_t> capacity;       // bytes this process can have; absent = no limit
  std::optional<std::uint64_t> device_total;   // for memory fractions; absent = capacity
  const std::vector<bool>* without = nullptr;  // by stack: requests that are left out
};

/// Replay with other settings or on another device, until the end or the first allocation that fails.
ReplayResult predict(const ReplayProgram& program, const WhatIf& what);

/// Bytes this process could have when it ran out of memory: reserved plus what the device still had free. Absent when
/// no event says it.
std::optional<std::uint64_t> usable_at_oom(const DeviceTimeline& timeline);

struct Candidate {
  AllocatorSettings settings;
  ReplayResult result;
};

/// The settings worth trying, each replayed, best first: no out of memory before one, then the lowest reserved peak.
/// Settings that are already on are not among them.
std::vector<Candidate> search_settings(const ReplayProgram& program, const WhatIf& base);

}  // namespace memfit::analysis
