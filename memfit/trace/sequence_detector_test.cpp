#include "memfit/trace/sequence_detector.h"

#include <gtest/gtest.h>

#include <random>

namespace memfit::trace {
namespace {

using Observation = SequenceDetector::Observation;

/// A training step of `blocks` equal blocks: forward fills memory, backward empties it, the optimizer writes.
std::vector<Observation> training_step(int blocks, std::uint64_t shape = 0) {
  std::vector<Observation> ops;
  std::uint64_t live = 1 << 20;
  auto op = [&](std::uint64_t kind, std::int64_t change, bool shaped = true, bool writes = false) {
    ops.push_back({kind * 1000003 + (shaped ? shape : 0), kind, Bytes(live), writes});
    live += static_cast<std::uint64_t>(change);
  };
  op(1, 4096);
  for (int b = 0; b < blocks; ++b)
    for (std::uint64_t k = 10; k < 16; ++k) op(k, 1 << 16);
  op(2, 4096);
  for (int b = 0; b < blocks; ++b)
    for (std::uint64_t k = 20; k < 26; ++k) op(k, -(1 << 16));
  op(3, -8192);
  for (int p = 0; p < blocks; ++p) op(30, 0, false, true), op(31, 0, false, true);
  return ops;
}

/// Evaluation: forward only, nothing kept.
std::vector<Observation> evaluation(int blocks) {
  std::vector<Observation> ops;
  ops.push_back({777, 777, Bytes(1 << 20), false});
  for (int b = 0; b < blocks; ++b)
    for (std::uint64_t k = 10; k < 16; ++k) ops.push_back({k * 1000003 + 5, k, Bytes(1 << 20), false});
  return ops;
}

struct Counts {
  int ended = 0, most_seen = 0, followed = 0;
  std::vector<std::uint32_t> lengths;
  std::vector<std::uint32_t> ids;
};

void run(SequenceDetector& d, const std::vector<Observation>& ops, Counts& counts) {
  for (const Observation& op : ops) {
    const auto v = d.feed(op);
    counts.followed += v.following.has_value();
    if (!v.step_ended) continue;
    ++counts.ended;
    counts.most_seen = std::max<int>(counts.most_seen, static_cast<int>(v.seen));
    counts.lengths.push_back(v.length);
    counts.ids.push_back(*v.ended);
  }
}

TEST(SequenceDetector, FindsAStepWithinThreeRepetitionsAndNotTheBlocksInsideIt) {
  SequenceDetector d;
  Counts c;
  const auto step = training_step(12);
  for (int i = 0; i < 3; ++i) run(d, step, c);
  EXPECT_TRUE(d.learned());
  for (int i = 0; i < 5; ++i) run(d, step, c);
  EXPECT_GE(c.ended, 5);
  for (std::uint32_t length : c.lengths) EXPECT_EQ(length, step.size());
  EXPECT_GE(c.most_seen, 5);
}

TEST(SequenceDetector, FindsAndKeepsAStepOfTensOfThousandsOfOps) {
  SequenceDetector d;
  Counts c;
  const auto step = training_step(4000);
  ASSERT_GT(step.size(), 50000u);
  for (int i = 0; i < 5; ++i) run(d, step, c);
  EXPECT_TRUE(d.learned());
  EXPECT_GE(c.ended, 2);
  for (std::uint32_t length : c.lengths) EXPECT_EQ(length, step.size());
}

TEST(SequenceDetector, PutsTheBoundaryWhereFewBytesAreLive) {
  SequenceDetector d;
  const auto step = training_step(6);
  std::uint64_t least = ~0ull, most = 0;
  for (const auto& op : step) least = std::min(least, op.live.count()), most = std::max(most, op.live.count());
  std::size_t after = step.size();
  for (int i = 0; i < 8; ++i)
    for (std::size_t k = 0; k < step.size(); ++k)
      if (d.feed(step[k]).step_ended) after = (k + 1) % step.size();
  ASSERT_LT(after, step.size());
  EXPECT_LE(step[after].live.count(), least + (most - least) / 20);
}

TEST(SequenceDetector, FollowsAKnownStepFromItsFirstOpToItsLast) {
  SequenceDetector d;
  Counts c;
  const auto step = training_step(4);
  for (int i = 0; i < 5; ++i) run(d, step, c);
  c = {};
  run(d, step, c);
  EXPECT_EQ(c.followed, static_cast<int>(step.size()));
}

TEST(SequenceDetector, ComesBackAfterEvaluationInBetween) {
  SequenceDetector d;
  Counts c;
  const auto step = training_step(4);
  for (int i = 0; i < 5; ++i) run(d, step, c);
  const auto known = c.ids.back();
  run(d, evaluation(9), c);
  run(d, evaluation(9), c);
  c = {};
  for (int i = 0; i < 3; ++i) run(d, step, c);
  ASSERT_GE(c.ended, 2);
  EXPECT_EQ(c.ids.back(), known);
  EXPECT_GE(c.followed, static_cast<int>(2 * step.size()));
}

TEST(SequenceDetector, RemembersSeveralShapesAndTellsThemApart) {
  SequenceDetector d;
  Counts c;
  std::mt19937 random(1);
  std::vector<std::vector<Observation>> steps;
  for (std::uint64_t shape = 1; shape <= 4; ++shape) steps.push_back(training_step(5, shape));
  for (int i = 0; i < 60; ++i) run(d, steps[random() % 4], c);
  ASSERT_GE(c.ended, 40);
  EXPECT_EQ(*std::max_element(c.ids.begin(), c.ids.end()) - *std::min_element(c.ids.begin(), c.ids.end()), 3u);
  EXPECT_GE(c.most_seen, 5);
}

TEST(SequenceDetector, FindsStepsWhoseNumberOfOpsVaries) {
  SequenceDetector d;
  Counts c;
  std::mt19937 random(2);
  for (int i = 0; i < 4; ++i) run(d, training_step(6), c);
  for (int i = 0; i < 40; ++i) run(d, training_step(3 + static_cast<int>(random() % 5)), c);
  EXPECT_GE(c.ended, 38);
  EXPECT_GE(c.most_seen, 4);
}

TEST(SequenceDetector, ObeysTheProgramWhenItSaysWhereStepsEnd) {
  SequenceDetector d;
  const auto step = training_step(3);
  std::uint32_t seen = 0;
  for (int i = 0; i < 4; ++i) {
    for (const auto& op : step) EXPECT_FALSE(d.feed(op).step_ended);
    const auto v = d.end_step();
    if (i == 0) continue;  // what ran before the first word is not known to be a whole step
    EXPECT_EQ(v.length, step.size());
    seen = v.seen;
  }
  EXPECT_EQ(seen, 3u);
}

TEST(SequenceDetector, NoticesADepartureAtTheOpThatDiffers) {
  SequenceDetector d;
  Counts c;
  auto step = training_step(4);
  for (int i = 0; i < 5; ++i) run(d, step, c);
  auto changed = step;
  changed[step.size() / 2].hash ^= 1;
  std::vector<bool> followed;
  for (const auto& op : changed) followed.push_back(d.feed(op).following.has_value());
  EXPECT_TRUE(followed[step.size() / 2 - 1]);
  EXPECT_FALSE(followed[step.size() / 2]);
  EXPECT_FALSE(followed[step.size() / 2 + 1]);
}

TEST(SequenceDetector, FindsNothingInNoise) {
  SequenceDetector d;
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) EXPECT_FALSE(d.feed({random(), random(), Bytes(random() % 1000), false}).step_ended);
  EXPECT_FALSE(d.learned());
}

}  // namespace
}  // namespace memfit::trace
