// The file that a recording goes to: written when the recorder is sure of it, so that a program that is killed leaves
// it too, and again at the end.
// Not here: recording (engine/recorder.h), the format (trace/mft.h).
// Threads: any. Cost: one encoding of the step and one file, twice.
#pragma once

#include <mutex>
#include <string>

#include "memfit/engine/recorder.h"

namespace memfit::engine {

class RecordingFile {
 public:
  /// Throws: UsageError naming MEMFIT_RECORD when `path` cannot be written, or exists and not `force`.
  RecordingFile(Recorder& recorder, const std::string& path, bool force);
  /// Write what has been recorded so far. `final`: nothing more will come, so without a step the whole run is taken.
  /// Returns:  what there is to say of it, in one or two sentences.
  std::string save(bool final) noexcept;
  const std::string& path() const { return path_; }

 private:
  Recorder& recorder_;
  std::string path_;     // absolute
  bool force_;
  std::mutex mutex_;
};

}  // namespace memfit::engine
