#include "memfit/analysis/detail/block_layout.h"

#include <algorithm>
#include <stdexcept>

namespace memfit::analysis::detail {

std::uint32_t BlockLayout::new_node(std::uint64_t address, std::uint64_t size) {
  std::uint32_t index;
  if (free_nodes_.empty()) {
    index = static_cast<std::uint32_t>(nodes_.size());
    nodes_.emplace_back();
  } else {
    index = free_nodes_.back();
    free_nodes_.pop_back();
    nodes_[index] = Node();
  }
  nodes_[index].address = address;
  nodes_[index].size = size;
  by_address_.set(address, index);
  return index;
}

void BlockLayout::drop_node(std::uint32_t index) {
  if (by_address_.find(nodes_[index].address) == index) by_address_.erase(nodes_[index].address);
  free_nodes_.push_back(index);
}

std::map<std::uint64_t, BlockLayout::Chain>::iterator BlockLayout::chain_of(std::uint64_t address) {
  auto after = chains_.upper_bound(address);
  if (after == chains_.begin()) return chains_.end();
  --after;
  return address < after->second.end ? after : chains_.end();
}

void BlockLayout::drop_chain(std::map<std::uint64_t, Chain>::iterator chain, const char** violation) {
  for (std::uint32_t i = chain->second.head; i != kNone;) {
    const std::uint32_t next = nodes_[i].next;
    if (nodes_[i].state == State::Used) {
      allocated_ -= nodes_[i].size;
      lost.push_back(nodes_[i].event);
      *violation = "a segment was given back while blocks in it were in use";
    } else if (nodes_[i].state == State::Pending) {
      pending_ -= nodes_[i].size;
      *violation = "a segment was given back while blocks in it were in use";
    }
    drop_node(i);
    i = next;
  }
  reserved_ -= chain->second.end - chain->first;
  chains_.erase(chain);
}

BlockLayout::Outcome BlockLayout::add_segment(std::uint64_t address, std::uint64_t size, std::uint16_t stream,
                                              std::uint16_t pool, bool expandable, bool large) {
  Outcome outcome;
  outcome.bytes = size;
  if (size == 0) return outcome;
  // A segment where another is known: its end was not recorded.
  for (auto at = chains_.lower_bound(address); at != chains_.end() && at->first < address + size;) {
    const auto next = std::next(at);
    drop_chain(at, &outcome.violation);
    outcome.violation = "a segment appeared where another one was";
    at = next;
  }
  if (const auto below = chain_of(address); below != chains_.end()) {
    drop_chain(below, &outcome.violation);
    outcome.violation = "a segment appeared where another one was";
  }
  if (const std::uint32_t stale = by_address_.find(address); stale != kNone && nodes_[stale].floating) {
    // Its block was seen before the segment: it stays counted, under no segment.
    outcome.violation = "a segment appeared under a block that was already in use";
    return outcome;
  }
  const std::uint32_t node = new_node(address, size);
  nodes_[node].expandable = expandable;
  chains_[address] = Chain{address + size, node, node, stream, pool, expandable, large};
  reserved_ += size;
  return outcome;
}

BlockLayout::Outcome BlockLayout::remove_segment(std::uint64_t address, std::uint64_t size) {
  Outcome outcome;
  const auto chain = chains_.find(address);
  if (chain == chains_.end()) {
    outcome.violation = "a segment was given back that was not known";
    return outcome;
  }
  outcome.bytes = chain->second.end - chain->first;
  drop_chain(chain, &outcome.violation);
  if (outcome.violation == nullptr && outcome.bytes != size)
    outcome.violation = "a segment was given back with another size than it had";
  return outcome;
}

BlockLayout::Outcome BlockLayout::map(std::uint64_t address, std::uint64_t size, std::uint16_t stream,
                                      std::uint16_t pool) {
  const bool large = size % kSmallSegment != 0 || size > kSmallSegment * 8;
  Outcome outcome = add_segment(address, size, stream, pool, true, large);
  const auto fresh = chains_.find(address);
  if (fresh == chains_.end() || size == 0) return outcome;
  // Join with the ranges that end or begin here, as one expandable segment.
  auto chain = fresh;
  if (chain != chains_.begin()) {
    const auto left = std::prev(chain);
    if (left->second.expandable && left->second.end == address && left->second.stream == stream &&
        left->second.pool == pool) {
      const std::uint32_t joint = left->second.tail;
      nodes_[joint].next = chain->second.head;
      nodes_[chain->second.head].prev = joint;
      left->second.tail = chain->second.tail;
      left->second.end = chain->second.end;
      chains_.erase(chain);
      chain = left;
    }
  }
  const auto right = std::next(chain);
  if (right != chains_.end() && right->second.expandable && right->first == chain->second.end &&
      right->second.stream == stream && right->second.pool == pool) {
    nodes_[chain->second.tail].next = right->second.head;
    nodes_[right->second.head].prev = chain->second.tail;
    chain->second.tail = right->second.tail;
    chain->second.end = right->second.end;
    chain->second.large = chain->second.large || right->second.large;
    chains_.erase(right);
  }
  std::uint32_t node = by_address_.find(address);
  if (nodes_[node].next != kNone && nodes_[nodes_[node].next].state == State::Free) merge_with_next(node);
  if (nodes_[node].prev != kNone && nodes_[nodes_[node].prev].state == State::Free) merge_with_next(nodes_[node].prev);
  return outcome;
}

BlockLayout::Outcome BlockLayout::unmap(std::uint64_t address, std::uint64_t size) {
  Outcome outcome;
  outcome.bytes = size;
  auto chain = chain_of(address);
  if (size == 0 || chain == chains_.end() || address + size > chain->second.end) {
    outcome.violation = "memory was unmapped that was not known to be mapped";
    return outcome;
  }
  std::uint32_t node = free_node_around(address);
  if (node == kNone || nodes_[node].address + nodes_[node].size < address + size) {
    outcome.violation = "memory was unmapped while blocks in it were in use";
    return outcome;
  }
  if (nodes_[node].address < address) {
    split_at(node, address);
    node = nodes_[node].next;
  }
  if (nodes_[node].size > size) split_at(node, address + size);
  const std::uint32_t left = nodes_[node].prev, right = nodes_[node].next;
  const std::uint64_t begin = chain->first;
  const Chain whole = chain->second;
  chains_.erase(chain);
  if (left != kNone) {
    nodes_[left].next = kNone;
    chains_[begin] = Chain{address, whole.head, left, whole.stream, whole.pool, true, whole.large};
  }
  if (right != kNone) {
    nodes_[right].prev = kNone;
    chains_[address + size] = Chain{whole.end, right, whole.tail, whole.stream, whole.pool, true, whole.large};
  }
  drop_node(node);
  reserved_ -= size;
  return outcome;
}

/// The free block that holds `address`, or kNone.
std::uint32_t BlockLayout::free_node_around(std::uint64_t address) {
  const std::uint32_t exact = by_address_.find(address);
  if (exact != kNone) return nodes_[exact].state == State::Free ? exact : kNone;
  const auto chain = chain_of(address);
  if (chain == chains_.end()) return kNone;
  for (std::uint32_t i = chain->second.head; i != kNone && walk_budget_ > 0; i = nodes_[i].next, --walk_budget_) {
    if (address < nodes_[i].address + nodes_[i].size) return nodes_[i].state == State::Free ? i : kNone;
  }
  return kNone;
}

void BlockLayout::split_at(std::uint32_t index, std::uint64_t address) {
  const std::uint64_t head = address - nodes_[index].address;
  const std::uint32_t rest = new_node(address, nodes_[index].size - head);
  Node& node = nodes_[index];
  node.size = head;
  nodes_[rest].prev = index;
  nodes_[rest].expandable = node.expandable;
  nodes_[rest].next = node.next;
  if (node.next != kNone) {
    nodes_[node.next].prev = rest;
  } else if (node.expandable) {
    if (const auto chain = chain_of(node.address); chain != chains_.end()) chain->second.tail = rest;
  }
  node.next = rest;
}

void BlockLayout::merge_with_next(std::uint32_t index) {
  Node& node = nodes_[index];
  const std::uint32_t gone = node.next;
  node.size += nodes_[gone].size;
  node.next = nodes_[gone].next;
  if (node.next != kNone) {
    nodes_[node.next].prev = index;
  } else if (node.expandable) {
    if (const auto chain = chain_of(node.address); chain != chains_.end()) chain->second.tail = index;
  }
  drop_node(gone);
}

BlockLayout::Outcome BlockLayout::allocate(std::uint64_t address, std::uint64_t requested, std::uint32_t event,
                                           std::uint64_t exact) {
  Outcome outcome;
  const std::uint64_t rounded = exact != 0 ? exact : settings_.round(requested);
  std::uint32_t node = by_address_.find(address);
  if (node != kNone && nodes_[node].state != State::Free) {
    outcome.violation = "a block was allocated where another one was in use";
    // The older one was freed unseen.
    if (nodes_[node].state == State::Used) {
      nodes_[node].state = State::Pending;
      allocated_ -= nodes_[node].size;
      pending_ += nodes_[node].size;
      lost.push_back(nodes_[node].event);
    }
    const bool floated = nodes_[node].floating;
    complete_free(address);
    node = floated ? kNone : free_node_around(address);
  } else if (node == kNone) {
    node = free_node_around(address);
  }
  if (node != kNone && nodes_[node].address < address) {
    split_at(node, address);
    node = nodes_[node].next;
  }
  if (node == kNone) {
    if (outcome.violation == nullptr) outcome.violation = "a block was allocated outside every known segment";
    node = new_node(address, rounded);
    nodes_[node].floating = true;
  } else if (nodes_[node].size < rounded) {
    if (outcome.violation == nullptr) outcome.violation = "a block was allocated where not enough was free";
  } else {
    const std::uint64_t rest = nodes_[node].size - rounded;
    if (rest > 0 && (exact != 0 || settings_.splits(rounded, rest))) split_at(node, address + rounded);
  }
  Node& block = nodes_[node];
  block.state = State::Used;
  block.requested = requested;
  block.event = event;
  allocated_ += block.size;
  outcome.node = node;
  outcome.bytes = block.size;
  return outcome;
}

BlockLayout::Outcome BlockLayout::request_free(std::uint64_t address) {
  Outcome outcome;
  const std::uint32_t node = by_address_.find(address);
  if (node == kNone || nodes_[node].state != State::Used) {
    outcome.violation = "a block was freed that was not known to be in use";
    return outcome;
  }
  nodes_[node].state = State::Pending;
  allocated_ -= nodes_[node].size;
  pending_ += nodes_[node].size;
  outcome.node = node;
  outcome.bytes = nodes_[node].size;
  outcome.owner = nodes_[node].event;
  return outcome;
}

BlockLayout::Outcome BlockLayout::complete_free(std::uint64_t address) {
  Outcome outcome;
  std::uint32_t node = by_address_.find(address);
  if (node == kNone || nodes_[node].state == State::Free) {
    outcome.violation = "a block was freed that was not known to be in use";
    return outcome;
  }
  outcome.node = node;
  outcome.bytes = nodes_[node].size;
  if (nodes_[node].state == State::Used) outcome.owner = nodes_[node].event;
  (nodes_[node].state == State::Used ? allocated_ : pending_) -= nodes_[node].size;
  nodes_[node].state = State::Free;
  if (nodes_[node].floating) {
    drop_node(node);
    return outcome;
  }
  if (nodes_[node].next != kNone && nodes_[nodes_[node].next].state == State::Free) merge_with_next(node);
  if (nodes_[node].prev != kNone && nodes_[nodes_[node].prev].state == State::Free) merge_with_next(nodes_[node].prev);
  return outcome;
}

std::vector<std::uint32_t> BlockLayout::floating() const {
  std::vector<std::uint32_t> found;
  by_address_.for_each([&](std::uint64_t, std::uint32_t index) {
    if (nodes_[index].floating) found.push_back(index);
  });
  return found;
}

void BlockLayout::check_invariants() const {
  std::uint64_t used = 0, pending = 0, reserved = 0;
  for (const auto& [begin, chain] : chains_) {
    std::uint64_t at = begin;
    std::uint32_t last = kNone;
    for (std::uint32_t i = chain.head; i != kNone; i = nodes_[i].next) {
      const Node& node = nodes_[i];
      if (node.address != at || node.prev != last || node.size == 0 || by_address_.find(at) != i)
        throw std::logic_error("block layout: broken chain");
      if (node.state == State::Used) used += node.size;
      if (node.state == State::Pending) pending += node.size;
      at += node.size;
      last = i;
    }
    if (at != chain.end || (chain.expandable && last != chain.tail))
      throw std::logic_error("block layout: a chain does not end where it should");
    reserved += chain.end - begin;
  }
  for (const std::uint32_t i : floating()) (nodes_[i].state == State::Used ? used : pending) += nodes_[i].size;
  if (used != allocated_ || pending != pending_ || reserved != reserved_)
    throw std::logic_error("block layout: sums do not match");
}

}  // namespace memfit::analysis::detail
