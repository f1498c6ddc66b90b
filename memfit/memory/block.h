// A piece of memory that one storage owns: a header of 64 bytes in front of the data.
// Not here: what the content means (engine/value.h). Threads: under the allocator's lock.
#pragma once

#include <cstddef>
#include <cstdint>

namespace memfit::memory {

struct alignas(64) Block {
  static constexpr std::uint32_t kMagic = 0x4d465442;
  enum Flag : std::uint32_t {
    kLarge = 1,       // pages of the pool; otherwise from the heap
    kReplay = 2,      // allocated by the engine for itself, not by the program
  };

  std::uint64_t requested;   // bytes asked for
  std::uint64_t capacity;    // bytes of the pages or heap piece, header included
  std::uint64_t birth;       // serial number of the allocation
  void* value;               // engine's Value, or nullptr
  const char* op;            // name of the op that asked, "" outside ops; interned, never freed
  Block* prev;               // list of live blocks, or of cached ones
  Block* next;
  std::uint32_t magic;
  std::uint32_t flags;

  void* data() { return reinterpret_cast<char*>(this) + sizeof(Block); }
  std::uint64_t payload() const { return capacity - sizeof(Block); }
  static Block* of(void* data) { return reinterpret_cast<Block*>(static_cast<char*>(data) - sizeof(Block)); }
};
static_assert(sizeof(Block) == 64);

}  // namespace memfit::memory
