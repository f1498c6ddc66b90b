// Tensor bytes moved out of memory, to a file without a name in a folder of the user's: written and read in the
// background, at their exact size, checked by checksum, bounded in bytes. Not here: what is moved and when (plan/, the
// evictor), the file itself (device/scratch_file.h). Threads: called under the engine's lock; the store's own two
// threads (one for each direction) take none of it. Cost: a checksum and a copy into the system's page cache for each
// byte, each way.
#pragma once

#include <c10/core/thread_pool.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "memfit/core/bytes.h"
#include "memfit/device/scratch_file.h"
#include "memfit/plan/simulate.h"

namespace memfit::engine {

class OffloadStore {
 public:
  /// One tensor's bytes outside. Their place is free again when it goes.
  class Copy {
   public:
    ~Copy();
    Copy(const Copy&) = delete;
    Copy& operator=(const Copy&) = delete;

   private:
    friend class OffloadStore;
    Copy(OffloadStore& store, std::uint64_t at, std::uint64_t place, std::uint64_t bytes)
        : store_(store), at_(at), place_(place), bytes_(bytes) {}
    OffloadStore& store_;
    const std::uint64_t at_, place_, bytes_;
    std::uint64_t checksum_ = 0;
    bool busy_ = false;  // under the store's mutex
    int error_ = 0;      // of the system; kChanged when other bytes came back
  };
  static constexpr int kChanged = -1;

  /// `limit`: most bytes of the file. Measures the folder's speed.
  /// Throws: UsageError when the folder cannot serve (missing, read-only, full, in memory).
  OffloadStore(const std::string& folder, Bytes limit);
  ~OffloadStore();

  /// Begin to copy out. The bytes must stay as they are until wait().
  /// Returns: nullptr when there is no room below the limit.
  std::shared_ptr<Copy> start_write(const void* data, std::uint64_t bytes);
  /// Begin to copy back. `to` must stay until wait().
  static void start_read(const std::shared_ptr<Copy>& copy, void* to);
  /// Until what was begun is done. False: it failed, see `error`.
  static bool wait(const Copy& copy, int* error = nullptr);

  /// The threads are the parent's: from now on whoever asks copies by himself. Nothing may be going on.
  void after_fork_in_child();

  const plan::Traffic& traffic() const { return traffic_; }
  Bytes limit() const { return limit_; }
  std::uint64_t bytes_written() const { return written_; }
  std::uint64_t bytes_read() const { return read_; }
  /// What a failure is called, for people.
  static std::string error_text(int error);

 private:
  void finish(Copy& copy, int error);
  void run(c10::ThreadPool& thread, std::function<void()> copying);
  void free_place(std::uint64_t at, std::uint64_t place);

  Bytes limit_;
  plan::Traffic traffic_;
  device::ScratchFile file_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool threadless_ = false;
  std::uint64_t end_ = 0;                             // of what has ever been used of the file
  std::multimap<std::uint64_t, std::uint64_t> free_;  // places by size
  std::uint64_t written_ = 0, read_ = 0;
  c10::ThreadPool writer_, reader_;  // last: their threads end before the rest goes
};

}  // namespace memfit::engine
