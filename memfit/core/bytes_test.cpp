#include "memfit/core/bytes.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memfit/core/error.h"

namespace memfit {
namespace {

using namespace memfit::literals;
using testing::HasSubstr;

std::string refusal(const std::string& text, std::optional<Bytes> whole = std::nullopt) {
  try {
    parse_size(text, "--memory", whole);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

TEST(Bytes, SubtractionStopsAtZero) {
  EXPECT_EQ(1_KiB - 2_KiB, 0_B);
  EXPECT_EQ(2_KiB - 1_KiB, 1024_B);
}

TEST(Bytes, EveryUnitIsAPowerOf1024) {
  EXPECT_EQ(parse_size("123456B", "--memory"), 123456_B);
  EXPECT_EQ(parse_size("3KiB", "--memory"), 3072_B);
  EXPECT_EQ(parse_size("150MiB", "--memory"), 150_MiB);
  EXPECT_EQ(parse_size("0.5GiB", "--memory"), 512_MiB);
  EXPECT_EQ(parse_size("1TiB", "--memory"), 1024_GiB);
}

TEST(Bytes, APercentageIsOfTheWhole) {
  EXPECT_EQ(parse_size("80%", "--memory", 10_GiB), 8_GiB);
  EXPECT_THAT(refusal("101%", 10_GiB), HasSubstr("more than the whole"));
  EXPECT_THAT(refusal("80%"), HasSubstr("unit \"%\""));
}

TEST(Bytes, ARefusalNamesTheFlagTheValueAndAGoodExample) {
  for (const char* text : {"512", "", "MiB", "-1MiB", "1mb", "1 MiB", "nanMiB", "infMiB", "1e3MiB", "0x10MiB",
                           "9999999999GiB", "12MiBx", "-0B"}) {
    const std::string message = refusal(text);
    EXPECT_THAT(message, HasSubstr("--memory")) << text;
    EXPECT_THAT(message, HasSubstr("\"" + std::string(text) + "\"")) << text;
    EXPECT_THAT(message, HasSubstr("--memory 512MiB")) << text;
  }
}

TEST(Bytes, TextShowsTheLargestUnitThatFits) {
  EXPECT_EQ(format_bytes(0_B), "0 B");
  EXPECT_EQ(format_bytes(1023_B), "1023 B");
  EXPECT_EQ(format_bytes(1536_B), "1.5 KiB");
  EXPECT_EQ(format_bytes(150_MiB), "150.0 MiB");
  EXPECT_EQ(format_bytes(2_GiB), "2.00 GiB");
}

}  // namespace
}  // namespace memfit
