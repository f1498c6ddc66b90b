// Our own file format for recorded steps (.mft): writer and reader. Specified in docs/formats/mft.md.
// Not here: foreign formats (snapshot/). The reader takes its input as hostile: every length is checked against what is left,
// every section carries a checksum, and what it returns keeps the rules of step.h.
// Threads: any, no state. Cost: one pass; the reader's memory is at most 40 times the size of the file.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "memfit/trace/step.h"

namespace memfit::trace {

inline constexpr std::uint32_t kMftVersion = 1;

/// What a file says about all of its steps.
struct TraceInfo {
  std::string program;  // as it was started
  std::string torch_version;
  std::string device;   // "cpu", "cuda:0 NVIDIA H200"
  std::string recorder;  // version of memfit

  bool operator==(const TraceInfo&) const = default;
};

struct Trace {
  TraceInfo info;
  std::vector<Step> steps;

  bool operator==(const Trace&) const = default;
};

/// Requires: find_fault() finds nothing in any step.
std::string encode_mft(const Trace& trace);

/// `file` names the input in errors.
/// Throws:   BadInput with the offset of what is wrong: foreign, newer (both versions named), truncated, corrupt, or against
///           the rules of a step.
Trace decode_mft(std::string_view data, const std::string& file);

/// Write beside `path`, flush to the disk, then rename: a crash leaves the old file or the new one.
/// Throws:   Error when `path` exists and not `force`, or the operating system refuses.
void write_mft(const Trace& trace, const std::string& path, bool force = false);

/// Throws:   BadInput as decode_mft does; Error when the file cannot be read.
Trace read_mft(const std::string& path);

}  // namespace memfit::trace
