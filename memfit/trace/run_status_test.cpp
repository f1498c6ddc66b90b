#include "memfit/trace/run_status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "memfit/core/error.h"

namespace memfit::trace {
namespace {

namespace fs = std::filesystem;
using testing::HasSubstr;

class RunStatusFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = (fs::path(testing::TempDir()) / ("memfit_status_" + std::to_string(::getpid()))).string();
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path() const { return folder_ + "/" + std::to_string(::getpid()) + ".status"; }

  /// A good page's bytes with `change` made to them, written to a file of its own.
  template <typename Change>
  std::string refusal(Change change) {
    create_run_status(folder_);
    std::ifstream in(path(), std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    change(bytes);
    const std::string bad = folder_ + "/bad.status";
    std::ofstream(bad, std::ios::binary) << bytes;
    try {
      open_run_status(bad);
    } catch (const BadInput& error) {
      return error.what();
    }
    return "accepted";
  }

  std::string folder_;
};

TEST_F(RunStatusFile, ComesBackAsItWasWritten) {
  RunStatus* page = create_run_status(folder_);
  ASSERT_NE(page, nullptr);
  page->rank = 3;
  page->peak_bytes = 123;
  set_text(page->torch_version, "2.13.0");
  page->largest_holders[1].bytes = 9;
  set_text(page->largest_holders[1].op, "aten::mm");
  const auto copy = open_run_status(path());
  EXPECT_EQ(copy->pid, static_cast<std::uint64_t>(::getpid()));
  EXPECT_EQ(copy->rank, 3);
  EXPECT_EQ(copy->peak_bytes.load(), 123U);
  EXPECT_STREQ(copy->torch_version, "2.13.0");
  EXPECT_STREQ(copy->largest_holders[1].op, "aten::mm");
  EXPECT_EQ(copy->evictions.load(), 0U);
}

TEST_F(RunStatusFile, IsPrivate) {
  create_run_status(folder_);
  struct stat info {};
  ASSERT_EQ(::stat(path().c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600U);
}

TEST_F(RunStatusFile, SurvivesTheProcessThatIsKilled) {
  const pid_t child = ::fork();
  if (child == 0) {
    create_run_status(folder_)->evictions = 77;
    ::raise(SIGKILL);
  }
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(open_run_status(folder_ + "/" + std::to_string(child) + ".status")->evictions.load(), 77U);
}

TEST_F(RunStatusFile, OfAnEarlierImageOfTheProcessIsReplaced) {
  create_run_status(folder_)->ops = 5;
  ASSERT_NE(create_run_status(folder_), nullptr);
  EXPECT_EQ(open_run_status(path())->ops.load(), 0U);
}

TEST_F(RunStatusFile, CannotBeMadeWhereThereIsNoFolder) {
  EXPECT_EQ(create_run_status(folder_ + "/none"), nullptr);
  EXPECT_EQ(errno, ENOENT);
}

TEST_F(RunStatusFile, WithoutAFolderIsAPageOfMemory) {
  RunStatus* page = create_run_status("");
  ASSERT_NE(page, nullptr);
  EXPECT_EQ(page->rank, -1);
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(RunStatusFile, OfAnotherSizeMagicOrVersionIsRefused) {
  EXPECT_THAT(refusal([](std::string& bytes) { bytes.pop_back(); }), HasSubstr("ends here"));
  EXPECT_THAT(refusal([](std::string& bytes) { bytes.clear(); }), HasSubstr("at byte 0: ends here"));
  EXPECT_THAT(refusal([](std::string& bytes) { bytes += 'x'; }), HasSubstr("ends here"));
  EXPECT_THAT(refusal([](std::string& bytes) { bytes[0] ^= 1; }), HasSubstr("at byte 0: is not a memfit status page"));
  EXPECT_THAT(refusal([](std::string& bytes) { bytes[8] ^= 1; }), HasSubstr("at byte 8: has version"));
}

TEST_F(RunStatusFile, WithATextThatDoesNotEndIsRefused) {
  const auto fill = [](std::size_t offset, std::size_t size) {
    return [=](std::string& bytes) { bytes.replace(offset, size, size, 'x'); };
  };
  EXPECT_THAT(refusal(fill(offsetof(RunStatus, device), 32)), HasSubstr("the text \"device\" does not end"));
  EXPECT_THAT(refusal(fill(offsetof(RunStatus, message), 4096)), HasSubstr("the text \"message\" does not end"));
  EXPECT_THAT(refusal(fill(sizeof(RunStatus) - 4096 - 64, 64)), HasSubstr("the text \"shape\" does not end"));
}

TEST_F(RunStatusFile, ThatIsALinkAFifoOrAFolderIsRefused) {
  create_run_status(folder_);
  const std::string link = folder_ + "/link.status";
  fs::create_symlink(path(), link);
  EXPECT_THROW(open_run_status(link), BadInput);
  const std::string fifo = folder_ + "/fifo.status";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_THROW(open_run_status(fifo), BadInput);
  EXPECT_THROW(open_run_status(folder_), BadInput);
  EXPECT_THROW(open_run_status(folder_ + "/none"), BadInput);
}

TEST(RunStatusText, IsCutWhereItDoesNotFitAndNeverInsideACharacter) {
  char text[4];
  set_text(text, "ab");
  EXPECT_STREQ(text, "ab");
  set_text(text, "abcdef");
  EXPECT_STREQ(text, "abc");
  set_text(text, "ab\u00e9");  // two bytes, of which one would fit
  EXPECT_STREQ(text, "ab");
}

}  // namespace
}  // namespace memfit::trace
