#include "memfit/memory/cpu_allocator.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "memfit/device/process_memory.h"

namespace memfit::memory {
namespace {

constexpr std::uint64_t kMiB = 1 << 20;

CpuAllocator& allocator() { return CpuAllocator::instance(); }

struct Refused {
  std::uint64_t bytes;
};

/// Frees blocks of its own, oldest first, when it is asked for room.
class Pool final : public MemoryPressure {
 public:
  bool make_room(std::uint64_t bytes) override {
    ++calls;
    const Ledger& ledger = allocator().ledger();
    EXPECT_LE(ledger.live, allocator().limit());
    EXPECT_GT(ledger.live + bytes, 0u);
    std::uint64_t freed = 0;
    while (freed < bytes && !blocks.empty()) {
      freed += blocks.front()->requested;
      allocator().give(blocks.front());
      blocks.erase(blocks.begin());
    }
    return freed > 0;
  }
  bool keep_dropped(Block*) noexcept override { return false; }
  [[noreturn]] void refuse(std::uint64_t bytes) override { throw Refused{bytes}; }

  std::vector<Block*> blocks;
  int calls = 0;
};

class CpuAllocatorTest : public testing::Test {
 protected:
  void SetUp() override {
    allocator().set_limit(0);
    allocator().set_pressure(nullptr);
    allocator().trim(0);
    start_ = allocator().ledger().live;
  }
  void TearDown() override {
    allocator().fail_after(0, 0);
    allocator().set_limit(0);
    allocator().set_pressure(nullptr);
    EXPECT_EQ(allocator().ledger().live, start_) << "the test kept something";
    allocator().check_invariants();
  }
  std::uint64_t start_ = 0;
};

TEST_F(CpuAllocatorTest, CountsRequestedBytesExactly) {
  std::mt19937 random(1);
  std::vector<Block*> blocks;
  std::uint64_t live = start_;
  for (int i = 0; i < 2000; ++i) {
    if (blocks.empty() || random() % 3 != 0) {
      const std::uint64_t bytes = 1 + random() % (random() % 10 == 0 ? 3 * kMiB : 5000);
      blocks.push_back(allocator().take(bytes));
      live += bytes;
      std::memset(blocks.back()->data(), 1, std::min<std::uint64_t>(bytes, 64));
    } else {
      std::swap(blocks[random() % blocks.size()], blocks.back());
      live -= blocks.back()->requested;
      allocator().give(blocks.back());
      blocks.pop_back();
    }
    ASSERT_EQ(allocator().ledger().live, live);
    ASSERT_GE(allocator().ledger().peak_live, live);
    if (i % 50 == 0) allocator().check_invariants();
  }
  for (Block* b : blocks) allocator().give(b);
}

TEST_F(CpuAllocatorTest, NeverHoldsAByteMoreThanTheLimit) {
  Pool pool;
  allocator().set_pressure(&pool);
  std::mt19937 random(2);
  const std::uint64_t limit = start_ + 8 * kMiB + 13;
  allocator().set_limit(limit);
  int refusals = 0;
  for (int i = 0; i < 4000; ++i) {
    const unsigned what = random() % 8;
    if (what < 5 || pool.blocks.empty()) {
      const std::uint64_t bytes = 1 + random() % (random() % 6 == 0 ? 9 * kMiB : 100000);
      try {
        pool.blocks.push_back(allocator().take(bytes));
        ASSERT_EQ(pool.blocks.back()->requested, bytes);
      } catch (const Refused& refused) {
        ASSERT_EQ(refused.bytes, bytes);
        ASSERT_GT(start_ + bytes, limit) << "something that fits was refused";
        ++refusals;
      }
    } else {
      std::swap(pool.blocks[random() % pool.blocks.size()], pool.blocks.back());
      allocator().give(pool.blocks.back());
      pool.blocks.pop_back();
    }
    const Ledger& ledger = allocator().ledger();
    ASSERT_LE(ledger.live + ledger.cached, limit);
    if (i % 100 == 0) allocator().check_invariants();
  }
  EXPECT_GT(pool.calls, 100);
  EXPECT_GT(refusals, 10);
  for (Block* b : pool.blocks) allocator().give(b);
}

TEST_F(CpuAllocatorTest, TheLimitItselfFitsAndOneByteMoreDoesNot) {
  Pool pool;
  allocator().set_pressure(&pool);
  allocator().set_limit(start_ + kMiB);
  Block* exact = allocator().take(kMiB);
  EXPECT_THROW(allocator().take(1), Refused);
  EXPECT_EQ(allocator().ledger().live, start_ + kMiB) << "a refused request must leave the ledger as it was";
  allocator().give(exact);
  EXPECT_THROW(allocator().take(start_ + kMiB + 1), Refused);
  EXPECT_EQ(pool.calls, 1) << "what can never fit is no reason to free anything";
}

TEST_F(CpuAllocatorTest, RefusesBeforeAnyMemoryIsTaken) {
  allocator().set_limit(start_ + 32 * kMiB);
  const std::uint64_t cold = allocator().ledger().served_cold;
  EXPECT_THROW(allocator().take(33 * kMiB), std::bad_alloc);
  EXPECT_EQ(allocator().ledger().served_cold, cold);
  EXPECT_THROW(allocator().allocate(std::size_t{1} << 48), std::bad_alloc);
}

TEST_F(CpuAllocatorTest, ReusesABlockForTheSameSize) {
  for (const std::uint64_t bytes : {std::uint64_t{1000}, 3 * kMiB}) {
    Block* first = allocator().take(bytes);
    std::memset(first->data(), 1, bytes);
    allocator().give(first);
    EXPECT_GE(allocator().ledger().cached, bytes);
    const std::uint64_t cold = allocator().ledger().served_cold;
    Block* second = allocator().take(bytes);
    EXPECT_EQ(second, first);
    EXPECT_EQ(allocator().ledger().served_cold, cold);
    allocator().give(second);
  }
}

TEST_F(CpuAllocatorTest, TrimGivesResidentMemoryBack) {
  constexpr std::uint64_t kBytes = 128 * kMiB;
  Block* block = allocator().take(kBytes);
  std::memset(block->data(), 1, kBytes);
  const std::uint64_t full = device::resident_memory().count();
  allocator().give(block);
  const std::uint64_t cached = allocator().ledger().cached;
  EXPECT_GE(cached, kBytes);
  EXPECT_EQ(allocator().trim(0), cached);
  EXPECT_EQ(allocator().ledger().cached, 0u);
  EXPECT_LT(device::resident_memory().count() + kBytes * 9 / 10, full);
}

TEST_F(CpuAllocatorTest, ALimitThatBindsGivesWarmBlocksBack) {
  Block* block = allocator().take(64 * kMiB);
  allocator().give(block);
  allocator().set_limit(start_ + 65 * kMiB);
  Block* other = allocator().take(40 * kMiB);
  EXPECT_LE(allocator().ledger().live + allocator().ledger().cached, start_ + 65 * kMiB);
  allocator().give(other);
}

TEST_F(CpuAllocatorTest, EveryBlockIsAlignedTo64Bytes) {
  std::vector<Block*> blocks;
  for (std::uint64_t bytes = 1; bytes < 4 * kMiB; bytes += 1 + bytes / 3) {
    blocks.push_back(allocator().take(bytes));
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(blocks.back()->data()) % 64, 0u) << bytes;
  }
  for (Block* b : blocks) allocator().give(b);
}

TEST_F(CpuAllocatorTest, ZeroBytesNeedNoMemory) {
  const std::uint64_t allocations = allocator().ledger().allocations;
  {
    const c10::DataPtr nothing = allocator().allocate(0);
    EXPECT_EQ(nothing.get(), nullptr);
    EXPECT_EQ(nothing.device(), c10::Device(c10::kCPU));
  }
  EXPECT_EQ(allocator().ledger().allocations, allocations);
  CpuAllocator::delete_block(nullptr);
}

TEST_F(CpuAllocatorTest, RawPointersComeAndGo) {
  for (const std::size_t bytes : {std::size_t{24}, std::size_t{2 * kMiB}}) {
    void* raw = allocator().raw_allocate(bytes);
    ASSERT_NE(raw, nullptr);
    std::memset(raw, 3, bytes);
    EXPECT_EQ(allocator().ledger().live, start_ + bytes);
    allocator().raw_deallocate(raw);
    EXPECT_EQ(allocator().ledger().live, start_);
  }
}

TEST_F(CpuAllocatorTest, AdoptedMemoryCountsUntilItIsDisowned) {
  const Ledger before = allocator().ledger();
  allocator().adopt(5 * kMiB);
  EXPECT_EQ(allocator().ledger().live, before.live + 5 * kMiB);
  EXPECT_EQ(allocator().ledger().program, before.program + 5 * kMiB);
  allocator().set_limit(before.live + 6 * kMiB);
  EXPECT_THROW(allocator().take(2 * kMiB), std::bad_alloc);
  EXPECT_THROW(allocator().adopt(kMiB + 1), std::bad_alloc);
  EXPECT_EQ(allocator().ledger().live, before.live + 5 * kMiB);
  allocator().disown(5 * kMiB);
  EXPECT_EQ(allocator().ledger().program, before.program);
  Block* block = allocator().take(2 * kMiB);
  allocator().give(block);
}

TEST_F(CpuAllocatorTest, NamesTheLargestHoldersAtThePeak) {
  const std::uint64_t bytes = allocator().ledger().peak + 8 * kMiB;   // never touched, so it costs addresses only
  const char* old = set_current_op("test::largest");
  c10::DataPtr large = allocator().allocate(bytes);
  set_current_op("test::second");
  c10::DataPtr second = allocator().allocate(bytes / 2);
  set_current_op(old);
  large.clear();
  const auto holders = allocator().holders_at_peak();
  ASSERT_GE(holders.size(), 2u);
  EXPECT_EQ(holders[0].op, "test::largest");
  EXPECT_EQ(holders[0].bytes, bytes);
  EXPECT_EQ(holders[1].op, "test::second");
}

TEST_F(CpuAllocatorTest, ThreadsMayFreeWhatOthersAllocated) {
  constexpr int kThreads = 4;
  std::mutex mutex;
  std::vector<Block*> shared;
  std::atomic<int> spoiled{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      for (int i = 0; i < 2000; ++i) {
        const std::uint64_t bytes = 8 + random() % (i % 20 == 0 ? 500000 : 3000);
        Block* mine = allocator().take(bytes);
        std::memset(mine->data(), static_cast<int>(bytes & 255), bytes);
        Block* other = nullptr;
        {
          std::lock_guard lock(mutex);
          shared.push_back(mine);
          if (shared.size() > 50) {
            std::swap(shared[random() % shared.size()], shared.back());
            other = shared.back();
            shared.pop_back();
          }
        }
        if (other == nullptr) continue;
        const auto* p = static_cast<const unsigned char*>(other->data());
        if (p[0] != (other->requested & 255) || p[other->requested - 1] != (other->requested & 255)) ++spoiled;
        CpuAllocator::delete_block(other->data());
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(spoiled, 0);
  std::uint64_t live = start_;
  for (const Block* b : shared) live += b->requested;
  EXPECT_EQ(allocator().ledger().live, live);
  for (Block* b : shared) allocator().give(b);
}

TEST_F(CpuAllocatorTest, AForkedChildAllocatesAndFreesWhileThreadsOfTheParentDid) {
  allocator().install();
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      while (!stop) {
        for (int i = 0; i < 50; ++i) c10::DataPtr dropped = allocator().allocate(1000 + 20000 * (i % 8));
        std::this_thread::yield();
      }
    });
  }
  c10::DataPtr before = allocator().allocate(2 * kMiB);
  allocator().set_limit(allocator().ledger().live + 512 * kMiB);
  for (int round = 0; round < 20; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);   // a lock that nobody can give back would hang it
      try {
        Block* block = allocator().take(3 * kMiB);
        std::memset(block->data(), 5, 3 * kMiB);
        allocator().give(block);
        before.clear();
        allocator().check_invariants();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "in the child: %s\n", error.what());
        _exit(2);
      }
      _exit(allocator().limit() == 0 ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "round " << round << ", status " << status;
  }
  stop = true;
  for (auto& t : threads) t.join();
}

