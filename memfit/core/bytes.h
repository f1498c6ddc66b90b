// Sizes in bytes as a type, their literals, and their text form in both directions.
// Not here: where memory is taken (memory/), how much the machine has (device/).
// Threads: plain values. Cost: that of an integer.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace memfit {

/// A number of bytes. Never negative; subtraction that would go below zero gives zero.
class Bytes {
 public:
  constexpr Bytes() = default;
  constexpr explicit Bytes(std::uint64_t count) : count_(count) {}
  constexpr std::uint64_t count() const { return count_; }
  constexpr double mib() const { return static_cast<double>(count_) / (1024.0 * 1024.0); }

  constexpr auto operator<=>(const Bytes&) const = default;
  constexpr Bytes& operator+=(Bytes other) { count_ += other.count_; return *this; }
  constexpr Bytes& operator-=(Bytes other) { count_ = count_ > other.count_ ? count_ - other.count_ : 0; return *this; }
  friend constexpr Bytes operator+(Bytes a, Bytes b) { return a += b; }
  friend constexpr Bytes operator-(Bytes a, Bytes b) { return a -= b; }
  friend constexpr Bytes operator*(Bytes a, std::uint64_t n) { return Bytes(a.count_ * n); }

 private:
  std::uint64_t count_ = 0;
};

namespace literals {
constexpr Bytes operator""_B(unsigned long long n) { return Bytes(n); }
constexpr Bytes operator""_KiB(unsigned long long n) { return Bytes(n << 10); }
constexpr Bytes operator""_MiB(unsigned long long n) { return Bytes(n << 20); }
constexpr Bytes operator""_GiB(unsigned long long n) { return Bytes(n << 30); }
}  // namespace literals

/// "0 B", "512 B", "1.5 KiB", "150.0 MiB", "2.00 GiB". Units are powers of 1024.
std::string format_bytes(Bytes bytes);

/// Read "123456B", "150MiB", "2GiB", "0.5GiB", "80%" (of `whole`). Units: B, KiB, MiB, GiB, TiB.
/// Throws:   UsageError naming `flag`, the text and a good example: a bare number, an unknown unit, a
///           negative, a number that does not fit 64 bits, or a percentage where `whole` is not given.
Bytes parse_size(std::string_view text, std::string_view flag, std::optional<Bytes> whole = std::nullopt);

}  // namespace memfit
