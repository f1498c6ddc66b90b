// The loader's own capacity: 20000 float32 [3,64,64] in memory, each flipped at random and normalised, batch 64, shuffled.
// The twin of bench/loader/peer.py; bench/loader/drive.py runs both. Prints one line of JSON.
//   data_loader_bench THREADS [ROWS]
#include <fmt/format.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <fstream>
#include <vector>

#include "memfit/data/data_loader.h"

namespace {

using namespace memfit::data;
using Clock = std::chrono::steady_clock;

constexpr std::int64_t kChannels = 3, kSide = 64, kBatch = 64;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

/// Proportional set size of this process in MiB.
double pss_mib() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string word; file >> word;) {
    if (word != "Pss:") continue;
    double kib = 0;
    file >> kib;
    return kib / 1024;
  }
  return 0;
}

class Pictures : public Dataset {
 public:
  explicit Pictures(std::int64_t rows) : x_(torch::randn({rows, kChannels, kSide, kSide})), y_(torch::randint(0, 10, {rows})) {}
  std::int64_t size() const override { return x_.size(0); }
  const std::vector<Field>& fields() const override { return fields_; }
  void read(Row& row) const override {
    const float* from = x_.const_data_ptr<float>() + row.index() * kChannels * kSide * kSide;
    float* to = row.elements<float>(0).data();
    const bool flip = row.random.uniform() < 0.5;
    for (std::size_t c = 0; c < kChannels; ++c) {
      const float mean = kMean[c], deviation = kDeviation[c];
      for (std::int64_t y = 0; y < kSide; ++y, from += kSide, to += kSide) {
        if (flip) {
          for (std::int64_t x = 0; x < kSide; ++x) to[x] = (from[kSide - 1 - x] - mean) / deviation;
        } else {
          for (std::int64_t x = 0; x < kSide; ++x) to[x] = (from[x] - mean) / deviation;
        }
      }
    }
    row.elements<std::int64_t>(1)[0] = y_.const_data_ptr<std::int64_t>()[row.index()];
  }

 private:
  static constexpr std::array<float, 3> kMean{0.1F, 0.2F, 0.3F}, kDeviation{0.9F, 1.0F, 1.1F};
  at::Tensor x_, y_;
  std::vector<Field> fields_{{"x", at::kFloat, {kChannels, kSide, kSide}}, {"y", at::kLong, {}}};
};

struct Epoch {
  double steady = 0, whole = 0, first8_ms = 0, first_ms = 0;
};

Epoch run_epoch(DataLoader& loader, std::int64_t epoch) {
  const auto begin = Clock::now();
  auto eighth = begin;
  std::int64_t rows = 0, rows_then = 0, count = 0;
  Epoch result;
  loader.start(epoch);
  while (const auto batch = loader.next()) {
    if (batch->fields[0][0][0][0][0].item<float>() > 1e9F) std::abort();  // the consumer reads one element
    rows += batch->fields[0].size(0);
    if (count == 0) result.first_ms = seconds_since(begin) * 1e3;
    if (count == 7) eighth = Clock::now(), rows_then = rows;
    ++count;
  }
  result.steady = static_cast<double>(rows - rows_then) / seconds_since(eighth);
  result.whole = static_cast<double>(rows) / seconds_since(begin);
  result.first8_ms = std::chrono::duration<double>(eighth - begin).count() * 1e3;
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::stoi(argv[1]) : 0;
  const auto data = std::make_shared<Pictures>(argc > 2 ? std::stoll(argv[2]) : 20000);
  const double base = pss_mib();
  // The queue takes what prefetch_factor 2 of Python's loader takes per worker.
  const memfit::Bytes queue(static_cast<std::uint64_t>(std::max(2, 2 * threads)) * kBatch * (kChannels * kSide * kSide * 4 + 64));
  DataLoader loader(data, {.batch = kBatch, .order = {.shuffle = true}, .drop_last = true, .threads = threads, .queue = queue});
  const Epoch first = run_epoch(loader, 0), second = run_epoch(loader, 1);
  double peak = 0;
  std::int64_t count = 0;
  for (std::int64_t epoch = 2; epoch < 5; ++epoch) {
    loader.start(epoch);
    for (std::int64_t left = epoch == 3 ? 100 : loader.batches(); left > 0 && loader.next(); --left) {  // epoch 3 is broken off
      if (++count % 40 == 20) peak = std::max(peak, pss_mib());
    }
  }
  loader.start(5);
  loader.next();
  const auto begin = Clock::now();
  loader.stop();
  fmt::print(R"({{"threads": {}, "steady": [{:.0f}, {:.0f}], "whole": [{:.0f}, {:.0f}], "first8_ms": {:.1f}, "first_ms": {:.1f}, "stop_ms": {:.2f}, )"
             R"("peak_mib": {:.0f}, "base_mib": {:.0f}, "queue_mib": {:.1f}}})" "\n",
             threads, first.steady, second.steady, first.whole, second.whole, std::max(first.first8_ms, second.first8_ms),
             std::max(first.first_ms, second.first_ms), seconds_since(begin) * 1e3, peak, base, queue.mib());
}