TEST_F(CpuAllocatorTest, TensorsOfTorchAreCountedOnceItIsInstalled) {
  allocator().install();
  const Ledger before = allocator().ledger();
  {
    at::Tensor t = at::empty({256, 1024}, at::kFloat);
    EXPECT_EQ(t.storage().allocator(), &allocator());
    EXPECT_EQ(allocator().ledger().live, before.live + kMiB);
    at::Tensor copy = t.clone();
    EXPECT_EQ(allocator().ledger().live, before.live + 2 * kMiB);
    copy.resize_({512, 1024});
    EXPECT_EQ(allocator().ledger().live, before.live + 3 * kMiB);
  }
  EXPECT_EQ(allocator().ledger().live, before.live);
}

TEST_F(CpuAllocatorTest, FailsJustTheRequestThatATestAskedToFail) {
  const std::uint64_t failures = allocator().injected_failures();
  allocator().fail_after(2, 2);
  Block* first = allocator().take(100);
  Block* second = allocator().take(kMiB);
  EXPECT_THROW(allocator().take(100), std::bad_alloc);
  EXPECT_THROW(allocator().take(100), std::bad_alloc);
  Block* third = allocator().take(100);
  EXPECT_EQ(allocator().injected_failures(), failures + 2);
  for (Block* b : {first, second, third}) allocator().give(b);
}

}  // namespace
}  // namespace memfit::memory
