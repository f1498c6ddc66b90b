#include "memfit/data/row_order.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "memfit/core/error.h"

namespace memfit::data {

std::int64_t rows_of_shard(std::int64_t rows, const OrderOptions& options) {
  return options.shard >= rows ? 0 : (rows - options.shard - 1) / options.shards + 1;
}

RowOrder::RowOrder(std::int64_t rows, const OrderOptions& options, std::int64_t epoch) : rows_(rows), options_(options) {
  if (options.shards < 1 || options.shard < 0 || options.shard >= options.shards) {
    throw UsageError(fmt::format("shard {} of {}: shards are numbered from 0 to their number less one.", options.shard, options.shards));
  }
  if (options.window < 0) throw UsageError(fmt::format("a shuffle window of {} rows; 0 means all of them.", options.window));
  if (!options.shuffle) return;
  std::seed_seq seed{static_cast<std::uint32_t>(options.seed), static_cast<std::uint32_t>(options.seed >> 32),
                     static_cast<std::uint32_t>(epoch), static_cast<std::uint32_t>(static_cast<std::uint64_t>(epoch) >> 32)};
  random_.seed(seed);
  taken_ = options.window == 0 ? rows : std::min(rows, options.window);
  window_.resize(static_cast<std::size_t>(taken_));
  std::iota(window_.begin(), window_.end(), 0);
}

std::optional<std::int64_t> RowOrder::next_of_all() {
  if (drawn_ == rows_) return std::nullopt;
  ++drawn_;
  if (!options_.shuffle) return drawn_ - 1;
  // Not std::uniform_int_distribution: its numbers differ from library to library.
  const auto place = static_cast<std::size_t>(static_cast<unsigned __int128>(random_()) * window_.size() >> 64);
  const std::int64_t row = window_[place];
  if (taken_ < rows_) {
    window_[place] = taken_++;
  } else {
    window_[place] = window_.back();
    window_.pop_back();
  }
  return row;
}

std::optional<std::int64_t> RowOrder::next() {
  while (const std::optional<std::int64_t> row = next_of_all()) {
    if ((drawn_ - 1) % options_.shards == options_.shard) return row;
  }
  return std::nullopt;
}

void RowOrder::skip(std::int64_t count) {
  for (std::int64_t i = 0; i < count && next(); ++i) {}
}

}  // namespace memfit::data
