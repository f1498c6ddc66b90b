#include "memfit/core/duration.h"

#include <gtest/gtest.h>

namespace memfit {
namespace {

using namespace std::chrono_literals;

TEST(Duration, TextShowsTheLargestUnitWithADigitBeforeThePoint) {
  EXPECT_EQ(format_duration(0ns), "0 s");
  EXPECT_EQ(format_duration(412ns), "412 ns");
  EXPECT_EQ(format_duration(3100ns), "3.1 µs");
  EXPECT_EQ(format_duration(12500us), "12.5 ms");
  EXPECT_EQ(format_duration(2350ms), "2.35 s");
  EXPECT_EQ(format_duration(187s), "3 min 07 s");
  EXPECT_EQ(format_duration(2h + 5min), "2 h 05 min");
}

TEST(Duration, RoundingNeverShowsAThousandOfAUnit) {
  EXPECT_EQ(format_duration(999'960ns), "1.0 ms");
  EXPECT_EQ(format_duration(999'960us), "1.00 s");
  EXPECT_EQ(format_duration(59'999ms), "1 min 00 s");
  EXPECT_EQ(format_duration(59min + 59s + 700ms), "1 h 00 min");
}

TEST(Duration, NegativeTimesKeepTheirSign) {
  EXPECT_EQ(format_duration(-12500us), "-12.5 ms");
  EXPECT_EQ(format_duration(std::chrono::nanoseconds::min()).front(), '-');
}

}  // namespace
}  // namespace memfit
