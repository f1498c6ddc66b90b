// What stands where in a device's memory while recorded events are played forward: chains of blocks as the allocator
// keeps them, found by address. It follows addresses, not policy: the recorded truth that a replay is compared with.
// Threads: one. Cost: one or two hash lookups an event.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memfit/analysis/allocator_settings.h"
#include "memfit/analysis/detail/address_map.h"

namespace memfit::analysis::detail {

class BlockLayout {
 public:
  static constexpr std::uint32_t kNone = 0xffffffff;
  enum class State : std::uint8_t { Free, Used, Pending };

  struct Node {
    std::uint64_t address = 0;
    std::uint64_t size = 0;
    std::uint64_t requested = 0;
    std::uint32_t prev = kNone;
    std::uint32_t next = kNone;
    std::uint32_t event = kNone;  // that allocated it, or an index the caller gave
    State state = State::Free;
    bool floating = false;    // allocated where no segment is known
    bool expandable = false;  // of its chain
  };
  struct Chain {  // a segment, or a mapped range of an expandable one
    std::uint64_t end = 0;
    std::uint32_t head = kNone;
    std::uint32_t tail = kNone;  // kept for expandable chains only: others never join
    std::uint16_t stream = 0;
    std::uint16_t pool = 0;
    bool expandable = false;
    bool large = true;
  };
  /// What an event did, and what it should not have done ("" = nothing strange).
  struct Outcome {
    std::uint32_t node = kNone;   // allocated or freed
    std::uint64_t bytes = 0;      // its size
    std::uint32_t owner = kNone;  // the freed block's event, when this took it off the allocated bytes
    const char* violation = nullptr;
  };

  explicit BlockLayout(const AllocatorSettings& settings) : settings_(settings) {}

  Outcome add_segment(std::uint64_t address, std::uint64_t size, std::uint16_t stream, std::uint16_t pool,
                      bool expandable, bool large);
  Outcome remove_segment(std::uint64_t address, std::uint64_t size);
  Outcome map(std::uint64_t address, std::uint64_t size, std::uint16_t stream, std::uint16_t pool);
  Outcome unmap(std::uint64_t address, std::uint64_t size);
  /// `exact` = 0: the policy's rounding and splitting decide the block's size; otherwise it is known.
  Outcome allocate(std::uint64_t address, std::uint64_t requested, std::uint32_t event, std::uint64_t exact = 0);
  Outcome request_free(std::uint64_t address);
  Outcome complete_free(std::uint64_t address);

  /// Events of blocks that vanished without a free event (a violation each); the caller clears it.
  std::vector<std::uint32_t> lost;

  std::uint64_t allocated() const { return allocated_; }
  std::uint64_t pending() const { return pending_; }
  std::uint64_t reserved() const { return reserved_; }
  const Node& node(std::uint32_t index) const { return nodes_[index]; }
  const std::map<std::uint64_t, Chain>& chains() const { return chains_; }
  /// Blocks in use outside every known segment.
  std::vector<std::uint32_t> floating() const;
  void check_invariants() const;

 private:
  std::uint32_t new_node(std::uint64_t address, std::uint64_t size);
  void drop_node(std::uint32_t index);
  std::uint32_t free_node_around(std::uint64_t address);
  void split_at(std::uint32_t index, std::uint64_t address);
  void merge_with_next(std::uint32_t index);
  std::map<std::uint64_t, Chain>::iterator chain_of(std::uint64_t address);
  void drop_chain(std::map<std::uint64_t, Chain>::iterator chain, const char** violation);

  AllocatorSettings settings_;
  std::vector<Node> nodes_;
  std::vector<std::uint32_t> free_nodes_;
  AddressMap by_address_;
  std::map<std::uint64_t, Chain> chains_;
  std::uint64_t allocated_ = 0;
  std::uint64_t pending_ = 0;
  std::uint64_t reserved_ = 0;
  std::uint64_t walk_budget_ =
      20'000'000;  // steps of searching for addresses that are no block starts; a hostile file cannot buy more
};

}  // namespace memfit::analysis::detail
