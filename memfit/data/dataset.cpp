#include "memfit/data/dataset.h"

namespace memfit::data {
namespace {

/// The finisher of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
  x = (x ^ x >> 27) * 0x94d049bb133111ebU;
  return x ^ x >> 31;
}
constexpr std::uint64_t kGolden = 0x9e3779b97f4a7c15U;

}  // namespace

Bytes Field::bytes() const {
  std::uint64_t count = c10::elementSize(type);
  for (const std::int64_t size : shape) count *= static_cast<std::uint64_t>(size);
  return Bytes(count);
}

RowRandom::RowRandom(std::uint64_t seed, std::int64_t epoch, std::int64_t row)
    : state_(mix(mix(mix(seed + kGolden) + static_cast<std::uint64_t>(epoch) + kGolden) + static_cast<std::uint64_t>(row) + kGolden)) {}

std::uint64_t RowRandom::bits() { return mix(state_ += kGolden); }
double RowRandom::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
std::uint64_t RowRandom::below(std::uint64_t count) {
  return static_cast<std::uint64_t>(static_cast<unsigned __int128>(bits()) * count >> 64);
}

std::string Dataset::name() const { return "the dataset"; }

}  // namespace memfit::data
