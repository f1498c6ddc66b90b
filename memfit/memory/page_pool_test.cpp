#include "memfit/memory/page_pool.h"

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <vector>

#include "memfit/device/address_space.h"
#include "memfit/testing/fake_device.h"

namespace memfit::memory {
namespace {

std::uint64_t page() { return device::page_bytes(); }

/// Pages of [address, address + bytes) that are in memory, as the system says.
std::uint64_t resident_pages(void* address, std::uint64_t bytes) {
  std::vector<unsigned char> in_core(bytes / page());
  EXPECT_EQ(mincore(address, bytes, in_core.data()), 0);
  return static_cast<std::uint64_t>(std::count_if(in_core.begin(), in_core.end(), [](unsigned char c) { return (c & 1) != 0; }));
}

void fill(void* address, std::uint64_t bytes, unsigned char with) { std::memset(address, with, bytes); }

bool is_filled(const void* address, std::uint64_t bytes, unsigned char with) {
  const auto* p = static_cast<const unsigned char*>(address);
  return p[0] == with && std::memcmp(p, p + 1, bytes - 1) == 0;
}

// The model is the list of pieces taken and what each was filled with.
TEST(PagePool, KeepsPiecesApartThroughAnyOrderOfTakingGivingAndDiscarding) {
  struct Taken {
    char* address;
    std::uint64_t bytes;
    unsigned char content;
  };
  testing::FakeDevice roomy(std::uint64_t{256} << 20), small(std::uint64_t{20} << 20);
  for (device::Device* device : {&device::host(), static_cast<device::Device*>(&roomy), static_cast<device::Device*>(&small)}) {
    const unsigned seed = 1 + (device == &roomy) + 2 * (device == &small);
    PagePool pool(*device);
    std::mt19937 random(seed);
    std::vector<Taken> taken;
    std::uint64_t held = 0;
    std::uint64_t touched = 0;   // bytes that have been handed out at least once are at most this many
    for (int step = 0; step < 800; ++step) {
      const unsigned what = random() % 10;
      if (what < 5 && held < (std::uint64_t{48} << 20)) {
        const std::uint64_t bytes = page() * (1 + random() % (random() % 8 == 0 ? 600 : 40));
        auto* address = static_cast<char*>(pool.take(bytes));
        if (device == &small && address == nullptr) {
          pool.discard(pool.warm());
          address = static_cast<char*>(pool.take(bytes));
          if (address == nullptr) {
            ASSERT_GT(held + bytes, std::uint64_t{20} << 20) << "nothing is warm, and the device has enough";
            ASSERT_EQ(small.committed(), held);
            continue;
          }
        }
        ASSERT_NE(address, nullptr);
        for (const Taken& t : taken) ASSERT_TRUE(address + bytes <= t.address || t.address + t.bytes <= address) << "overlap";
        const auto content = static_cast<unsigned char>(random());
        fill(address, bytes, content);
        taken.push_back({address, bytes, content});
        held += bytes;
        touched = std::max(touched, held + pool.warm());
      } else if (what < 9 && !taken.empty()) {
        const std::size_t i = random() % taken.size();
        ASSERT_TRUE(is_filled(taken[i].address, taken[i].bytes, taken[i].content)) << "somebody else wrote into a piece";
        const std::uint64_t before = pool.warm();
        pool.give(taken[i].address, taken[i].bytes);
        ASSERT_EQ(pool.warm(), before + taken[i].bytes);
        held -= taken[i].bytes;
        taken[i] = taken.back();
        taken.pop_back();
      } else {
        const std::uint64_t before = pool.warm();
        const std::uint64_t wanted = page() * (random() % 300);
        const std::uint64_t given = pool.discard(wanted);
        ASSERT_EQ(given, std::min(before, wanted));
        ASSERT_EQ(pool.warm(), before - given);
      }
      pool.check_invariants();
      if (device == &roomy) {
        ASSERT_EQ(roomy.committed(), held + pool.warm());
      }
      if (device == &small) {
        ASSERT_EQ(small.committed(), held + pool.warm());
      }
    }
    for (const Taken& t : taken) ASSERT_TRUE(is_filled(t.address, t.bytes, t.content)) << "somebody else wrote into a piece";
    EXPECT_GT(touched, 0u);
  }
}

TEST(PagePool, DiscardedPagesLeaveTheProcessAndComeBackAsZeros) {
  PagePool pool(device::host());
  const std::uint64_t bytes = 512 * page();
  auto* address = static_cast<char*>(pool.take(bytes));
  fill(address, bytes, 7);
  EXPECT_EQ(resident_pages(address, bytes), 512u);
  pool.give(address, bytes);
  EXPECT_EQ(resident_pages(address, bytes), 512u) << "a freed piece is to stay warm";
  EXPECT_EQ(pool.discard(128 * page()), 128 * page());
  EXPECT_EQ(resident_pages(address, bytes), 384u);
  EXPECT_EQ(pool.discard(bytes), 384 * page());
  EXPECT_EQ(resident_pages(address, bytes), 0u);
  EXPECT_EQ(pool.warm(), 0u);
  auto* again = static_cast<char*>(pool.take(bytes));
  EXPECT_TRUE(is_filled(again, bytes, 0));
}

TEST(PagePool, FreedNeighboursServeARequestNoneOfThemCouldServeAlone) {
  PagePool pool(device::host());
  std::map<char*, std::uint64_t> pieces;
  for (int i = 0; i < 4; ++i) pieces.emplace(static_cast<char*>(pool.take(16 * page())), 16 * page());
  char* expected = pieces.begin()->first;
  for (const auto& [address, bytes] : pieces) {
    ASSERT_EQ(address, expected) << "the pieces of a fresh pool follow each other";
    expected += bytes;
  }
  const std::uint64_t cold = pool.served_cold();
  // From the outside in, so that joining on both sides is needed.
  auto first = pieces.begin()->first;
  for (const int i : {0, 3, 1, 2}) {
    pool.give(std::next(pieces.begin(), i)->first, 16 * page());
    pool.check_invariants();
  }
  EXPECT_EQ(pool.warm(), 64 * page());
  EXPECT_EQ(pool.take(64 * page()), first);
  EXPECT_EQ(pool.served_cold(), cold) << "warm pages were there";
  EXPECT_EQ(pool.warm(), 0u);
}

TEST(PagePool, ARequestTakesTheSmallestWarmPieceThatFits) {
  PagePool pool(device::host());
  void* large = pool.take(64 * page());
  void* wall = pool.take(page());
  void* small = pool.take(8 * page());
  void* wall2 = pool.take(page());
  pool.give(large, 64 * page());
  pool.give(small, 8 * page());
  EXPECT_EQ(pool.take(8 * page()), small);
  EXPECT_EQ(pool.take(16 * page()), large);
  EXPECT_EQ(pool.warm(), 48 * page());
  pool.give(wall, page());
  pool.give(wall2, page());
  pool.check_invariants();
}

TEST(PagePool, ARequestNoAddressesAreLeftForGetsNothing) {
  PagePool pool(device::host());
  EXPECT_EQ(pool.take(std::uint64_t{1} << 50), nullptr);
  pool.check_invariants();
  EXPECT_NE(pool.take(page()), nullptr) << "a request that failed must not spoil the pool";
}

}  // namespace
}  // namespace memfit::memory
