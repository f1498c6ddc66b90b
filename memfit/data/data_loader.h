// Feeds batches of a Dataset, read ahead by worker threads into a queue bounded in bytes.
//   DataLoader loader(dataset, {.batch = 64, .order = {.shuffle = true}});
//   for (int64_t epoch = 0; epoch < 3; ++epoch) { loader.start(epoch); while (auto batch = loader.next()) ... }
// Which rows come and in what batches never depends on the number of threads. The last, smaller batch is delivered.
// Not here: what a row is (dataset.h). Threads: one thread uses the loader.
// Cost: `threads` threads; at most `queue` bytes of batches that were not handed out, taken from PyTorch's CPU allocator and so
//       counted in memfit's limit; one lock a batch.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <vector>

#include "memfit/core/bytes.h"
#include "memfit/core/error.h"
#include "memfit/data/dataset.h"
#include "memfit/data/row_order.h"

namespace memfit::data {

struct LoaderOptions {
  /// Rows a batch. Default 1.
  std::int64_t batch = 1;
  /// Default: the file's order, all rows.
  OrderOptions order{};
  /// Leave the last batch out where it is smaller. Default: it is delivered.
  bool drop_last = false;
  /// Threads that read ahead; 0 reads in next(). Default 2.
  int threads = 2;
  /// Bytes of batches being read or waiting or kept for reuse. Default 256 MiB. More helps only where the time a row takes varies much.
  Bytes queue = Bytes(256ULL << 20);
};

struct Batch {
  std::vector<at::Tensor> fields;  // as Dataset::fields(), each with the batch as its first dimension
  std::vector<std::int64_t> rows;
  std::int64_t epoch = 0;
};

struct LoaderStats {
  Bytes queued_now, queued_peak;  // of the bound `queue`
};

/// A row could not be read. what() names the row and the dataset; its status is that of the cause.
class RowError : public Error {
 public:
  RowError(ExitStatus status, const std::string& text, std::int64_t row, std::exception_ptr cause)
      : Error(status, text), row_(row), cause_(std::move(cause)) {}
  std::int64_t row() const { return row_; }
  const std::exception_ptr& cause() const { return cause_; }

 private:
  std::int64_t row_;
  std::exception_ptr cause_;
};

class DataLoader {
 public:
  /// Throws:   UsageError when a number is out of range or one batch is larger than the queue may be.
  DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options);
  ~DataLoader();
  DataLoader(const DataLoader&) = delete;
  DataLoader& operator=(const DataLoader&) = delete;

  /// Begin an epoch, breaking off the one that runs.
  void start(std::int64_t epoch);
  /// The next batch, or nothing at the end of the epoch. The first call begins epoch 0 where none was started.
  /// Throws:   RowError when its turn comes, whatever other threads read meanwhile; the epoch is then broken off at the
  ///           batch before, where state() stands too.
  std::optional<Batch> next();
  /// Break the epoch off and give the queue's memory back. Cost: the rows that are being read.
  void stop();

  /// Batches of a whole epoch.
  std::int64_t batches() const;
  const Dataset& dataset() const { return *dataset_; }
  LoaderStats stats() const;

  /// Where next() stands, for load_state() of a loader on the same data: seed, epoch, rows handed out.
  nlohmann::json state() const;
  /// Go on there; also with another number of threads, another batch or another queue.
  /// Throws:   UsageError when the data has another number of rows or the order another seed, window or shard.
  void load_state(const nlohmann::json& state);

 private:
  class Queue;

  void fill_queue();
  void place(std::int64_t epoch, std::int64_t delivered);

  std::shared_ptr<const Dataset> dataset_;
  LoaderOptions options_;
  Bytes row_bytes_;
  std::unique_ptr<Queue> queue_;
  std::optional<RowOrder> order_;  // stands behind the last row that was queued
  std::int64_t epoch_ = 0;
  std::int64_t delivered_ = 0;  // rows handed out in this epoch
  std::int64_t queued_ = 0;     // rows handed out or queued
};

}  // namespace memfit::data
