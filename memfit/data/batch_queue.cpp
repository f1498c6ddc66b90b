#include "memfit/data/detail/batch_queue.h"

namespace memfit::data::detail {

BatchQueue::BatchQueue(const Dataset& dataset, int threads, std::shared_ptr<BufferPool> pool) : dataset_(dataset), pool_(std::move(pool)) {
  for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { work(); });
}

BatchQueue::~BatchQueue() {
  clear();
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  work_.notify_all();
}

void BatchQueue::put(std::unique_ptr<BatchTask> task) {
  {
    std::lock_guard lock(mutex_);
    if (!threads_.empty()) waiting_.push_back(task.get());
    tasks_.push_back(std::move(task));
  }
  work_.notify_one();
}

std::unique_ptr<BatchTask> BatchQueue::take() {
  if (threads_.empty()) {
    read(*tasks_.front());
    tasks_.front()->done = true;
  }
  std::unique_lock lock(mutex_);
  done_.wait(lock, [this] { return tasks_.front()->done; });
  std::unique_ptr<BatchTask> task = std::move(tasks_.front());
  tasks_.pop_front();
  return task;
}

void BatchQueue::clear() {
  broken_off_ = true;
  std::unique_lock lock(mutex_);
  waiting_.clear();
  done_.wait(lock, [this] { return reading_ == 0; });
  std::deque<std::unique_ptr<BatchTask>> tasks = std::move(tasks_);
  tasks_.clear();
  lock.unlock();
  for (auto& task : tasks) pool_->give_back(std::move(task->buffer));
  pool_->trim();
  broken_off_ = false;
}

void BatchQueue::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    work_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
    if (closing_) return;
    BatchTask& task = *waiting_.front();
    waiting_.pop_front();
    ++reading_;
    lock.unlock();
    read(task);
    lock.lock();
    task.done = true;
    --reading_;
    done_.notify_all();
  }
}

void BatchQueue::read(BatchTask& task) const {
  const std::vector<Field>& fields = dataset_.fields();
  std::vector<std::byte*> slots = task.fields;
  std::size_t i = 0;
  try {
    for (; i < task.rows.size() && !broken_off_; ++i) {
      Row row(task.rows[i], RowRandom(task.seed, task.epoch, task.rows[i]), fields, slots);
      dataset_.read(row);
      for (std::size_t field = 0; field < fields.size(); ++field) slots[field] += fields[field].bytes().count();
    }
  } catch (...) {
    task.error = std::current_exception();
    task.bad_row = i;
  }
}

}  // namespace memfit::data::detail
