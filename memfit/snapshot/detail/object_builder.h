// The stack machine that a pickle (or JSON) drives: values, containers, memo. Dictionaries that look like what PyTorch
// writes become packed records the moment they are complete, so memory follows the distinct content.
// It can build nothing but data: there is no way to name a class or call anything.
// Threads: one. Cost: 8 bytes a memo entry; see trace/allocator_trace.h for records.
//
// Note [Slots]
// An open list or dictionary lives in a slot. When it turns into a record (an event, a frame, an interned stack) its
// one memo entry is changed to the record and the slot is used again, unless somebody fetched the open container from
// the memo or duplicated it: then the slot stays and forwards.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "memfit/snapshot/detail/byte_source.h"
#include "memfit/snapshot/detail/interner.h"
#include "memfit/trace/allocator_trace.h"

namespace memfit::snapshot::detail {

enum class Tag : std::uint8_t {
  None,
  False,
  True,
  Int,
  Big,
  Float,
  Str,
  Bytes,
  Tuple,
  List,
  Dict,
  Event,
  Frame,
  Block,
  Segment,
  Stack,
};

/// A tagged 64-bit word: 5 bits of tag, 59 of payload (a signed integer, or an index).
class Value {
 public:
  Value() = default;
  Value(Tag tag, std::uint64_t payload) : bits_(payload << 5 | static_cast<std::uint64_t>(tag)) {}
  static Value small(std::int64_t n) { return Value(Tag::Int, static_cast<std::uint64_t>(n)); }
  static bool fits(std::int64_t n) { return n >= -(std::int64_t{1} << 58) && n < (std::int64_t{1} << 58); }
  Tag tag() const { return static_cast<Tag>(bits_ & 31); }
  std::uint64_t index() const { return bits_ >> 5; }
  std::int64_t integer() const { return static_cast<std::int64_t>(bits_) >> 5; }
  std::uint64_t bits() const { return bits_; }
  bool operator==(const Value&) const = default;

 private:
  std::uint64_t bits_ = 0;
};

/// An integer that does not fit a Value.
struct BigInteger {
  bool negative = false;
  bool huge = false;  // more than 64 bits; magnitude is then meaningless
  std::uint64_t magnitude = 0;
};

class ObjectBuilder {
 public:
  ObjectBuilder(ByteSource& source, trace::AllocatorSnapshot& out);

  void push(Value value) { stack_.push_back(value); }
  void push_integer(std::int64_t n) {
    push(Value::fits(n)
             ? Value::small(n)
             : big({n < 0, false, n < 0 ? 0 - static_cast<std::uint64_t>(n) : static_cast<std::uint64_t>(n)}));
  }
  void push_unsigned(std::uint64_t n) {
    if (n < (std::uint64_t{1} << 58)) push(Value::small(static_cast<std::int64_t>(n)));
    else push(big({false, false, n}));
  }
  void push_big(const BigInteger& n) { push(big(n)); }
  void push_float(double number);
  void push_text(std::string_view text) { push(Value(Tag::Str, strings_.intern(text))); }
  void push_bytes(std::string_view text) { push(Value(Tag::Bytes, strings_.intern(text))); }
  void push_list() { push(Value(Tag::List, open_list())); }
  void push_dict() { push(Value(Tag::Dict, open_dict())); }
  void push_mark() {
    if (marks_.size() >= kMaxMarks) bad("has more than a million open marks");
    marks_.push_back(stack_.size());
  }
  std::size_t mark_depth() const { return marks_.size(); }
  /// How many values stand above the last mark.
  std::size_t above_mark() const { return stack_.size() - marks_.back(); }

  void pop();
  void pop_mark();
  void dup();
  void append();      // list item -> list
  void appends();     // list MARK items -> list
  void set_item();    // dict key value -> dict
  void set_items();   // dict MARK key value ... -> dict
  void make_list();   // MARK items -> list
  void make_dict();   // MARK key value ... -> dict
  void make_tuple();  // MARK items -> tuple
  void make_tuple(std::size_t count);

  void memoize() { put(memo_count_); }
  void put(std::uint64_t index);
  void get(std::uint64_t index) {
    if (index < memo_.size()) [[likely]] {
      const Value value = memo_[index];
      if (value.tag() == Tag::List || value.tag() == Tag::Dict) share(value);
      if (value.tag() == kHole) missing(index);
      push(value);
    } else {
      get_sparse(index);
    }
  }

  /// The one value left becomes the snapshot. Throws: BadInput when it is not one.
  void finish();

  [[noreturn]] void bad(const std::string& why) const;

