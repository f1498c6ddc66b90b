// Batches being read by worker threads, handed back in the order in which they were put in.
// Not here: which rows, how many bytes (data_loader.cpp). Threads: one thread puts and takes. Cost: one lock a batch.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "memfit/data/dataset.h"
#include "memfit/data/detail/buffer_pool.h"

namespace memfit::data::detail {

/// A batch on its way.
struct BatchTask {
  std::vector<std::int64_t> rows;
  std::int64_t epoch = 0;
  std::uint64_t seed = 0;
  Buffer buffer;
  std::vector<std::byte*> fields;  // where each field of the batch begins in the buffer
  std::exception_ptr error;        // thrown by rows[bad_row]
  std::size_t bad_row = 0;
  bool done = false;
};

class BatchQueue {
 public:
  /// Without threads, batches are read when they are taken.
  BatchQueue(const Dataset& dataset, int threads, std::shared_ptr<BufferPool> pool);
  ~BatchQueue();

  bool empty() const { return tasks_.empty(); }
  void put(std::unique_ptr<BatchTask> task);
  /// Waits for the oldest. Requires: not empty.
  std::unique_ptr<BatchTask> take();
  /// Forget all; waits for the rows that are being read.
  void clear();

 private:
  void work();
  void read(BatchTask& task) const;

  const Dataset& dataset_;
  std::shared_ptr<BufferPool> pool_;
  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::deque<std::unique_ptr<BatchTask>> tasks_;  // changed by the loader's thread only, under the lock
  std::deque<BatchTask*> waiting_;
  int reading_ = 0;
  bool closing_ = false;
  std::atomic<bool> broken_off_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace memfit::data::detail
