#include "memfit/preload/machine_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "memfit/core/error.h"

namespace memfit::preload {
namespace {

namespace fs = std::filesystem;
using namespace memfit::literals;

/// A machine of files: /proc and /sys under a folder of the test's own.
class MachineMemory : public testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::path(testing::TempDir()) / ("memfit_machine_" + std::to_string(::getpid()));
    file("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:   1 kB\n");
  }
  void TearDown() override { fs::remove_all(root_); }
  void file(const std::string& path, const std::string& text) {
    fs::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  Bytes whole() const { return machine_memory(root_.string()); }
  fs::path root_;
};

TEST_F(MachineMemory, IsTheMachinesWithoutACgroup) { EXPECT_EQ(whole(), 16_GiB); }

TEST_F(MachineMemory, IsTheSmallestOfTheCgroupAndThoseAboveIt) {
  file("proc/self/cgroup", "0::/a/b/c\n");
  file("sys/fs/cgroup/a/b/c/memory.max", "max\n");
  EXPECT_EQ(whole(), 16_GiB);
  file("sys/fs/cgroup/a/memory.max", "1073741824\n");
  EXPECT_EQ(whole(), 1_GiB);
  file("sys/fs/cgroup/a/b/memory.max", "2147483648\n");
  EXPECT_EQ(whole(), 1_GiB);
  file("sys/fs/cgroup/memory.max", "536870912\n");
  EXPECT_EQ(whole(), 512_MiB);
}

TEST_F(MachineMemory, KnowsTheFirstVersionOfCgroupsToo) {
  file("proc/self/cgroup", "5:cpu,memory:/job\n4:devices:/x\n");
  file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "1073741824\n");
  EXPECT_EQ(whole(), 1_GiB);
  file("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(whole(), 16_GiB);
}

TEST_F(MachineMemory, OddLinesAreNotBelieved) {
  file("proc/self/cgroup", "nonsense\n0:\n0::relative\n0::/a\n");
  file("sys/fs/cgroup/a/memory.max", "lots\n");
  EXPECT_EQ(whole(), 16_GiB);
}

TEST_F(MachineMemory, ThatIsNotSaidIsAnError) {
  file("proc/meminfo", "MemFree: 1 kB\n");
  EXPECT_THROW(whole(), Error);
}

TEST(MachineMemoryHere, IsMoreThanThisTestNeeds) { EXPECT_GT(machine_memory(), 16_MiB); }

}  // namespace
}  // namespace memfit::preload
