#include "memfit/trace/mft.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <random>

#include "memfit/core/error.h"
#include "memfit/testing/random_step.h"

namespace memfit::trace {
namespace {

using memfit::testing::random_step;

Trace random_trace(std::uint32_t seed, int steps, int ops) {
  std::mt19937 random(seed);
  Trace trace{{"python train.py", "2.13.0", "cpu", "0.1.0"}, {}};
  for (int i = 0; i < steps; ++i) trace.steps.push_back(random_step(random, ops));
  return trace;
}

TEST(Mft, ReadsBackExactlyWhatWasWritten) {
  for (std::uint32_t seed = 0; seed < 50; ++seed) {
    const Trace trace = random_trace(seed, static_cast<int>(seed % 4), 1 + static_cast<int>(seed * 3));
    for (const Step& step : trace.steps) ASSERT_EQ(find_fault(step), std::nullopt) << "seed " << seed;
    EXPECT_EQ(decode_mft(encode_mft(trace), "t.mft"), trace) << "seed " << seed;
  }
}

TEST(Mft, RefusesEveryTruncation) {
  const std::string whole = encode_mft(random_trace(1, 2, 20));
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_THROW(decode_mft(std::string_view(whole).substr(0, size), "t.mft"), BadInput) << size;
}

TEST(Mft, RefusesEveryFlippedBit) {
  const std::string whole = encode_mft(random_trace(2, 2, 12));
  for (std::size_t bit = 0; bit < whole.size() * 8; ++bit) {
    std::string bad = whole;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THROW(decode_mft(bad, "t.mft"), BadInput) << bit;
  }
}

std::string message(std::string_view data) {
  try {
    decode_mft(data, "t.mft");
  } catch (const BadInput& error) {
    return error.what();
  }
  return "";
}

TEST(Mft, NamesBothVersionsOfANewerFile) {
  std::string data = encode_mft(random_trace(3, 1, 3));
  data[8] = 7;
  EXPECT_EQ(message(data), "t.mft: at byte 8: the file has format version 7, this memfit reads version 1");
}

TEST(Mft, TellsAForeignFile) { EXPECT_EQ(message("PK\3\4 something"), "t.mft: at byte 0: this is not a memfit trace (.mft)"); }

std::uint32_t crc(std::string_view data) {  // bit by bit, on purpose not the table of the code under test
  std::uint32_t c = ~0u;
  for (unsigned char byte : data) {
    c ^= byte;
    for (int k = 0; k < 8; ++k) c = (c >> 1) ^ (0xedb88320u & (0u - (c & 1)));
  }
  return ~c;
}

/// Corruption that keeps the checksums right, as an attacker would: no crash, no large allocation, either refused or within the rules.
TEST(Mft, SurvivesForgedContent) {
  std::mt19937 random(4);
  const std::string whole = encode_mft(random_trace(5, 1, 10));
  const std::size_t info = 12 + 9 + static_cast<unsigned char>(whole[13]) + 4;  // the step section starts here
  std::uint64_t length = 0;
  for (int i = 0; i < 8; ++i) length |= static_cast<std::uint64_t>(static_cast<unsigned char>(whole[info + 1 + i])) << (8 * i);
  for (int round = 0; round < 20000; ++round) {
    std::string bad = whole;
    for (int k = 1 + static_cast<int>(random() % 3); k > 0; --k) bad[info + 9 + random() % length] = static_cast<char>(random() % 3 ? random() : 0xff);
    const std::uint32_t sum = crc(std::string_view(bad).substr(info, 9 + length));
    for (int i = 0; i < 4; ++i) bad[info + 9 + length + i] = static_cast<char>(sum >> (8 * i));
    try {
      const Trace trace = decode_mft(bad, "t.mft");
      for (const Step& step : trace.steps) EXPECT_EQ(find_fault(step), std::nullopt);
    } catch (const BadInput&) {
    }
  }
}

TEST(Mft, WritesWholeFilesAndNeverReplacesWithoutForce) {
  const std::string path = ::testing::TempDir() + "/memfit_mft_test.mft";
  std::remove(path.c_str());
  const Trace a = random_trace(6, 1, 5), b = random_trace(7, 2, 5);
  write_mft(a, path);
  EXPECT_THROW(write_mft(b, path), Error);
  EXPECT_EQ(read_mft(path), a);
  write_mft(b, path, true);
  EXPECT_EQ(read_mft(path), b);
  std::size_t leftovers = 0;
  for (const auto& entry : std::filesystem::directory_iterator(::testing::TempDir()))
    leftovers += entry.path().string().find("memfit_mft_test.mft.") != std::string::npos;
  EXPECT_EQ(leftovers, 0u);
  std::remove(path.c_str());
  EXPECT_THROW(read_mft(path), Error);
}

}  // namespace
}  // namespace memfit::trace
