// Time and thread state of the engine's hot path.
#pragma once

#include <x86intrin.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace memfit::engine::detail {

inline std::uint64_t ticks() { return __rdtsc(); }

/// Nanoseconds of `n` ticks; the rate is measured once against the monotonic clock.
inline std::uint64_t ticks_to_ns(std::uint64_t n) {
  static const double rate = [] {
    using Clock = std::chrono::steady_clock;
    const auto c0 = Clock::now();
    const std::uint64_t t0 = ticks();
    while (Clock::now() - c0 < std::chrono::milliseconds(2)) {}
    const std::uint64_t t1 = ticks();
    const double ns = std::chrono::duration<double, std::nano>(Clock::now() - c0).count();
    return ns / static_cast<double>(t1 - t0);
  }();
  return static_cast<std::uint64_t>(static_cast<double>(n) * rate);
}

struct ThreadState {
  int in_op = 0;                   // kernels are running: pointers are theirs
  std::uint64_t engine_ticks = 0;  // spent evicting inside allocations
  std::uint64_t number = 0;
};
inline thread_local ThreadState thread_state;

inline std::uint64_t thread_engine_ticks() { return thread_state.engine_ticks; }

inline std::uint64_t thread_number() {
  static std::atomic<std::uint64_t> last{0};
  if (thread_state.number == 0) thread_state.number = ++last;
  return thread_state.number;
}

std::uint64_t checksum(const void* data, std::uint64_t bytes);

/// While it lives, raw pointers taken by this thread belong to a kernel.
struct InOp {
  InOp() { ++thread_state.in_op; }
  ~InOp() { --thread_state.in_op; }
};

}  // namespace memfit::engine::detail
