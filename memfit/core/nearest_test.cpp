#include "memfit/core/nearest.h"

#include <gtest/gtest.h>

namespace memfit {
namespace {

const std::vector<std::string> kLosses{"cross_entropy", "mse", "l1", "huber"};

TEST(NearestWord, IsTheOneWithTheFewestEdits) {
  EXPECT_EQ(nearest_word("crossentropy", kLosses), "cross_entropy");
  EXPECT_EQ(nearest_word("hubre", kLosses), "huber");
  EXPECT_EQ(nearest_word("mae", kLosses), "mse");
}

TEST(NearestWord, MayBeABeginning) { EXPECT_EQ(nearest_word("cross", kLosses), "cross_entropy"); }

TEST(NearestWord, IsNoneWhereNothingIsNear) {
  EXPECT_EQ(nearest_word("perplexity", kLosses), "");
  EXPECT_EQ(nearest_word("", kLosses), "");
  EXPECT_EQ(nearest_word("x", {}), "");
}

TEST(KnownWords, NamesTheNearestAndAll) {
  EXPECT_EQ(known_words("ms", kLosses), "Did you mean mse? Known: cross_entropy, mse, l1, huber.");
  EXPECT_EQ(known_words("perplexity", kLosses), "Known: cross_entropy, mse, l1, huber.");
}

}  // namespace
}  // namespace memfit
