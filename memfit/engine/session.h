// memfit for a program of one's own: hold PyTorch tensors under a limit while the object lives.
//   memfit::engine::Session session({.tensor_memory = 150_MiB});
//   ... an ordinary LibTorch training loop ...
// Not here: programs that one does not build oneself (`memfit run`).
// Threads: make it on the thread that trains; other threads that run ops call cover_this_thread() first (under
//          `memfit run` that happens by itself).
// Cost: about 1 us an op.
#pragma once

#include <string>

#include "memfit/core/bytes.h"

namespace memfit::engine {

struct SessionOptions {
  /// Tensor bytes may never exceed this. Default: no limit, only counting.
  Bytes tensor_memory{};
  /// Check recomputed bytes against checksums of the originals. Default off; costs a pass over each evicted tensor.
  bool verify = false;
  /// Steps that come again run by plan. Default: yes. Off only to compare: decide eviction by eviction.
  bool plan = true;
  /// Folder on a disk that tensors may be moved to. Default: none. The files have no name and go with the process.
  std::string offload{};
  /// Use at most this much of it. Default: what is free there.
  Bytes offload_limit{};
  /// Place in PyTorch's dispatcher: "fake", "generic_mode", or "" to choose. For testing.
  std::string door{};
};

struct SessionStats {
  Bytes limit, live, cached, peak, unlimited_peak;
  std::uint64_t ops = 0, evictions = 0, recomputed_ops = 0;
  std::uint64_t planned_steps = 0, replanned = 0, packed = 0;  // steps run by plan, plans made anew, tensors kept in a short form
  Bytes offload_written, offload_read;
  double recompute_seconds = 0, search_seconds = 0;
};

/// Installs on construction, lifts the limit on destruction. One at a time; a second one changes the limit until it ends.
/// Throws: UsageError when `door` is unknown or taken, or `offload` cannot serve.
class Session {
 public:
  explicit Session(const SessionOptions& options);
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  /// New limit, 0 bytes for none. Returns the old one. Takes effect with the next allocation.
  Bytes set_tensor_memory(Bytes limit);
  SessionStats stats() const;
  /// Watch the calling thread's ops too.
  static void cover_this_thread();

 private:
  Bytes old_limit_;
  bool covered_before_;
};

}  // namespace memfit::engine
