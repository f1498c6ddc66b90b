#include "memfit/data/data_loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <thread>

#include "memfit/data/array_dataset.h"
#include "memfit/data/token_dataset.h"

namespace memfit::data {
namespace {

using testing::HasSubstr;

/// Row i holds i and a number drawn for it.
class Numbers : public Dataset {
 public:
  explicit Numbers(std::int64_t rows, std::int64_t width = 1) : rows_(rows), fields_{{"number", at::kLong, {width}}, {"draw", at::kDouble, {}}} {}
  std::int64_t size() const override { return rows_; }
  const std::vector<Field>& fields() const override { return fields_; }
  void read(Row& row) const override {
    if (row.index() == bad_row) throw std::runtime_error("this row is bad");
    if (delay.count() != 0 && row.index() >= slow_from) std::this_thread::sleep_for(delay * (row.index() % 3));
    for (std::int64_t& number : row.elements<std::int64_t>(0)) number = row.index();
    row.elements<double>(1)[0] = row.random.uniform();
  }

  std::int64_t bad_row = -1;
  std::chrono::microseconds delay{0};
  std::int64_t slow_from = 0;

 private:
  std::int64_t rows_;
  std::vector<Field> fields_;
};

struct Seen {
  std::vector<std::int64_t> rows;
  std::vector<double> draws;
  std::vector<std::size_t> batches;
  bool operator==(const Seen&) const = default;
};

Seen drain(DataLoader& loader) {
  Seen seen;
  while (const auto batch = loader.next()) {
    seen.batches.push_back(batch->rows.size());
    for (std::size_t i = 0; i < batch->rows.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      EXPECT_EQ(batch->fields[0][at][0].item<std::int64_t>(), batch->rows[i]);
      seen.rows.push_back(batch->rows[i]);
      seen.draws.push_back(batch->fields[1][at].item<double>());
    }
  }
  return seen;
}

std::shared_ptr<Numbers> numbers(std::int64_t rows, std::int64_t width = 1) { return std::make_shared<Numbers>(rows, width); }

TEST(DataLoader, TheTailIsDelivered) {
  for (const int threads : {0, 2}) {
    DataLoader loader(numbers(103), {.batch = 8, .threads = threads});
    EXPECT_EQ(loader.batches(), 13);
    const Seen seen = drain(loader);
    EXPECT_EQ(seen.batches.size(), 13U);
    EXPECT_EQ(seen.batches.back(), 7U);
    DataLoader dropping(numbers(103), {.batch = 8, .drop_last = true, .threads = threads});
    EXPECT_EQ(dropping.batches(), 12);
    EXPECT_EQ(drain(dropping).batches.size(), 12U);
  }
}

TEST(DataLoader, EveryRowComesOncePerEpochWhateverThreadsAndShards) {
  for (const std::int64_t window : {0, 16}) {
    for (const std::int64_t shards : {1, 2, 3}) {
      std::vector<std::vector<Seen>> of_threads;
      for (const int threads : {0, 1, 2, 4}) {
        std::vector<Seen> all;
        for (std::int64_t epoch = 0; epoch < 3; ++epoch) {
          std::multiset<std::int64_t> rows;
          for (std::int64_t shard = 0; shard < shards; ++shard) {
            const auto data = numbers(103);
            data->delay = std::chrono::microseconds(10);
            DataLoader loader(data, {.batch = 8, .order = {true, window, 7, shard, shards}, .threads = threads});
            loader.start(epoch);
            all.push_back(drain(loader));
            rows.insert(all.back().rows.begin(), all.back().rows.end());
          }
          EXPECT_EQ(rows.size(), 103U);
          EXPECT_EQ(std::set<std::int64_t>(rows.begin(), rows.end()).size(), 103U);
        }
        EXPECT_NE(all[0].rows, all[static_cast<std::size_t>(shards)].rows) << "epoch 1 is as epoch 0";
        of_threads.push_back(std::move(all));
      }
      for (const auto& other : of_threads) EXPECT_EQ(other, of_threads.front());
    }
  }
}

TEST(DataLoader, TheOrderDependsOnSeedAndEpochOnly) {
  const auto order = [](std::uint64_t seed, std::int64_t first, std::int64_t epoch) {
    DataLoader loader(numbers(50), {.batch = 5, .order = {.shuffle = true, .seed = seed}});
    loader.start(first);
    loader.next();
    loader.start(epoch);
    return drain(loader).rows;
  };
  EXPECT_EQ(order(1, 0, 2), order(1, 5, 2));
  EXPECT_NE(order(1, 0, 2), order(2, 0, 2));
}

TEST(DataLoader, GoesOnAtAnyRowInTheUninterruptedOrder) {
  for (const std::int64_t window : {0, 16}) {
    for (const std::int64_t shards : {1, 3}) {
      LoaderOptions options{.batch = 1, .order = {true, window, 3, 0, shards}};
      DataLoader whole(numbers(41), options);
      whole.start(4);
      const std::vector<std::int64_t> rows = drain(whole).rows;
      DataLoader broken(numbers(41), options);
      broken.start(4);
      for (std::size_t at = 0; at <= rows.size(); ++at) {
        const nlohmann::json state = nlohmann::json::parse(broken.state().dump());
        LoaderOptions other = options;
        other.threads = static_cast<int>(at % 3);
        other.batch = 8;
        DataLoader resumed(numbers(41), other);
        resumed.load_state(state);
        EXPECT_EQ(drain(resumed).rows, std::vector<std::int64_t>(rows.begin() + static_cast<std::ptrdiff_t>(at), rows.end()));
        EXPECT_EQ(broken.next().has_value(), at < rows.size());
      }
    }
  }
}

TEST(DataLoader, AnotherOrderIsNotResumed) {
  DataLoader loader(numbers(10), {.order = {.shuffle = true, .seed = 1}});
  DataLoader other(numbers(10), {.order = {.shuffle = true, .seed = 2}});
  EXPECT_THROW(other.load_state(loader.state()), UsageError);
  DataLoader longer(numbers(11), {.order = {.shuffle = true, .seed = 1}});
  EXPECT_THROW(longer.load_state(loader.state()), UsageError);
}

TEST(DataLoader, AnErrorComesInItsTurnWithItsRow) {
  for (const int threads : {0, 1, 4}) {
    const auto data = numbers(40);
    data->bad_row = 21;
    DataLoader loader(data, {.batch = 4, .threads = threads});
    for (int i = 0; i < 5; ++i) EXPECT_TRUE(loader.next());
    try {
      loader.next();
      FAIL() << "no error";
    } catch (const RowError& error) {
      EXPECT_EQ(error.row(), 21);
      EXPECT_THAT(error.what(), HasSubstr("Row 21 of the dataset: this row is bad"));
      EXPECT_THROW(std::rethrow_exception(error.cause()), std::runtime_error);
    }
    EXPECT_EQ(loader.state()["delivered"], 20);
    data->bad_row = -1;
    EXPECT_EQ(drain(loader).rows.size(), 20U) << "goes on where it stood";
  }
}

TEST(DataLoader, TheQueueStaysUnderItsBytesAndIsFreedByStop) {
  const Bytes batch(16 * 1024 * 8 + 16 * 8);
  DataLoader loader(numbers(2000, 1024), {.batch = 16, .threads = 2, .queue = batch * 5});
  std::vector<Batch> held;
  for (int i = 0; i < 50; ++i) {
    held.push_back(loader.next().value());
    if (held.size() > 3) held.erase(held.begin());
    EXPECT_LE(loader.stats().queued_now, batch * 5);
  }
  EXPECT_LE(loader.stats().queued_peak, batch * 5);
  EXPECT_GE(loader.stats().queued_peak, batch * 3) << "nothing was read ahead";
  loader.stop();
  EXPECT_EQ(loader.stats().queued_now, Bytes(0));
  EXPECT_EQ(held.back().fields[0][0][0].item<std::int64_t>(), held.back().rows[0]) << "batches outlive the queue";
  EXPECT_THROW(DataLoader(numbers(2000, 1024), {.batch = 16, .queue = Bytes(100'000)}), UsageError);
}

TEST(DataLoader, BatchesOutliveTheLoader) {
  std::optional<Batch> batch;
  {
    DataLoader loader(numbers(20), {.batch = 4});
    batch = loader.next();
  }
  EXPECT_EQ(batch->fields[0][3][0].item<std::int64_t>(), 3);
}

TEST(DataLoader, BreakingOffTakesNoLongerThanTheRowsBeingRead) {
  const auto data = numbers(100'000);
  data->delay = std::chrono::milliseconds(1);
  data->slow_from = 1000;
  DataLoader loader(data, {.batch = 1000, .threads = 2});
  EXPECT_TRUE(loader.next());
  const auto begin = std::chrono::steady_clock::now();  // two batches of a second each are being read now
  loader.stop();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::milliseconds(500));
}

class Folder : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directories(path_); }
  void TearDown() override { std::filesystem::remove_all(path_); }
  std::string write(const std::string& name, const std::string& bytes) const {
    std::ofstream(path_ / name, std::ios::binary) << bytes;
    return path_ / name;
  }
  std::filesystem::path path_ = std::filesystem::path(testing::TempDir()) / testing::UnitTest::GetInstance()->current_test_info()->name();
};

using TokenFile = Folder;
TEST_F(TokenFile, RowsAreTokensAndTheSameShifted) {
  std::string bytes;
  for (int i = 0; i < 11; ++i) bytes += std::string{static_cast<char>(i), static_cast<char>(i == 10 ? 0xff : 0)};
  const std::string path = write("t.bin", bytes);
  DataLoader loader(std::make_shared<TokenDataset>(path, TokenOptions{.length = 5}), {.batch = 2});
  const Batch batch = loader.next().value();
  EXPECT_TRUE(batch.fields[0].equal(torch::arange(10).view({2, 5})));
  EXPECT_EQ(batch.fields[1][1][4].item<std::int64_t>(), 0xff0a);
  EXPECT_FALSE(loader.next());
  EXPECT_THROW(TokenDataset(path, {.length = 11}), BadInput);
  EXPECT_THROW(TokenDataset(path, {.type = ElementType::UInt32}), BadInput);
}

using ArrayData = Folder;
TEST_F(ArrayData, RowsOfAMappedFileAreItsRows) {
  std::string data;
  for (int i = 0; i < 6; ++i) data += static_cast<char>(i);
  const std::string path = write("x.idx", std::string("\0\0\x08\x02\0\0\0\x03\0\0\0\x02", 12) + data);
  const auto dataset = std::make_shared<ArrayDataset>(path);
  DataLoader loader(dataset, {.batch = 3});
  EXPECT_TRUE(loader.next().value().fields[0].equal(torch::arange(6, torch::kByte).view({3, 2})));
  EXPECT_TRUE(map_arrays(path).at(0).tensor.equal(torch::arange(6, torch::kByte).view({3, 2})));
  EXPECT_THROW(ArrayDataset(path, {"x"}), UsageError);
}

TEST(ArrayDataset, ArraysOfDifferentLengthAreRefused) {
  try {
    ArrayDataset({{"x", torch::zeros({3, 2})}, {"y", torch::zeros({4})}}, "mine");
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("array x has 3 rows and array y has 4"));
  }
}

}  // namespace
}  // namespace memfit::data
