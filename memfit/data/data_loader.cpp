#include "memfit/data/data_loader.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/types.h>

#include <nlohmann/json.hpp>

#include "memfit/data/detail/batch_queue.h"

namespace memfit::data {
namespace {

// What PyTorch's own allocator aligns to.
constexpr std::uint64_t kAlignment = 64;

std::uint64_t aligned(std::uint64_t size) { return (size + kAlignment - 1) / kAlignment * kAlignment; }

Bytes batch_bytes(const std::vector<Field>& fields, std::int64_t rows) {
  std::uint64_t sum = 0;
  for (const Field& field : fields) sum += aligned(field.bytes().count() * static_cast<std::uint64_t>(rows));
  return Bytes(sum);
}

/// Gives a batch's memory back to the pool when the last of its tensors is gone.
struct Lease {
  detail::Buffer buffer;
  std::shared_ptr<detail::BufferPool> pool;
  ~Lease() { pool->recycle(std::move(buffer)); }
};

std::vector<at::Tensor> make_tensors(const std::vector<Field>& fields, detail::BatchTask& task, std::shared_ptr<detail::BufferPool> pool) {
  pool->hand_out(task.buffer.size);
  const auto lease = std::make_shared<Lease>(std::move(task.buffer), std::move(pool));
  std::vector<at::Tensor> tensors;
  for (std::size_t i = 0; i < fields.size(); ++i) {
    std::vector<std::int64_t> shape{static_cast<std::int64_t>(task.rows.size())};
    shape.insert(shape.end(), fields[i].shape.begin(), fields[i].shape.end());
    tensors.push_back(at::from_blob(task.fields[i], shape, [lease](void*) {}, at::TensorOptions(fields[i].type)));
  }
  return tensors;
}

/// The error of a worker, with its row; must be called with an error in the task.
[[noreturn]] void rethrow(const detail::BatchTask& task, const Dataset& dataset) {
  const std::int64_t row = task.rows[task.bad_row];
  const auto place = [&](std::string_view what) { return fmt::format("Row {} of {}: {}", row, dataset.name(), what); };
  try {
    std::rethrow_exception(task.error);
  } catch (const Error& error) {
    throw RowError(error.status(), place(error.what()), row, task.error);
  } catch (const c10::Error& error) {
    throw RowError(ExitStatus::Failed, place(error.what_without_backtrace()), row, task.error);
  } catch (const std::exception& error) {
    throw RowError(ExitStatus::Failed, place(error.what()), row, task.error);
  } catch (...) {
    throw RowError(ExitStatus::Failed, place("something that is no std::exception was thrown"), row, task.error);
  }
}

}  // namespace

class DataLoader::Queue {
 public:
  Queue(const Dataset& dataset, const LoaderOptions& options)
      : pool(std::make_shared<detail::BufferPool>(options.queue)), batches(dataset, options.threads, pool) {}

