#include "memfit/core/output_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "memfit/core/error.h"

namespace memfit {
namespace {

namespace fs = std::filesystem;
using testing::AllOf;
using testing::HasSubstr;

class OutputFile : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(testing::TempDir()) / ("memfit_output_" + std::to_string(::getpid()));
    fs::create_directory(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  std::size_t files() const { return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), {})); }
  static std::string content(const std::string& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
  }
  std::string refusal(const std::string& where, Replace replace = Replace::No) const {
    try {
      check_output_file(where, "--report", replace);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }
  fs::path folder_;
};

TEST_F(OutputFile, HoldsTheTextAndLeavesNothingElse) {
  write_output_file(path("a.json"), "one", Replace::No);
  EXPECT_EQ(content(path("a.json")), "one");
  EXPECT_EQ(files(), 1U);
}

TEST_F(OutputFile, IsReplacedOnlyWhenAsked) {
  write_output_file(path("a.json"), "one", Replace::No);
  EXPECT_THROW(write_output_file(path("a.json"), "two", Replace::No), Error);
  EXPECT_EQ(content(path("a.json")), "one");
  write_output_file(path("a.json"), "three", Replace::Yes);
  EXPECT_EQ(content(path("a.json")), "three");
  EXPECT_EQ(files(), 1U);
}

TEST_F(OutputFile, HasThePermissionsOfAnyNewFile) {
  write_output_file(path("a.json"), "one", Replace::No);
  std::ofstream(path("b.json")) << "one";
  EXPECT_EQ(fs::status(path("a.json")).permissions(), fs::status(path("b.json")).permissions());
}

TEST_F(OutputFile, CheckNamesFlagPathReasonAndAnExample) {
  std::ofstream(path("old.json")) << "old";
  const auto shape = AllOf(HasSubstr("--report: \""), HasSubstr("for example --report memfit-run.json"));
  EXPECT_THAT(refusal(path("old.json")), AllOf(shape, HasSubstr("exists already"), HasSubstr("--force")));
  EXPECT_THAT(refusal(path("none/a.json")), AllOf(shape, HasSubstr("No such file")));
  EXPECT_THAT(refusal(folder_.string()), AllOf(shape, HasSubstr("is a folder")));
  EXPECT_THAT(refusal(path("x/")), AllOf(shape, HasSubstr("names a folder")));
  EXPECT_THAT(refusal("/dev/null", Replace::Yes), AllOf(shape, HasSubstr("not a regular file")));
  EXPECT_THAT(refusal(""), AllOf(shape, HasSubstr("is empty")));
}

TEST_F(OutputFile, CheckLeavesNoTrace) {
  EXPECT_EQ(refusal(path("a.json")), "accepted");
  EXPECT_EQ(files(), 0U);
}

}  // namespace
}  // namespace memfit
