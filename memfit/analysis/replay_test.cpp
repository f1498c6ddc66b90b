#include "memfit/analysis/replay.h"

#include <gtest/gtest.h>

#include <random>

#include "memfit/analysis/caching_allocator.h"
#include "memfit/analysis/detail/block_layout.h"

namespace memfit::analysis {
namespace {

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

TEST(AllocatorSettings, RoundsToBlocksAndToDivisionsOfPowersOfTwo) {
  AllocatorSettings s;
  EXPECT_EQ(s.round(1), 512u);
  EXPECT_EQ(s.round(512), 512u);
  EXPECT_EQ(s.round(513), 1024u);
  s.roundup_power2_divisions.fill(4);
  EXPECT_EQ(s.round(1200 * kMiB), 1280 * kMiB);
  EXPECT_EQ(s.round(1024 * kMiB), 1024 * kMiB);
  EXPECT_EQ(s.round(1000), 1024u);  // too small for divisions
}

TEST(AllocatorSettings, ReadsTheTextThatItWrites) {
  AllocatorSettings s;
  ASSERT_TRUE(apply_conf(
      "expandable_segments:True, "
      "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,1024:4,>:8],garbage_collection_threshold:0.6",
      s));
  EXPECT_TRUE(s.expandable_segments);
  EXPECT_EQ(s.max_split_size, 128 * kMiB);
  EXPECT_EQ(s.roundup_power2_divisions[8], 1u);
  EXPECT_EQ(s.roundup_power2_divisions[0], 1u);
  EXPECT_EQ(s.roundup_power2_divisions[9], 2u);
  EXPECT_EQ(s.roundup_power2_divisions[15], 8u);
  AllocatorSettings again;
  ASSERT_TRUE(apply_conf(conf_text(s), again));
  EXPECT_EQ(again, s);
  EXPECT_FALSE(apply_conf("max_split_size_mb:many", again));
}

TEST(CachingAllocator, SplitsLargeBlocksOnlyWhenMoreThanAMebibyteRemains) {
  SizedDevice device(SizedDevice::kUnlimited);
  CachingAllocator a({}, device);
  auto* whole = a.allocate(30 * kMiB, 0, 0);
  a.complete_free(whole);
  auto* most = a.allocate(29 * kMiB, 0, 0);
  EXPECT_EQ(most->size, 30 * kMiB);  // exactly one mebibyte would remain
  a.complete_free(most);
  EXPECT_EQ(a.allocate(28 * kMiB, 0, 0)->size, 28 * kMiB);
  EXPECT_EQ(a.reserved(), 30 * kMiB);
}

TEST(CachingAllocator, StreamsDoNotShareCachedBlocks) {
  SizedDevice device(SizedDevice::kUnlimited);
  CachingAllocator a({}, device);
  a.complete_free(a.allocate(30 * kMiB, 0, 0));
  a.allocate(30 * kMiB, 1, 0);
  EXPECT_EQ(a.reserved(), 60 * kMiB);
}

TEST(CachingAllocator, GivesCachedSegmentsBackBeforeItFails) {
  SizedDevice device(100 * kMiB);
  CachingAllocator a({}, device);
  a.complete_free(a.allocate(60 * kMiB, 0, 0));
  EXPECT_NE(a.allocate(80 * kMiB, 0, 0), nullptr);
  EXPECT_EQ(a.reserved(), 80 * kMiB);
  EXPECT_EQ(a.allocate(40 * kMiB, 0, 0), nullptr);
}

TEST(CachingAllocator, KeepsItsInvariantsUnderAnyOrderOfRequests) {
  for (const std::uint64_t seed : {1u, 2u, 3u, 4u}) {
    std::mt19937_64 random(seed);
    AllocatorSettings settings;
    settings.expandable_segments = seed % 2 == 0;
    if (seed == 3) settings.max_split_size = 32 * kMiB;
    SizedDevice device(600 * kMiB);
    CachingAllocator a(settings, device);
    std::vector<CachingAllocator::Block*> live;
    for (int i = 0; i < 4000; ++i) {
      if (!live.empty() && random() % 2 == 0) {
        const std::size_t k = random() % live.size();
        if (random() % 4 == 0) a.request_free(live[k]);
        a.complete_free(live[k]);
        live.erase(live.begin() + static_cast<long>(k));
      } else if (auto* block =
                     a.allocate(std::uint64_t{1} << (8 + random() % 18), static_cast<std::uint16_t>(random() % 2), 0)) {
        live.push_back(block);
      }
      if (random() % 200 == 0) a.empty_cache();
      if (i % 100 == 0) a.check_invariants();  // throws
    }
    for (auto* block : live) a.complete_free(block);
    a.empty_cache();
    a.check_invariants();
    EXPECT_EQ(a.reserved(), 0u);
    EXPECT_EQ(device.used(), 0u);
  }
}

TEST(BlockLayout, FollowsAddressesAndMergesNeighbours) {
  detail::BlockLayout layout{AllocatorSettings{}};
  layout.add_segment(0x1000000, 20 * kMiB, 0, 0, false, true);
  EXPECT_EQ(layout.allocate(0x1000000, 5 * kMiB, 0).bytes, 5 * kMiB);
  EXPECT_EQ(layout.allocate(0x1000000 + 5 * kMiB, 15 * kMiB - 100, 1).bytes, 15 * kMiB);
  EXPECT_EQ(layout.allocated(), 20 * kMiB);
  layout.request_free(0x1000000);
  EXPECT_EQ(layout.allocated(), 15 * kMiB);
  EXPECT_EQ(layout.pending(), 5 * kMiB);
  layout.complete_free(0x1000000);
  layout.complete_free(0x1000000 + 5 * kMiB);
  layout.check_invariants();
  EXPECT_EQ(layout.allocate(0x1000000, 20 * kMiB, 2).violation, nullptr);
}

TEST(BlockLayout, NamesWhatCannotBe) {
  detail::BlockLayout layout{AllocatorSettings{}};
  EXPECT_NE(layout.allocate(4096, 512, 0).violation, nullptr);  // outside every segment
  EXPECT_NE(layout.request_free(99).violation, nullptr);        // never allocated
  EXPECT_NE(layout.remove_segment(1, 2).violation, nullptr);    // never there
  layout.add_segment(1 << 20, 2 * kMiB, 0, 0, false, false);
  layout.allocate(1 << 20, 512, 1);
  EXPECT_NE(layout.allocate(1 << 20, 512, 2).violation, nullptr);          // twice
  EXPECT_NE(layout.remove_segment(1 << 20, 2 * kMiB).violation, nullptr);  // in use
  layout.check_invariants();
}

}  // namespace
}  // namespace memfit::analysis
