// Dictionaries become records: which kind, and each field's meaning.
#include <bit>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/known_keys.h"
#include "memfit/snapshot/detail/object_builder.h"

namespace memfit::snapshot::detail {

using trace::AllocatorAction;
using trace::BlockState;

namespace {

constexpr std::uint64_t kLargestSize = std::uint64_t{1} << 50;     // a pebibyte: no device has it
constexpr std::uint64_t kLargestAddress = std::uint64_t{1} << 62;  // sums of address and size stay inside 64 bits

Key key_of(Value value) {
  if (value.tag() != Tag::Str || value.index() >= static_cast<std::uint64_t>(Key::count)) return Key::empty;
  return static_cast<Key>(value.index());
}

}  // namespace

ObjectBuilder::Kind ObjectBuilder::classify(const Value* begin, const Value* end) const {
  unsigned frame_parts = 0;
  bool state = false, size = false;
  for (const Value* key = begin; key + 1 < end; key += 2) {
    switch (key_of(*key)) {
      case Key::action:
        return Kind::Event;
      case Key::total_size:
        return Kind::Segment;
      case Key::filename:
        frame_parts |= 1;
        break;
      case Key::name:
        frame_parts |= 2;
        break;
      case Key::line:
        frame_parts |= 4;
        break;
      case Key::state:
        state = true;
        break;
      case Key::size:
        size = true;
        break;
      default:
        break;
    }
  }
  if (frame_parts == 7) return Kind::Frame;
  if (state && size) return Kind::Block;
  return Kind::Generic;
}

Value ObjectBuilder::build(Kind kind, const Value* begin, const Value* end) {
  switch (kind) {
    case Kind::Event: {
      if (out_.events.size() >= 0xfffffffeull) bad("has more than four billion events");
      trace::AllocatorEvent event;
      set_event(event, begin, end);
      out_.events.push_back(event);
      return Value(Tag::Event, out_.events.size() - 1);
    }
    case Kind::Frame:
      return build_frame(begin, end);
    case Kind::Block: {
      trace::AllocatorBlock block;
      set_block(block, begin, end);
      out_.blocks.push_back(block);
      return Value(Tag::Block, out_.blocks.size() - 1);
    }
    case Kind::Segment: {
      trace::AllocatorSegment segment;
      set_segment(segment, begin, end);
      out_.segments.push_back(segment);
      return Value(Tag::Segment, out_.segments.size() - 1);
    }
    case Kind::Generic:
      break;
  }
  bad("holds a dictionary of no known kind");
}

std::uint64_t ObjectBuilder::unsigned_of(Value value, const char* what) const {
  switch (value.tag()) {
    case Tag::None:
    case Tag::False:
      return 0;
    case Tag::True:
      return 1;
    case Tag::Int:
      if (value.integer() >= 0) return static_cast<std::uint64_t>(value.integer());
      bad(std::string(what) + " is negative: " + std::to_string(value.integer()));
    case Tag::Big: {
      const BigInteger& n = bigs_[value.index()];
      if (!n.negative && !n.huge) return n.magnitude;
      bad(std::string(what) + (n.huge ? " does not fit 64 bits" : " is negative"));
    }
    case Tag::Float: {
      const double number = floats_[value.index()];
      if (number >= 0 && number < 1.8e19) return static_cast<std::uint64_t>(number);
      bad(std::string(what) + " is not a size");
    }
    default:
      bad(std::string(what) + " is not a number");
  }
}

std::int64_t ObjectBuilder::signed_of(Value value, const char* what) const {
  if (value.tag() == Tag::Int) return value.integer();
  if (value.tag() == Tag::Big) {
    const BigInteger& n = bigs_[value.index()];
    if (!n.huge && n.magnitude <= (std::uint64_t{1} << 63) - 1) {
      const auto magnitude = static_cast<std::int64_t>(n.magnitude);
      return n.negative ? -magnitude : magnitude;
    }
  }
  return static_cast<std::int64_t>(std::min<std::uint64_t>(unsigned_of(value, what), (std::uint64_t{1} << 63) - 1));
}

/// Pointers and handles: any 64 bits, also written as a negative number.
std::uint64_t ObjectBuilder::raw_of(Value value, const char* what) const {
  if (value.tag() == Tag::Int) return static_cast<std::uint64_t>(value.integer());
  if (value.tag() == Tag::Big && !bigs_[value.index()].huge) {
    const BigInteger& n = bigs_[value.index()];
    return n.negative ? 0 - n.magnitude : n.magnitude;
  }
  return unsigned_of(value, what);
}

std::uint64_t ObjectBuilder::size_of(Value value, const char* what) const {
  const std::uint64_t size = unsigned_of(value, what);
  if (size > kLargestSize) bad(std::string(what) + " of " + std::to_string(size) + " bytes is larger than any device");
  return size;
}

double ObjectBuilder::double_of(Value value) const {
  if (value.tag() == Tag::Float) return floats_[value.index()];
  return static_cast<double>(signed_of(value, "a number"));
}

trace::StringId ObjectBuilder::string_of(Value value) const {
  if (value.tag() == Tag::Str || value.tag() == Tag::Bytes) return static_cast<trace::StringId>(value.index());
  return 0;
}

std::string ObjectBuilder::text_of(Value value) const { return std::string(out_.strings[string_of(value)]); }

std::uint16_t ObjectBuilder::stream_of(std::uint64_t stream) {
  if (stream == last_stream_) return last_stream_id_;
  auto [found, fresh] = stream_ids_.try_emplace(stream, 0);
  if (fresh) {
    if (stream == 0) {
      found->second = 0;
    } else {
      if (out_.streams.size() >= 65535) bad("names more than 65,535 streams");
      found->second = static_cast<std::uint16_t>(out_.streams.size());
      out_.streams.push_back(stream);
    }
  }
  last_stream_ = stream;
  return last_stream_id_ = found->second;
}

std::uint16_t ObjectBuilder::pool_of(Value value) {
  if (have_last_pool_ && value == last_pool_ && value.tag() == Tag::Tuple) return last_pool_id_;
  std::pair<std::uint64_t, std::uint64_t> id{0, 0};
  if (value.tag() == Tag::Tuple) {
    const auto parts = tuples_.at(static_cast<std::uint32_t>(value.index()));
    if (parts.size() == 2) {
      const Value first = std::bit_cast<Value>(parts[0]);
      const Value second = std::bit_cast<Value>(parts[1]);
      id = {raw_of(first, "a pool id"), raw_of(second, "a pool id")};
    }
  } else if (value.tag() == Tag::List && lists_[value.index()].items.size() == 2) {
    const auto& items = lists_[value.index()].items;
    id = {raw_of(items[0], "a pool id"), raw_of(items[1], "a pool id")};
    if (!lists_[value.index()].shared && lists_[value.index()].memo < 0) {
      // JSON writes a fresh list each time; nobody can reach it any more.
      resolve_list(static_cast<std::uint32_t>(value.index()), Value());
    }
  }
  auto [found, fresh] = pool_ids_.try_emplace(id, static_cast<std::uint16_t>(out_.pools.size()));
  if (fresh) {
    if (out_.pools.size() >= 65535) bad("names more than 65,535 memory pools");
    out_.pools.push_back(id);
  }
  last_pool_ = value;
  have_last_pool_ = true;
  return last_pool_id_ = found->second;
}

std::uint32_t ObjectBuilder::note_of(trace::StringId context, trace::StringId metadata) {
  if (context != 0 && out_.strings[context] == "N/A") context = 0;
  const std::uint64_t key = std::uint64_t{context} << 32 | metadata;
  if (key == 0) return trace::kNoNote;
  if (key == last_note_key_) return last_note_id_;
  auto [found, fresh] = note_ids_.try_emplace(key, static_cast<std::uint32_t>(out_.notes.size()));
  if (fresh) out_.notes.push_back({context, metadata});
  last_note_key_ = key;
  return last_note_id_ = found->second;
}

trace::StackId ObjectBuilder::stack_of(Value value, const char* where) {
  if (value.tag() == Tag::Stack) return static_cast<trace::StackId>(value.index());
  value = settled(value);
  if (value.tag() == Tag::Stack) return static_cast<trace::StackId>(value.index());
  if (value.tag() == Tag::None) return trace::kNoStack;
  if (value.tag() != Tag::List) {
    unknown(where, Value(Tag::Str, static_cast<std::uint64_t>(Key::frames)));
    return trace::kNoStack;
  }
  const std::uint32_t slot = static_cast<std::uint32_t>(value.index());
  const List& list = lists_[slot];
  if (list.items.empty() && list.run.count == 0) {
    resolve_list(slot, Value(Tag::Stack, trace::kNoStack));
    return trace::kNoStack;
  }
  thread_local std::vector<trace::FrameId> ids;
  ids.clear();
  for (const Value item : list.items) {
    if (item.tag() != Tag::Frame) {
      unknown(where, Value(Tag::Str, static_cast<std::uint64_t>(Key::frames)));
      return trace::kNoStack;
    }
    ids.push_back(static_cast<trace::FrameId>(item.index()));
  }
  if (list.run.count > 0) return trace::kNoStack;
  const trace::StackId stack = stacks_.intern(ids);
  resolve_list(slot, Value(Tag::Stack, stack));
  return stack;
}

void ObjectBuilder::unknown(const char* where, Value key) {
  if (out_.unknown_fields.size() >= 200) {
    ++unknown_other_;
    return;
  }
  const std::string name =
      key.tag() == Tag::Str ? text_of(key).substr(0, 100) : std::string("(a key that is not text)");
  ++out_.unknown_fields[std::string(where) + "." + name];
}

void ObjectBuilder::set_event_action(trace::AllocatorEvent& event, Value value) {
  switch (key_of(value)) {
    case Key::alloc:
      event.action = AllocatorAction::Alloc;
      return;
    case Key::free:
      event.action = AllocatorAction::FreeCompleted;
      return;  // versions before free was split in two
    case Key::free_requested:
      event.action = AllocatorAction::FreeRequested;
      return;
    case Key::free_completed:
      event.action = AllocatorAction::FreeCompleted;
      return;
    case Key::segment_alloc:
      event.action = AllocatorAction::SegmentAlloc;
      return;
    case Key::segment_free:
      event.action = AllocatorAction::SegmentFree;
      return;
    case Key::segment_map:
      event.action = AllocatorAction::SegmentMap;
      return;
    case Key::segment_unmap:
      event.action = AllocatorAction::SegmentUnmap;
      return;
    case Key::snapshot:
      event.action = AllocatorAction::Snapshot;
      return;
    case Key::oom:
      event.action = AllocatorAction::OutOfMemory;
      return;
    default:
      event.action = AllocatorAction::Other;
      unknown("action", value);
  }
}

void ObjectBuilder::set_event(trace::AllocatorEvent& event, const Value* begin, const Value* end) {
  trace::StringId context = out_.notes[event.note].compile_context;
  trace::StringId metadata = out_.notes[event.note].user_metadata;
  for (const Value* item = begin; item + 1 < end; item += 2) {
    const Value value = item[1];
    switch (key_of(item[0])) {
      case Key::action:
        set_event_action(event, value);
        break;
      case Key::addr:
      case Key::device_free:
        event.address = raw_of(value, "an event's address");
        break;
      case Key::size:
        event.size = unsigned_of(value, "an event's size");
        break;
      case Key::stream:
        event.stream = stream_of(raw_of(value, "a stream"));
        break;
      case Key::time_us:
        event.time_us = signed_of(value, "a time");
        break;
      case Key::frames:
        event.stack = stack_of(value, "event");
        break;
      case Key::compile_context:
        context = string_of(value);
        break;
      case Key::user_metadata:
        metadata = string_of(value);
        break;
      case Key::pool_id:
      case Key::segment_pool_id:
      case Key::mempool_id:
        event.pool = pool_of(value);
        event.has_pool = true;
        break;
      case Key::device:
        break;  // the list it stands in says the same
      default:
        unknown("event", item[0]);
    }
  }
  if (context | metadata) event.note = note_of(context, metadata);
  if (event.size > kLargestSize && (event.action != AllocatorAction::OutOfMemory || event.size > kLargestAddress)) {
    bad("an event's size of " + std::to_string(event.size) + " bytes is larger than any device");
  }
  if (event.address > kLargestAddress)
    bad("an event's address of " + std::to_string(event.address) + " is outside any address space");
}

void ObjectBuilder::set_block_history(trace::AllocatorBlock& block, Value value, bool& has_requested) {
  value = settled(value);
  if (value.tag() != Tag::List || lists_[value.index()].items.empty()) return;
  const Value first = settled(lists_[value.index()].items.front());
  if (first.tag() != Tag::Dict) return;
  const auto items = dicts_[first.index()].items;
  for (const auto& [key, item] : items) {
    if (key_of(key) == Key::real_size) {
      block.requested = size_of(item, "a block's requested size");
      has_requested = true;
    }
    if (key_of(key) == Key::frames) block.stack = stack_of(item, "block");
  }
}

void ObjectBuilder::set_block(trace::AllocatorBlock& block, const Value* begin, const Value* end) {
  bool has_requested = block.requested != 0;
  for (const Value* item = begin; item + 1 < end; item += 2) {
    const Value value = item[1];
    switch (key_of(item[0])) {
      case Key::size:
        block.size = size_of(value, "a block's size");
        break;
      case Key::requested_size:
        block.requested = size_of(value, "a block's requested size");
        has_requested = true;
        break;
      case Key::address:
        block.address = raw_of(value, "a block's address");
        break;
      case Key::frames:
        block.stack = stack_of(value, "block");
        break;
      case Key::history:
        set_block_history(block, value, has_requested);
        break;
      case Key::state:
        switch (key_of(value)) {
          case Key::active_allocated:
            block.state = BlockState::Allocated;
            break;
          case Key::active_pending_free:
          case Key::active_awaiting_free:
            block.state = BlockState::PendingFree;
            break;
          case Key::inactive:
            block.state = BlockState::Inactive;
            break;
          default:
            unknown("block state", value);
        }
        break;
      case Key::cpp_frames:
      case Key::gc_counter:
      case Key::device:
      case Key::stream:
        break;
      default:
        unknown("block", item[0]);
    }
  }
  if (block.address > kLargestAddress)
    bad("a block's address of " + std::to_string(block.address) + " is outside any address space");
  if (!has_requested && block.state != BlockState::Inactive) block.requested = block.size;
}

void ObjectBuilder::set_segment_blocks(trace::AllocatorSegment& segment, Value value) {
  value = settled(value);
  if (value.tag() != Tag::List) {
    if (value.tag() != Tag::None) bad("a segment's blocks are not a list");
    return;
  }
  const List& list = lists_[value.index()];
  if (list.run.count > 0 && list.run.tag == Tag::Block) {
    segment.first_block = list.run.first;
    segment.block_count = list.run.count;
    return;
  }
  segment.first_block = static_cast<std::uint32_t>(out_.blocks.size());
  segment.block_count = 0;
  for (const Value item : list.items) {
    if (item.tag() != Tag::Block) {
      unknown("segment", Value(Tag::Str, static_cast<std::uint64_t>(Key::blocks)));
      continue;
    }
    out_.blocks.push_back(trace::AllocatorBlock(out_.blocks[item.index()]));
    ++segment.block_count;
  }
}

void ObjectBuilder::set_segment(trace::AllocatorSegment& segment, const Value* begin, const Value* end) {
  for (const Value* item = begin; item + 1 < end; item += 2) {
    const Value value = item[1];
    switch (key_of(item[0])) {
      case Key::device: {
        const std::int64_t device = signed_of(value, "a device index");
        if (device < -1 || device > 1023) bad("a device index of " + std::to_string(device));
        segment.device = static_cast<std::int32_t>(device);
        break;
      }
      case Key::address:
        segment.address = raw_of(value, "a segment's address");
        break;
      case Key::total_size:
        segment.total = size_of(value, "a segment's size");
        break;
      case Key::allocated_size:
        segment.allocated = size_of(value, "a segment's allocated size");
        break;
      case Key::active_size:
        segment.active = size_of(value, "a segment's active size");
        break;
      case Key::requested_size:
        size_of(value, "a segment's requested size");
        break;
      case Key::stream:
        segment.stream = stream_of(raw_of(value, "a stream"));
        break;
      case Key::segment_type:
        segment.large = key_of(value) != Key::small;
        break;
      case Key::segment_pool_id:
      case Key::pool_id:
        segment.pool = pool_of(value);
        break;
      case Key::is_expandable:
        segment.expandable = value.tag() == Tag::True || (value.tag() == Tag::Int && value.integer() != 0);
        break;
      case Key::frames:
        segment.stack = stack_of(value, "segment");
        break;
      case Key::blocks:
        set_segment_blocks(segment, value);
        break;
      case Key::cpp_frames:
      case Key::registration_counter:
        break;
      default:
        unknown("segment", item[0]);
    }
  }
  if (segment.address > kLargestAddress)
    bad("a segment's address of " + std::to_string(segment.address) + " is outside any address space");
}

Value ObjectBuilder::build_frame(const Value* begin, const Value* end) {
  trace::Frame frame;
  trace::FrameExtra extra;
  for (const Value* item = begin; item + 1 < end; item += 2) {
    const Value value = item[1];
    switch (key_of(item[0])) {
      case Key::name:
        frame.function = string_of(value);
        break;
      case Key::filename:
        frame.file = string_of(value);
        break;
      case Key::line: {
        const std::int64_t line = signed_of(value, "a line number");
        frame.line = line < 0 || line > 0xffffffffll ? 0 : static_cast<std::uint32_t>(line);
        break;
      }
      case Key::fx_node_op:
        extra.node_op = string_of(value);
        break;
      case Key::fx_node_name:
        extra.node_name = string_of(value);
        break;
      case Key::fx_original_trace:
        extra.original_trace = string_of(value);
        break;
      case Key::fx_node_info:
        break;
      default:
        unknown("frame", item[0]);
    }
  }
  if (extra.node_op | extra.node_name | extra.original_trace) {
    const trace::FrameExtra& last = out_.frame_extras.back();
    if (last.node_op != extra.node_op || last.node_name != extra.node_name ||
        last.original_trace != extra.original_trace)
      out_.frame_extras.push_back(extra);
    frame.extra = static_cast<std::uint32_t>(out_.frame_extras.size() - 1);
  }
  const std::uint32_t words[4] = {frame.function, frame.file, frame.line, frame.extra};
  const std::uint64_t hash = hash_bytes(reinterpret_cast<const char*>(words), sizeof words);
  auto [found, fresh] = frame_ids_.try_emplace(hash, static_cast<std::uint32_t>(out_.frames.size()));
  if (!fresh) {
    std::uint32_t at = found->second;
    for (;;) {
      const trace::Frame& known = out_.frames[at];
      if (known.function == frame.function && known.file == frame.file && known.line == frame.line &&
          known.extra == frame.extra)
        return Value(Tag::Frame, at);
      if (frame_next_[at] == 0) break;
      at = frame_next_[at];
    }
    frame_next_[at] = static_cast<std::uint32_t>(out_.frames.size());
  }
  out_.frames.push_back(frame);
  frame_next_.push_back(0);
  return Value(Tag::Frame, out_.frames.size() - 1);
}

}  // namespace memfit::snapshot::detail
