// What one attached process says about itself while it runs: a page of counters in a file that the process maps
// and `memfit run` reads after it has ended, however it ended.
// Not here: who counts (engine/), how it is printed (report/run_report), who waits for the process (cli/run).
// Threads: every number is an atomic and may be written and read by any thread and process without a lock;
//          texts are written by one thread at a time and read only after the process has ended.
// Cost: one relaxed store or add for each number.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>

namespace memfit::trace {

/// Counters of a process under memfit. Plain bytes: the file is this struct and nothing else.
/// A new field goes at the end of its group and raises kVersion; reader and writer are of one build.
struct RunStatus {
  static constexpr std::uint64_t kMagic = 0x0001'7375'7466'6d6dULL;  // "mmftus", then 1
  static constexpr std::uint32_t kVersion = 1;
  static constexpr std::size_t kHolders = 16;
  using Counter = std::atomic<std::uint64_t>;

  /// One of the largest blocks alive when peak_bytes was reached; bytes == 0 ends the list.
  struct Holder {
    std::uint64_t bytes;
    char op[96];
    char shape[64];
  };

  std::uint64_t magic;
  std::uint32_t version;
  std::uint32_t size;

  std::uint64_t pid;
  std::int64_t rank;  // of the RANK variable at attach; -1 without one
  char torch_version[32];
  char device[32];
  char door[32];

  Counter attached;  // 1 once the engine is in charge
  Counter finished;  // 1 once the process has passed its normal exit

  Counter limit_tensor_bytes;  // 0 = none
  Counter limit_memory_bytes;  // 0 = none
  Counter live_bytes;
  Counter cached_bytes;
  Counter peak_bytes;            // highest live + cached
  Counter unlimited_peak_bytes;  // what peak_bytes would have been without evictions
  Counter peak_rss_bytes;        // VmHWM as the engine last saw it; the supervisor knows better at the end
  Counter fixed_cost_bytes;      // resident bytes that are not tensors, measured for limit_memory_bytes

  Counter ops;
  Counter evictions;
  Counter recomputed_ops;
  Counter recompute_ns;
  Counter engine_ns;
  Counter search_ns;

  Counter planned_steps;
  Counter replanned;
  Counter predicted_peak_bytes;
  Counter predicted_step_ns;
  Counter step_ns;
  Counter offload_write_bytes;
  Counter offload_read_bytes;

  Counter refusals;
  Counter ops_at_last_refusal;
  Counter least_limit_bytes;  // smallest limit that would have got past the last refusal

  Counter verified_values;
  Counter verify_failures;

  Counter reserved[32];

  Holder largest_holders[kHolders];
  char message[4096];  // why it was refused, or what the user should know; empty = nothing
};

static_assert(std::atomic<std::uint64_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<std::uint64_t>) == sizeof(std::uint64_t));
static_assert(std::is_standard_layout_v<RunStatus>);
static_assert(sizeof(RunStatus) < 16 * 1024);

/// Copy `text` into a fixed array of a RunStatus, cut where it does not fit (never inside a UTF-8 character), always ended by NUL.
template <std::size_t N>
void set_text(char (&to)[N], std::string_view text) {
  std::size_t n = text.size() < N - 1 ? text.size() : N - 1;
  if (n < text.size()) {
    while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xC0) == 0x80) --n;
  }
  for (std::size_t i = 0; i < n; ++i) to[i] = text[i];
  for (std::size_t i = n; i < N; ++i) to[i] = '\0';
}

/// Make the status page of this process: the file `<dir>/<pid>.status` (mode 0600), mapped shared, or an
/// anonymous page when `dir` is empty. All counters 0, magic, version, size and pid set, rank -1.
/// Returns:  the page, never freed (the kernel keeps what was written even when the process is killed);
///           nullptr with errno set when the file cannot be made.
/// Threads:  call once. A page left by an earlier program image of the same pid (exec) is replaced.
RunStatus* create_run_status(const std::string& dir);

/// Read a status page that a process left behind, as hostile input: a regular file of exactly the right size,
/// magic, version and size right, every text ended by NUL.
/// Returns:  a private copy.
/// Throws:   BadInput naming file and byte offset.
std::unique_ptr<RunStatus> open_run_status(const std::string& path);

}  // namespace memfit::trace
