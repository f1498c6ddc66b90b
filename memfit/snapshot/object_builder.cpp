#include "memfit/snapshot/detail/object_builder.h"

#include <algorithm>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/known_keys.h"

namespace memfit::snapshot::detail {

ObjectBuilder::ObjectBuilder(ByteSource& source, trace::AllocatorSnapshot& out)
    : source_(source),
      out_(out),
      strings_(out.strings, out.string_store),
      stacks_(out.stack_begin, out.stack_frames),
      tuples_(tuple_begin_, tuple_items_) {
  for (const std::string_view key : kKeyNames) strings_.intern(key);  // ids 1, 2, ... in the order of Key
  stack_.reserve(4096);
}

void ObjectBuilder::bad(const std::string& why) const { throw BadInput(source_.name(), source_.offset(), why); }

Value ObjectBuilder::big(const BigInteger& n) {
  bigs_.push_back(n);
  return Value(Tag::Big, bigs_.size() - 1);
}

void ObjectBuilder::push_float(double number) {
  floats_.push_back(number);
  push(Value(Tag::Float, floats_.size() - 1));
}

std::uint32_t ObjectBuilder::open_list() {
  if (!free_lists_.empty()) {
    const std::uint32_t slot = free_lists_.back();
    free_lists_.pop_back();
    return slot;
  }
  if (lists_.size() + dicts_.size() >= kMaxContainers)
    bad("has more than two million lists and dictionaries that are no snapshot records");
  lists_.emplace_back();
  return static_cast<std::uint32_t>(lists_.size() - 1);
}

std::uint32_t ObjectBuilder::open_dict() {
  if (!free_dicts_.empty()) {
    const std::uint32_t slot = free_dicts_.back();
    free_dicts_.pop_back();
    return slot;
  }
  if (lists_.size() + dicts_.size() >= kMaxContainers)
    bad("has more than two million lists and dictionaries that are no snapshot records");
  dicts_.emplace_back();
  return static_cast<std::uint32_t>(dicts_.size() - 1);
}

void ObjectBuilder::share(Value value) {
  if (value.tag() == Tag::List) lists_[value.index()].shared = true;
  if (value.tag() == Tag::Dict) dicts_[value.index()].shared = true;
}

void ObjectBuilder::missing(std::uint64_t index) const {
  bad("fetches memo entry " + std::to_string(index) + ", which was never stored");
}

void ObjectBuilder::get_sparse(std::uint64_t index) {
  const auto found = sparse_memo_.find(index);
  if (found == sparse_memo_.end()) missing(index);
  share(found->second);
  push(found->second);
}

void ObjectBuilder::put(std::uint64_t index) {
  if (stack_.empty() || (!marks_.empty() && stack_.size() <= marks_.back()))
    bad("stores in the memo when nothing is on the stack");
  Value value = stack_.back();
  // A container in the sparse memo, or stored twice, keeps its slot: only one dense entry can be patched.
  const bool dense = index <= memo_.size();
  if (value.tag() == Tag::List) {
    List& list = lists_[value.index()];
    if (list.memo >= 0 || !dense) list.shared = true;
    if (dense && list.memo < 0) list.memo = static_cast<std::int64_t>(index);
  } else if (value.tag() == Tag::Dict) {
    Dict& dict = dicts_[value.index()];
    if (dict.memo >= 0 || !dense) dict.shared = true;
    if (dense && dict.memo < 0) dict.memo = static_cast<std::int64_t>(index);
  }
  ++memo_count_;
  if (index == memo_.size()) {
    memo_.push_back(value);
  } else if (dense) {
    const Value old = memo_[index];
    // A container that loses its entry must not patch it later.
    if (old.tag() == Tag::List && !(old == value)) lists_[old.index()].memo = -1, lists_[old.index()].shared = true;
    if (old.tag() == Tag::Dict && !(old == value)) dicts_[old.index()].memo = -1, dicts_[old.index()].shared = true;
    memo_[index] = value;
  } else if (index - memo_.size() < 64) {
    while (memo_.size() < index) {  // small gaps: entries put earlier may wait in the sparse part
      const auto found = sparse_memo_.find(memo_.size());
      memo_.push_back(found == sparse_memo_.end() ? Value(kHole, 0) : found->second);
    }
    memo_.push_back(value);
  } else {
    sparse_memo_[index] = value;
  }
}

std::size_t ObjectBuilder::take_mark(std::size_t needed_below) {
  if (marks_.empty()) bad("closes a mark that was never set");
  const std::size_t mark = marks_.back();
  marks_.pop_back();
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (mark < floor + needed_below) bad("has nothing on the stack to put the items in");
  return mark;
}

void ObjectBuilder::pop() {
  // As in Python: popping where only a mark is left pops the mark.
  if (!marks_.empty() && marks_.back() == stack_.size()) {
    marks_.pop_back();
    return;
  }
  if (stack_.empty()) bad("pops an empty stack");
  share(stack_.back());
  stack_.pop_back();
}

void ObjectBuilder::pop_mark() {
  const std::size_t mark = take_mark(0);
  for (std::size_t i = mark; i < stack_.size(); ++i) share(stack_[i]);
  stack_.resize(mark);
}

void ObjectBuilder::dup() {
  if (stack_.empty() || (!marks_.empty() && stack_.size() <= marks_.back()))
    bad("duplicates the top of an empty stack");
  share(stack_.back());
  const Value top = stack_.back();
  push(top);
}

Value ObjectBuilder::settled(Value value) {
  if (value.tag() == Tag::Dict) {
    Dict& dict = dicts_[value.index()];
    if (dict.forwards) return dict.forward;
    if (dict.items.empty()) return value;
    std::vector<Value> flat;
    flat.reserve(dict.items.size() * 2);
    for (const auto& [key, item] : dict.items) {
      flat.push_back(key);
      flat.push_back(item);
    }
    const Kind kind = classify(flat.data(), flat.data() + flat.size());
    if (kind == Kind::Generic) return value;
    const Value record = build(kind, flat.data(), flat.data() + flat.size());
    resolve_dict(static_cast<std::uint32_t>(value.index()), record);
    return record;
  }
  if (value.tag() == Tag::List && lists_[value.index()].forwards) return lists_[value.index()].forward;
  return value;
}

void ObjectBuilder::resolve_list(std::uint32_t slot, Value record) {
  List& list = lists_[slot];
  if (list.memo >= 0) memo_[static_cast<std::size_t>(list.memo)] = record;
  list.items.clear();
  list.run = {Tag::None, 0, 0};
  list.memo = -1;
  if (list.shared) {
    std::vector<Value>().swap(list.items);
    list.forwards = true;
    list.forward = record;
  } else {
    free_lists_.push_back(slot);
  }
}

void ObjectBuilder::resolve_dict(std::uint32_t slot, Value record) {
  Dict& dict = dicts_[slot];
  if (dict.memo >= 0) memo_[static_cast<std::size_t>(dict.memo)] = record;
  dict.items.clear();
  dict.memo = -1;
  if (dict.shared) {
    std::vector<std::pair<Value, Value>>().swap(dict.items);
    dict.forwards = true;
    dict.forward = record;
  } else {
    free_dicts_.push_back(slot);
  }
}

void ObjectBuilder::spread_run(List& list) {
  list.items.reserve(list.run.count + 1);
  for (std::uint32_t i = 0; i < list.run.count; ++i) list.items.push_back(Value(list.run.tag, list.run.first + i));
  list.run = {Tag::None, 0, 0};
}

void ObjectBuilder::add_to_list(Value& target, const Value* begin, const Value* end) {
  target = settled(target);
  if (target.tag() == Tag::Stack && begin == end) return;
  if (target.tag() != Tag::List) bad("appends to something that is not an open list");
  const std::size_t slot = target.index();
  for (const Value* item = begin; item != end; ++item) {
    const Value value = settled(*item);
    List& list = lists_[slot];  // settling may have moved the slots
    const Tag tag = value.tag();
    if (tag >= Tag::Event && tag <= Tag::Segment && tag != Tag::Frame && list.items.empty()) {
      if (list.run.count == 0) {
        list.run = {tag, static_cast<std::uint32_t>(value.index()), 1};
        continue;
      }
      if (list.run.tag == tag && value.index() == std::uint64_t{list.run.first} + list.run.count) {
        ++list.run.count;
        continue;
      }
    }
    if (list.run.count > 0) spread_run(list);
    list.items.push_back(value);
  }
}

void ObjectBuilder::append() {
  if (stack_.size() < 2 || (!marks_.empty() && stack_.size() < marks_.back() + 2))
    bad("appends with fewer than two values on the stack");
  const Value item = stack_.back();
  stack_.pop_back();
  add_to_list(stack_.back(), &item, &item + 1);
}

void ObjectBuilder::appends() {
  const std::size_t mark = take_mark(1);
  add_to_list(stack_[mark - 1], stack_.data() + mark, stack_.data() + stack_.size());
  stack_.resize(mark);
}

void ObjectBuilder::add_to_dict(Value& target, const Value* begin, const Value* end) {
  if ((end - begin) % 2 != 0) bad("gives a dictionary a key without a value");
  if (target.tag() == Tag::Dict) {
    Dict& dict = dicts_[target.index()];
    if (dict.forwards) {
      target = dict.forward;
    } else {
      if (dict.items.empty()) {
        const Kind kind = classify(begin, end);
        if (kind != Kind::Generic) {
          const std::uint32_t slot = static_cast<std::uint32_t>(target.index());
          target = build(kind, begin, end);
          resolve_dict(slot, target);
          return;
        }
      }
      const std::size_t slot = target.index();
      for (const Value* item = begin; item != end; item += 2) {
        const Value value = settled(item[1]);
        dicts_[slot].items.emplace_back(item[0], value);
      }
      return;
    }
  }
  switch (target.tag()) {
    case Tag::Event:
      set_event(out_.events[target.index()], begin, end);
      return;
    case Tag::Block:
      set_block(out_.blocks[target.index()], begin, end);
      return;
    case Tag::Segment:
      set_segment(out_.segments[target.index()], begin, end);
      return;
    case Tag::Frame:
      if (begin == end) return;
      bad("changes a stack frame after it was complete");
    default:
      bad("sets an item of something that is not a dictionary");
  }
}

void ObjectBuilder::set_item() {
  if (stack_.size() < 3 || (!marks_.empty() && stack_.size() < marks_.back() + 3))
    bad("sets an item with fewer than three values on the stack");
  const Value pair[2] = {stack_[stack_.size() - 2], stack_[stack_.size() - 1]};
  stack_.resize(stack_.size() - 2);
  // One at a time: do not decide what it is by its first key; settled() decides when it is used.
  Value& target = stack_.back();
  if (target.tag() == Tag::Dict && !dicts_[target.index()].forwards) {
    const std::size_t slot = target.index();
    const Value value = settled(pair[1]);
    dicts_[slot].items.emplace_back(pair[0], value);
    return;
  }
  add_to_dict(target, pair, pair + 2);
}

void ObjectBuilder::set_items() {
  const std::size_t mark = take_mark(1);
  add_to_dict(stack_[mark - 1], stack_.data() + mark, stack_.data() + stack_.size());
  stack_.resize(mark);
}

void ObjectBuilder::make_list() {
  const std::size_t mark = take_mark(0);
  Value list(Tag::List, open_list());
  add_to_list(list, stack_.data() + mark, stack_.data() + stack_.size());
  stack_.resize(mark);
  push(list);
}

void ObjectBuilder::make_dict() {
  const std::size_t mark = take_mark(0);
  Value dict(Tag::Dict, open_dict());
  add_to_dict(dict, stack_.data() + mark, stack_.data() + stack_.size());
  stack_.resize(mark);
  push(dict);
}

void ObjectBuilder::make_tuple() {
  const std::size_t mark = take_mark(0);
  for (std::size_t i = mark; i < stack_.size(); ++i) {
    stack_[i] = settled(stack_[i]);
    share(stack_[i]);
  }
  static_assert(sizeof(Value) == sizeof(std::uint64_t));
  const std::uint32_t id =
      tuples_.intern({reinterpret_cast<const std::uint64_t*>(stack_.data() + mark), stack_.size() - mark});
  stack_.resize(mark);
  push(Value(Tag::Tuple, id));
}

void ObjectBuilder::make_tuple(std::size_t count) {
  const std::size_t floor = marks_.empty() ? 0 : marks_.back();
  if (stack_.size() < floor + count) bad("makes a tuple of more values than there are");
  marks_.push_back(stack_.size() - count);
  make_tuple();
}

}  // namespace memfit::snapshot::detail
