#include "memfit/core/bytes.h"

#include <fmt/format.h>

#include <cctype>
#include <charconv>
#include <cmath>

#include "memfit/core/error.h"

namespace memfit {

std::string format_bytes(Bytes bytes) {
  const double n = static_cast<double>(bytes.count());
  if (bytes.count() < 1024) return fmt::format("{} B", bytes.count());
  if (n < 1024.0 * 1024) return fmt::format("{:.1f} KiB", n / 1024);
  if (n < 1024.0 * 1024 * 1024) return fmt::format("{:.1f} MiB", n / (1024.0 * 1024));
  return fmt::format("{:.2f} GiB", n / (1024.0 * 1024 * 1024));
}

Bytes parse_size(std::string_view text, std::string_view flag, std::optional<Bytes> whole) {
  auto bad = [&](const std::string& why) -> UsageError {
    return UsageError(fmt::format("{}: \"{}\" {}. Write a size with its unit, for example {} 512MiB{}.", flag, text, why,
                                  flag, whole ? fmt::format(" or {} 80%", flag) : ""));
  };
  double number = 0;
  const char* begin = text.data();
  const char* end = begin + text.size();
  auto [rest, error] = std::from_chars(begin, end, number, std::chars_format::fixed);
  if (error != std::errc() || rest == begin) throw bad("is not a size");
  if (!std::isfinite(number) || number < 0 || std::signbit(number)) throw bad("is not a positive size");
  const std::string_view unit(rest, static_cast<std::size_t>(end - rest));
  double scale = 0;
  if (unit == "B") scale = 1;
  else if (unit == "KiB") scale = 1024.0;
  else if (unit == "MiB") scale = 1024.0 * 1024;
  else if (unit == "GiB") scale = 1024.0 * 1024 * 1024;
  else if (unit == "TiB") scale = 1024.0 * 1024 * 1024 * 1024;
  else if (unit == "%" && whole) {
    if (number > 100) throw bad("is more than the whole");
    scale = static_cast<double>(whole->count()) / 100;
  } else if (unit.empty()) throw bad("has no unit");
  else throw bad(fmt::format("has the unit \"{}\", which is not one of B, KiB, MiB, GiB, TiB{}", unit, whole ? ", %" : ""));
  const double bytes = number * scale;
  if (bytes >= 9.2e18) throw bad("is too large");
  return Bytes(static_cast<std::uint64_t>(bytes));
}

}  // namespace memfit