 private:
  static constexpr std::size_t kMaxMarks = 1'000'000;
  static constexpr std::size_t kMaxContainers = 2'000'000;  // open ones that are not records
  static constexpr Tag kHole = static_cast<Tag>(31);        // memo entry never put

  enum class Kind : std::uint8_t { Generic, Event, Frame, Block, Segment };
  struct Run {
    Tag tag;
    std::uint32_t first;
    std::uint32_t count;
  };
  struct List {
    std::vector<Value> items;  // empty while the list is one run of records
    Run run{Tag::None, 0, 0};
    std::int64_t memo = -1;
    bool shared = false;
    bool forwards = false;
    Value forward;
  };
  struct Dict {
    std::vector<std::pair<Value, Value>> items;
    std::int64_t memo = -1;
    bool shared = false;
    bool forwards = false;
    Value forward;
  };

  Value big(const BigInteger& n);
  std::uint32_t open_list();
  std::uint32_t open_dict();
  void share(Value value);
  [[noreturn]] void missing(std::uint64_t index) const;
  void get_sparse(std::uint64_t index);
  std::size_t take_mark(std::size_t needed_below);

  Value settled(Value value);
  void add_to_list(Value& target, const Value* begin, const Value* end);
  void add_to_dict(Value& target, const Value* begin, const Value* end);
  static void spread_run(List& list);
  void resolve_list(std::uint32_t slot, Value record);
  void resolve_dict(std::uint32_t slot, Value record);
  Kind classify(const Value* begin, const Value* end) const;
  Value build(Kind kind, const Value* begin, const Value* end);

  void set_event(trace::AllocatorEvent& event, const Value* begin, const Value* end);
  void set_event_action(trace::AllocatorEvent& event, Value value);
  void set_block(trace::AllocatorBlock& block, const Value* begin, const Value* end);
  void set_block_history(trace::AllocatorBlock& block, Value value, bool& has_requested);
  void set_segment(trace::AllocatorSegment& segment, const Value* begin, const Value* end);
  void set_segment_blocks(trace::AllocatorSegment& segment, Value value);
  Value build_frame(const Value* begin, const Value* end);
  void unknown(const char* where, Value key);

  std::uint64_t unsigned_of(Value value, const char* what) const;
  std::int64_t signed_of(Value value, const char* what) const;
  std::uint64_t raw_of(Value value, const char* what) const;
  std::uint64_t size_of(Value value, const char* what) const;
  double double_of(Value value) const;
  std::string text_of(Value value) const;
  trace::StringId string_of(Value value) const;
  trace::StackId stack_of(Value value, const char* where);
  std::uint16_t stream_of(std::uint64_t stream);
  std::uint16_t pool_of(Value value);
  std::uint32_t note_of(trace::StringId context, trace::StringId metadata);

  void finish_root(Value root);
  void finish_segments(Value value);
  void finish_traces(Value value);
  void finish_settings(Value value);
  void finish_annotations(Value value);
  void fill_block_addresses();

  ByteSource& source_;
  trace::AllocatorSnapshot& out_;
  StringInterner strings_;
  SequenceInterner<trace::FrameId> stacks_;
  std::vector<std::uint32_t> tuple_begin_;
  std::vector<std::uint64_t> tuple_items_;
  SequenceInterner<std::uint64_t> tuples_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  trace::ChunkedVector<Value> memo_;
  std::unordered_map<std::uint64_t, Value> sparse_memo_;
  std::uint64_t memo_count_ = 0;
  std::vector<List> lists_;
  std::vector<std::uint32_t> free_lists_;
  std::vector<Dict> dicts_;
  std::vector<std::uint32_t> free_dicts_;
  std::vector<BigInteger> bigs_;
  std::vector<double> floats_;
  std::unordered_map<std::uint64_t, std::uint32_t> frame_ids_;  // hash -> first frame with it
  std::vector<std::uint32_t> frame_next_;                       // chain of equal hashes
  std::unordered_map<std::uint64_t, std::uint16_t> stream_ids_;
  std::unordered_map<std::uint64_t, std::uint32_t> note_ids_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::uint16_t> pool_ids_{{{0, 0}, 0}};
  std::uint64_t last_stream_ = 0;
  std::uint16_t last_stream_id_ = 0;
  std::uint64_t last_note_key_ = 0;
  std::uint32_t last_note_id_ = 0;
  Value last_pool_;
  std::uint16_t last_pool_id_ = 0;
  bool have_last_pool_ = false;
  std::uint64_t unknown_other_ = 0;
};

}  // namespace memfit::snapshot::detail
