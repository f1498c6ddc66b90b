#include "memfit/core/duration.h"

#include <fmt/format.h>

#include <cmath>

namespace memfit {

std::string format_duration(std::chrono::nanoseconds time) {
  if (time.count() == 0) return "0 s";
  // As a double before the sign is dropped: the most negative count has no positive twin.
  const double ns = std::abs(static_cast<double>(time.count()));
  const char* sign = time.count() < 0 ? "-" : "";
  // Each bound is where rounding would show 1000 (or 60) of the smaller unit.
  if (ns < 1e3) return fmt::format("{}{:.0f} ns", sign, ns);
  if (ns < 999.95e3) return fmt::format("{}{:.1f} µs", sign, ns / 1e3);
  if (ns < 999.95e6) return fmt::format("{}{:.1f} ms", sign, ns / 1e6);
  if (ns < 59.995e9) return fmt::format("{}{:.2f} s", sign, ns / 1e9);
  const auto seconds = static_cast<std::uint64_t>(std::llround(ns / 1e9));
  if (seconds < 3600) return fmt::format("{}{} min {:02} s", sign, seconds / 60, seconds % 60);
  const std::uint64_t minutes = (seconds + 30) / 60;
  return fmt::format("{}{} h {:02} min", sign, minutes / 60, minutes % 60);
}

}  // namespace memfit