  std::shared_ptr<detail::BufferPool> pool;
  detail::BatchQueue batches;
};

DataLoader::DataLoader(std::shared_ptr<const Dataset> dataset, const LoaderOptions& options) : dataset_(std::move(dataset)), options_(options) {
  if (options_.batch < 1) throw UsageError(fmt::format("a batch of {} rows; it needs at least 1.", options_.batch));
  if (options_.threads < 0) throw UsageError(fmt::format("{} loader threads; 0 reads without threads.", options_.threads));
  RowOrder(0, options_.order, 0);  // checks its numbers
  const Bytes batch = batch_bytes(dataset_->fields(), options_.batch);
  if (batch > options_.queue) {
    throw UsageError(fmt::format("A batch of {} rows of {} takes {} and the loader's queue may take {}: raise the queue's bound or take a smaller batch.",
                                 options_.batch, dataset_->name(), format_bytes(batch), format_bytes(options_.queue)));
  }
}

DataLoader::~DataLoader() = default;

void DataLoader::place(std::int64_t epoch, std::int64_t delivered) {
  stop();
  epoch_ = epoch;
  delivered_ = queued_ = delivered;
  order_.emplace(dataset_->size(), options_.order, epoch);
  order_->skip(delivered);
}

void DataLoader::start(std::int64_t epoch) { place(epoch, 0); }

void DataLoader::stop() {
  if (queue_) queue_->batches.clear();
  order_.reset();
}

/// Reads ahead as far as the bound allows. One batch's worth is left free for memory that comes back, or every batch
/// would be allocated anew.
void DataLoader::fill_queue() {
  const std::int64_t total = rows_of_shard(dataset_->size(), options_.order);
  while (queued_ < total) {
    const std::int64_t count = std::min(options_.batch, total - queued_);
    if (count < options_.batch && options_.drop_last) return;
    const Bytes size = batch_bytes(dataset_->fields(), count);
    const bool ahead = !queue_->batches.empty();
    if (ahead && (options_.threads == 0 || queue_->pool->in_use() + size + size > options_.queue)) return;
    auto task = std::make_unique<detail::BatchTask>();
    try {
      task->buffer = queue_->pool->take(size);
    } catch (const c10::OutOfMemoryError&) {
      if (!ahead) throw;
      return;  // the memory limit leaves no room to read further ahead
    }
    std::byte* at = task->buffer.data();
    for (const Field& field : dataset_->fields()) {
      task->fields.push_back(at);
      at += aligned(field.bytes().count() * static_cast<std::uint64_t>(count));
    }
    for (std::int64_t i = 0; i < count; ++i) task->rows.push_back(order_->next().value());
    task->epoch = epoch_;
    task->seed = options_.order.seed;
    queued_ += count;
    queue_->batches.put(std::move(task));
  }
}

std::optional<Batch> DataLoader::next() {
  if (!queue_) queue_ = std::make_unique<Queue>(*dataset_, options_);
  if (!order_) place(epoch_, delivered_);
  fill_queue();
  if (queue_->batches.empty()) return std::nullopt;
  const std::unique_ptr<detail::BatchTask> task = queue_->batches.take();
  if (task->error) {
    queue_->pool->give_back(std::move(task->buffer));
    stop();
    rethrow(*task, *dataset_);
  }
  delivered_ += static_cast<std::int64_t>(task->rows.size());
  std::vector<at::Tensor> fields = make_tensors(dataset_->fields(), *task, queue_->pool);
  return Batch{std::move(fields), std::move(task->rows), task->epoch};
}

std::int64_t DataLoader::batches() const {
  const std::int64_t rows = rows_of_shard(dataset_->size(), options_.order);
  return options_.drop_last ? rows / options_.batch : (rows + options_.batch - 1) / options_.batch;
}

LoaderStats DataLoader::stats() const {
  if (!queue_) return {};
  return {queue_->pool->in_queue(), queue_->pool->peak()};
}

nlohmann::json DataLoader::state() const {
  const OrderOptions& order = options_.order;
  return {{"epoch", epoch_}, {"delivered", delivered_}, {"rows", dataset_->size()}, {"shuffle", order.shuffle}, {"window", order.window},
          {"seed", order.seed}, {"shard", order.shard}, {"shards", order.shards}};
}

void DataLoader::load_state(const nlohmann::json& state) {
  const nlohmann::json here = this->state();
  for (const char* key : {"rows", "shuffle", "window", "seed", "shard", "shards"}) {
    if (!state.contains(key) || state[key] != here[key]) {
      throw UsageError(fmt::format("The loader's saved place is in another order: {} was {} and is {} now. Give the same data and settings, or start "
                                   "without the checkpoint.", key, state.value(key, nlohmann::json()).dump(), here[key].dump()));
    }
  }
  const std::int64_t epoch = state.at("epoch"), delivered = state.at("delivered");
  if (delivered < 0 || delivered > rows_of_shard(dataset_->size(), options_.order)) {
    throw UsageError(fmt::format("The loader's saved place is behind row {} of {}.", delivered, dataset_->size()));
  }
  place(epoch, delivered);
}

}  // namespace memfit::data
