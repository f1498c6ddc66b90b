// What a snapshot says, in one structure: per device the truth about its history, who owned the peak, and verdicts on
// what went wrong with evidence and advice, each piece of advice confirmed by a replay.
// Not here: words and layout (report/).
// Threads: pure functions. Cost: see device_timeline.h; one replay per setting that is tried, only where a verdict
// asks.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memfit/analysis/free_memory.h"
#include "memfit/analysis/owners.h"
#include "memfit/analysis/replay.h"

namespace memfit::analysis {

enum class VerdictKind : std::uint8_t {
  Capacity,
  Fragmentation,
  Leak,
  Spike,
  OversizedRequest,
  OtherProcesses,
  CapBelowDevice,
  PoolsCannotShare,
  None,
};
std::string_view name_of(VerdictKind kind);

struct Advice {
  std::string setting;      // text for PYTORCH_ALLOC_CONF, or what to do
  std::uint64_t saves = 0;  // bytes of the reserved peak, by replay
  bool is_conf = false;
};

struct Verdict {
  VerdictKind kind = VerdictKind::None;
  std::int32_t device = 0;
  std::uint64_t bytes = 0;
  std::vector<std::string> evidence;
  std::vector<Advice> advice;
};

struct ExplainOptions {
  std::optional<std::uint32_t> from, to;  // event indices; [from, to)
  bool last_step = false;
  std::uint64_t min_size = 0;
  std::optional<std::uint64_t> device_memory;
  bool advise = true;  // replay settings for advice
};

struct OomState {
  std::uint32_t event = kNever;
  std::uint64_t requested = 0;  // rounded, as recorded
  std::uint64_t device_free = 0;
  FreeMemory memory;
  std::uint64_t usable = 0;  // reserved + device_free
  std::uint16_t stream = 0, pool = 0;
};

/// Bytes at the peak under one user metadata and compile context, where the recording has any.
struct NoteRow {
  std::uint64_t bytes = 0;
  std::string user_metadata, compile_context;  // "" for none
};

struct DeviceExplanation {
  DeviceTimeline timeline;
  std::uint32_t from = 0, to = 0;    // the window
  std::uint64_t peak_allocated = 0;  // in the window
  std::uint64_t reserved_at_peak = 0;
  std::uint32_t peak_event = kNever;
  std::uint64_t left_out = 0;    // events outside the window or below min_size
  std::vector<OwnerRow> owners;  // add up to peak_allocated
  std::uint64_t by_category[kCategories] = {};
  std::vector<NoteRow> notes;  // add up to peak_allocated; empty when the recording has none
  FreeMemory at_end;
  std::optional<std::uint64_t> capacity;
  std::vector<std::uint32_t> steps;
  std::vector<OomState> ooms;  // first and last
  std::uint64_t oom_count = 0;
  std::uint64_t retries = 0;           // times memory was given back to serve an allocation
  std::optional<ReplayResult> replay;  // of the recorded settings, where a verdict needed it
  std::vector<Verdict> verdicts;
};

struct Explanation {
  const trace::AllocatorSnapshot* snapshot = nullptr;
  std::shared_ptr<const Attribution> attribution;
  std::vector<DeviceExplanation> devices;
};

/// Throws:   UsageError when a window is asked for that the events do not have (--last-step without visible steps).
Explanation explain(const trace::AllocatorSnapshot& snapshot, const ExplainOptions& options);

}  // namespace memfit::analysis
