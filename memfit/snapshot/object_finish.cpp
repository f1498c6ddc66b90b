// The last value on the stack becomes the snapshot.
#include <algorithm>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/known_keys.h"
#include "memfit/snapshot/detail/object_builder.h"

namespace memfit::snapshot::detail {
namespace {

bool is(Value key, Key known) { return key.tag() == Tag::Str && key.index() == static_cast<std::uint64_t>(known); }

}  // namespace

void ObjectBuilder::finish() {
  if (!marks_.empty()) bad("ends inside an open mark");
  if (stack_.size() != 1) bad("ends with " + std::to_string(stack_.size()) + " values instead of one");
  const Value root = settled(stack_.back());
  stack_.clear();
  memo_.clear();
  sparse_memo_.clear();
  finish_root(root);
  fill_block_addresses();
  for (const auto& device : out_.devices) out_.has_history = out_.has_history || device.count > 0;
  if (unknown_other_ > 0) out_.unknown_fields["(others)"] = unknown_other_;
  lists_ = {};
  dicts_ = {};
}

void ObjectBuilder::finish_root(Value root) {
  if (root.tag() == Tag::List) {  // torch.cuda.memory_snapshot(), and snapshots before there were traces
    out_.list_only = true;
    finish_segments(root);
    return;
  }
  if (root.tag() != Tag::Dict) bad("is no memory snapshot: its content is neither a dictionary nor a list of segments");
  bool segments = false;
  const auto items = std::move(dicts_[root.index()].items);
  for (const auto& [key, value] : items) {
    if (is(key, Key::segments)) {
      segments = true;
      finish_segments(value);
    } else if (is(key, Key::device_traces)) {
      segments = true;
      out_.has_trace_key = true;
      finish_traces(value);
    } else if (is(key, Key::allocator_settings)) {
      finish_settings(value);
    } else if (is(key, Key::external_annotations)) {
      finish_annotations(value);
    } else {
      unknown("snapshot", key);
    }
  }
  if (!segments) bad("is no memory snapshot: the dictionary has neither \"segments\" nor \"device_traces\"");
}

void ObjectBuilder::finish_segments(Value value) {
  value = settled(value);
  if (value.tag() == Tag::None) return;
  if (value.tag() == Tag::Stack) return;  // an empty list that was also used as an empty stack
  if (value.tag() != Tag::List) bad("\"segments\" is not a list");
  const List& list = lists_[value.index()];
  std::vector<trace::AllocatorSegment> picked;
  if (list.run.count > 0) {
    if (list.run.tag != Tag::Segment) bad("is no memory snapshot: a list whose members are not segments");
    if (list.run.first == 0 && list.run.count == out_.segments.size()) return;
    picked.assign(out_.segments.begin() + list.run.first, out_.segments.begin() + list.run.first + list.run.count);
  }
  for (const Value item : list.items) {
    const Value segment = settled(item);
    if (segment.tag() != Tag::Segment) bad("is no memory snapshot: a list whose members are not segments");
    picked.push_back(out_.segments[segment.index()]);
  }
  out_.segments = std::move(picked);
}

void ObjectBuilder::finish_traces(Value value) {
  value = settled(value);
  if (value.tag() == Tag::None || value.tag() == Tag::Stack) return;
  if (value.tag() != Tag::List) bad("\"device_traces\" is not a list");
  std::vector<Value> traces = lists_[value.index()].items;
  if (lists_[value.index()].run.count > 0) {
    // One flat list of events: a single device.
    traces.assign(1, value);
  }
  std::int32_t device = 0;
  for (const Value item : traces) {
    const Value trace = settled(item);
    trace::DeviceEvents events{device++, 0, 0};
    if (trace.tag() == Tag::List) {
      const List& list = lists_[trace.index()];
      if (list.run.count > 0) {
        if (list.run.tag != Tag::Event) bad("a device trace holds something that is not an event");
        events.first = list.run.first;
        events.count = list.run.count;
      } else if (!list.items.empty()) {
        events.first = out_.events.size();
        for (const Value entry : list.items) {
          if (entry.tag() != Tag::Event) {
            unknown("trace", Value(Tag::Str, static_cast<std::uint64_t>(Key::device_traces)));
            continue;
          }
          out_.events.push_back(trace::AllocatorEvent(out_.events[entry.index()]));
        }
        events.count = out_.events.size() - events.first;
      }
    } else if (trace.tag() != Tag::Stack && trace.tag() != Tag::None) {
      bad("a device trace is not a list");
    }
    out_.devices.push_back(events);
    if (device > 1024) bad("names more than 1,024 devices");
  }
}

void ObjectBuilder::finish_settings(Value value) {
  value = settled(value);
  if (value.tag() != Tag::Dict) return;
  trace::RecordedSettings& settings = out_.settings;
  settings.present = true;
  for (const auto& [key, item] : dicts_[value.index()].items) {
    if (is(key, Key::PYTORCH_CUDA_ALLOC_CONF) || is(key, Key::PYTORCH_ALLOC_CONF) ||
        is(key, Key::PYTORCH_XPU_ALLOC_CONF)) {
      settings.conf = text_of(item);
    } else if (is(key, Key::max_split_size)) {
      // Unlimited is written as -1 or as the largest 64-bit number.
      const bool negative = item.tag() == Tag::Int && item.integer() < 0;
      const std::uint64_t size = negative ? ~std::uint64_t{0} : raw_of(item, "max_split_size");
      if (size < (std::uint64_t{1} << 62)) settings.max_split_size = size;
    } else if (is(key, Key::garbage_collection_threshold)) {
      settings.garbage_collection_threshold = double_of(item);
    } else if (is(key, Key::expandable_segments)) {
      settings.expandable_segments = item.tag() == Tag::True || (item.tag() == Tag::Int && item.integer() != 0);
    } else if (is(key, Key::roundup_power2_divisions)) {
      const Value divisions = settled(item);
      if (divisions.tag() != Tag::Dict) continue;
      for (const auto& [size, count] : dicts_[divisions.index()].items)
        settings.roundup_power2_divisions.emplace_back(text_of(size), unsigned_of(count, "roundup_power2_divisions"));
    }
    // The others (pinned_*, release_lock_on_cudamalloc, graph_capture_record_stream_reuse, ...) do not change what is
    // reserved.
  }
}

void ObjectBuilder::finish_annotations(Value value) {
  value = settled(value);
  if (value.tag() != Tag::List) return;
  for (const Value item : lists_[value.index()].items) {
    const Value entry = settled(item);
    if (entry.tag() != Tag::Dict) continue;
    trace::ExternalAnnotation annotation;
    for (const auto& [key, field] : dicts_[entry.index()].items) {
      if (is(key, Key::name)) annotation.name = text_of(field);
      else if (is(key, Key::stage)) annotation.stage = text_of(field);
      else if (is(key, Key::device)) annotation.device = static_cast<std::int32_t>(signed_of(field, "a device"));
      else if (is(key, Key::time_us)) annotation.time_us = signed_of(field, "a time");
    }
    out_.annotations.push_back(std::move(annotation));
  }
}

/// Old snapshots give blocks no address: they follow one another inside their segment.
void ObjectBuilder::fill_block_addresses() {
  for (trace::AllocatorSegment& segment : out_.segments) {
    std::uint64_t address = segment.address;
    std::uint64_t total = 0;
    for (std::uint32_t i = 0; i < segment.block_count; ++i) {
      trace::AllocatorBlock& block = out_.blocks[segment.first_block + i];
      if (block.address == 0) block.address = address;
      address = block.address + block.size;
      total += block.size;
    }
    if (segment.total == 0) segment.total = total;
  }
}

}  // namespace memfit::snapshot::detail
