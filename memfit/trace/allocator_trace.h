// What a caching allocator held and did, as plain data: segments, blocks, and the events that led there, with interned
// stacks. snapshot/ fills it from PyTorch's memory snapshots; analysis/ reads it.
// Not here: reading files (snapshot/), meaning (analysis/).
// Threads: plain data. Cost: 40 bytes an event; a stack, a frame and a string stand once.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "memfit/trace/chunked_vector.h"

namespace memfit::trace {

enum class AllocatorAction : std::uint8_t {
  Alloc,
  FreeRequested,
  FreeCompleted,
  SegmentAlloc,
  SegmentFree,
  SegmentMap,
  SegmentUnmap,
  Snapshot,
  OutOfMemory,
  Other,  // an action this version does not know; kept, changes nothing
};
std::string_view name_of(AllocatorAction action);

using StringId = std::uint32_t;
using FrameId = std::uint32_t;
using StackId = std::uint32_t;
inline constexpr StackId kNoStack = 0;  // the empty stack
inline constexpr std::uint32_t kNoNote = 0;

struct AllocatorEvent {
  std::uint64_t address = 0;  // OutOfMemory: bytes the device still had free
  std::uint64_t size = 0;     // as requested; segments: as taken from the device
  std::int64_t time_us = 0;   // 0 when not recorded
  StackId stack = kNoStack;
  std::uint32_t note = kNoNote;  // into AllocatorSnapshot::notes
  std::uint16_t stream = 0;      // into streams
  std::uint16_t pool = 0;        // into pools
  AllocatorAction action = AllocatorAction::Other;
  bool has_pool = false;  // older versions do not say which pool an event was in
};

enum class BlockState : std::uint8_t { Inactive, Allocated, PendingFree };

struct AllocatorBlock {
  std::uint64_t address = 0;
  std::uint64_t size = 0;
  std::uint64_t requested = 0;
  StackId stack = kNoStack;
  BlockState state = BlockState::Inactive;
};

struct AllocatorSegment {
  std::uint64_t address = 0;
  std::uint64_t total = 0;
  std::uint64_t allocated = 0;  // as the file says; 0 when it does not
  std::uint64_t active = 0;
  std::uint32_t first_block = 0;
  std::uint32_t block_count = 0;
  std::int32_t device = 0;
  StackId stack = kNoStack;
  std::uint16_t stream = 0;
  std::uint16_t pool = 0;
  bool large = true;
  bool expandable = false;
};

struct Frame {
  StringId function = 0;
  StringId file = 0;
  std::uint32_t line = 0;
  std::uint32_t extra = 0;  // into frame_extras: what FX says about generated code; 0 = nothing
};

struct FrameExtra {
  StringId node_op = 0;
  StringId node_name = 0;
  StringId original_trace = 0;
};

/// What runs under one event: torch.compile's context and the program's own metadata.
struct EventNote {
  StringId compile_context = 0;
  StringId user_metadata = 0;
};

struct ExternalAnnotation {
  std::string name;
  std::string stage;  // "START", "END", ...
  std::int32_t device = 0;
  std::int64_t time_us = 0;
};

/// The allocator's settings as the snapshot gives them; absent = the file does not say.
struct RecordedSettings {
  std::string conf;                             // the text of PYTORCH_ALLOC_CONF / PYTORCH_CUDA_ALLOC_CONF
  std::optional<std::uint64_t> max_split_size;  // absent also when unlimited
  std::optional<bool> expandable_segments;
  std::optional<double> garbage_collection_threshold;
  std::vector<std::pair<std::string, std::uint64_t>> roundup_power2_divisions;  // key as in the file ("1", "2", ...)
  bool present = false;
};

struct DeviceEvents {
  std::int32_t device = 0;
  std::size_t first = 0;  // into AllocatorSnapshot::events
  std::size_t count = 0;
};

struct AllocatorSnapshot {
  std::string file;
  std::uint64_t file_bytes = 0;
  std::string format;      // "pickle protocol 4", "JSON"
  bool list_only = false;  // the old form: a list of segments and nothing else

  std::vector<AllocatorSegment> segments;
  std::vector<AllocatorBlock> blocks;
  ChunkedVector<AllocatorEvent> events;
  std::vector<DeviceEvents> devices;
  bool has_history = false;  // some device has events
  bool has_trace_key = false;

  std::vector<std::uint64_t> streams{0};
  std::vector<std::pair<std::uint64_t, std::uint64_t>> pools{{0, 0}};
  std::vector<EventNote> notes{{}};
  std::vector<FrameExtra> frame_extras{{}};
  std::vector<Frame> frames;
  std::vector<std::uint32_t> stack_begin{0, 0};  // stack i = stack_frames[stack_begin[i] .. stack_begin[i + 1])
  std::vector<FrameId> stack_frames;
  std::vector<std::string_view> strings;  // [0] is ""
  std::vector<std::unique_ptr<char[]>> string_store;

  RecordedSettings settings;
  std::vector<ExternalAnnotation> annotations;
  std::map<std::string, std::uint64_t> unknown_fields;  // "event.foo" -> how often
  std::vector<std::string> notices;                     // what the reader wants the user to know

  std::size_t stack_depth(StackId stack) const { return stack_begin[stack + 1] - stack_begin[stack]; }
  const Frame& frame_of(StackId stack, std::size_t depth) const {
    return frames[stack_frames[stack_begin[stack] + depth]];
  }
  std::string_view text(StringId id) const { return strings[id]; }
};

}  // namespace memfit::trace
