// The errors memfit throws and the exit status each becomes on the command line.
// Not here: OutOfBudget, which derives from c10::OutOfMemoryError and lives in memory/.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace memfit {

/// Exit status of `memfit` itself (a program run under memfit keeps its own).
enum class ExitStatus : int { Fine = 0, Failed = 1, Usage = 2, DoesNotFit = 3, BadInput = 4, DeviceUnavailable = 5 };

/// Base of all. what() is one or more sentences that name the thing, the place and the way out.
class Error : public std::runtime_error {
 public:
  Error(ExitStatus status, const std::string& text) : std::runtime_error(text), status_(status) {}
  ExitStatus status() const { return status_; }

 private:
  ExitStatus status_;
};

/// A flag, an option or an argument is wrong.
class UsageError : public Error {
 public:
  explicit UsageError(const std::string& text) : Error(ExitStatus::Usage, text) {}
};

/// A limit cannot be met (offline: plans). Under a running program it is memory's OutOfBudget instead.
class DoesNotFit : public Error {
 public:
  explicit DoesNotFit(const std::string& text) : Error(ExitStatus::DoesNotFit, text) {}
};

/// A file is not what it should be. what() = "FILE: at byte OFFSET: REASON".
class BadInput : public Error {
 public:
  BadInput(const std::string& file, std::uint64_t offset, const std::string& reason)
      : Error(ExitStatus::BadInput, file + ": at byte " + std::to_string(offset) + ": " + reason), offset_(offset) {}
  std::uint64_t offset() const { return offset_; }

 private:
  std::uint64_t offset_;
};

}  // namespace memfit
