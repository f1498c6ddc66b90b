// Times as text. The times themselves are std::chrono everywhere.
#pragma once

#include <chrono>
#include <string>

namespace memfit {

/// "0 s", "412 ns", "3.1 µs", "12.5 ms", "2.35 s", "3 min 07 s", "2 h 05 min": the largest unit that keeps a digit
/// before the point, a minus sign for negative times.
std::string format_duration(std::chrono::nanoseconds time);

}  // namespace memfit
