#include "memfit/memory/packing.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

namespace memfit::memory {
namespace {

using Kind = PackForm::Kind;

/// Packs, unpacks, compares. Returns the packed bytes; 0 when it was not packed.
template <class T>
std::uint64_t round_trip(const std::vector<T>& data, bool integer, Kind expected) {
  const std::uint64_t bytes = data.size() * sizeof(T);
  std::uint64_t likely = 0;
  const PackForm form = guess_form(data.data(), bytes, sizeof(T), integer, &likely);
  EXPECT_EQ(form.kind, expected);
  if (form.kind == Kind::None) return 0;
  std::vector<unsigned char> packed(likely + 64, 0xee);
  const auto used = pack(form, data.data(), bytes, packed.data(), likely);
  if (!used) return 0;
  EXPECT_LE(*used, likely);
  for (std::size_t i = likely; i < packed.size(); ++i) EXPECT_EQ(packed[i], 0xee) << "written behind the end";
  std::vector<T> back(data.size(), T(7));
  unpack(form, packed.data(), bytes, back.data());
  EXPECT_EQ(std::memcmp(back.data(), data.data(), bytes), 0);
  return *used;
}

TEST(Packing, DropoutMasksTakeOneBitAnElement) {
  for (const std::size_t n : {64u, 65u, 127u, 1000u, 100003u}) {
    std::vector<float> mask(n);
    std::mt19937 random(1);
    for (float& x : mask) x = random() % 10 == 0 ? 0.0f : 1.0f / 0.9f;
    const std::uint64_t used = round_trip(mask, false, Kind::TwoValued);
    EXPECT_GT(used, 0u);
    EXPECT_LE(used, n / 8 + 32);
  }
}

TEST(Packing, EveryWidthOfTwoValuesComesBack) {
  std::mt19937 random(2);
  std::vector<std::uint8_t> bools(777);
  std::vector<std::uint16_t> halves(777);
  std::vector<double> doubles(777);
  for (std::size_t i = 0; i < bools.size(); ++i) {
    bools[i] = random() & 1;
    halves[i] = (random() & 1) ? 0x3c00 : 0x8000;
    doubles[i] = (random() & 1) ? -0.0 : 2.5;
  }
  EXPECT_GT(round_trip(bools, false, Kind::TwoValued), 0u);
  EXPECT_GT(round_trip(halves, false, Kind::TwoValued), 0u);
  EXPECT_GT(round_trip(doubles, false, Kind::TwoValued), 0u);
}

TEST(Packing, ConstantsAndNansArePatternsLikeOthers) {
  EXPECT_GT(round_trip(std::vector<float>(500, 3.5f), false, Kind::TwoValued), 0u);
  std::vector<float> nans(500, std::nanf("1"));
  nans[100] = std::nanf("2");
  EXPECT_GT(round_trip(nans, false, Kind::TwoValued), 0u);
}

TEST(Packing, AThirdValueBehindTheSampleIsFoundOut) {
  std::vector<float> mask(100000, 1.0f);
  for (std::size_t i = 0; i < mask.size(); i += 2) mask[i] = 0;
  for (const std::size_t at : {std::size_t{99999}, std::size_t{64001}, std::size_t{31}}) {
    std::vector<float> other = mask;
    other[at] = 5;
    std::uint64_t likely = 0;
    const PackForm form = guess_form(other.data(), other.size() * 4, 4, false, &likely);
    if (form.kind != Kind::TwoValued) continue;  // the sample has it
    std::vector<unsigned char> packed(likely);
    EXPECT_FALSE(pack(form, other.data(), other.size() * 4, packed.data(), likely));
  }
}

TEST(Packing, MostlyZeroKeepsMinusZeroAndTheRest) {
  std::mt19937 random(3);
  for (const double zeros : {0.5, 0.8, 0.99}) {
    std::vector<float> relu(50001);
    for (float& x : relu)
      x = std::uniform_real_distribution<>()(random) < zeros ? 0.0f : static_cast<float>(random()) * 1e-9f;
    relu[17] = -0.0f;
    const std::uint64_t used = round_trip(relu, false, Kind::MostlyZero);
    EXPECT_GT(used, 0u) << zeros;
    EXPECT_LT(used, relu.size() * 4 * (1.1 - zeros)) << zeros;
  }
}

TEST(Packing, MostlyZeroThatDoesNotFitIsLeftAlone) {
  std::vector<float> data(10000, 1.5f);
  for (std::size_t i = 0; i < data.size(); i += 2) data[i] = 0;
  std::vector<unsigned char> packed(10000 * 4);
  const PackForm form{Kind::MostlyZero, 4, 0};
  EXPECT_FALSE(pack(form, data.data(), 40000, packed.data(), 15000));
  EXPECT_TRUE(pack(form, data.data(), 40000, packed.data(), 16 + 157 * 8 + 5000 * 4));
  EXPECT_FALSE(pack(form, data.data(), 40000, packed.data(), 16 + 157 * 8 + 5000 * 4 - 1));
}

TEST(Packing, IntegersOfSmallRangeAreNarrowed) {
  std::mt19937 random(4);
  std::vector<std::int64_t> tokens(4097), offsets(4097);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = random() % 50000;
    offsets[i] = -1000000000000 + static_cast<std::int64_t>(random() % 100);
  }
  EXPECT_EQ(round_trip(tokens, true, Kind::Narrow), 16 + 4097 * 4u);
  EXPECT_EQ(round_trip(offsets, true, Kind::Narrow), 16 + 4097u);
}

TEST(Packing, AnIntegerBeyondTheSamplesRangeIsFoundOut) {
  std::vector<std::int64_t> data(10000);
  for (std::size_t i = 0; i < data.size(); ++i) data[i] = static_cast<std::int64_t>(i % 50);
  data[9999] = std::int64_t{1} << 40;
  std::uint64_t likely = 0;
  const PackForm form = guess_form(data.data(), data.size() * 8, 8, true, &likely);
  ASSERT_EQ(form.kind, Kind::Narrow);
  std::vector<unsigned char> packed(likely);
  EXPECT_FALSE(pack(form, data.data(), data.size() * 8, packed.data(), likely));
}

TEST(Packing, OrdinaryNumbersAreNotPacked) {
  std::mt19937 random(5);
  std::vector<float> data(10000);
  for (float& x : data) x = static_cast<float>(random());
  EXPECT_EQ(round_trip(data, false, Kind::None), 0u);
}

}  // namespace
}  // namespace memfit::memory
