// The error of a limit that cannot be met while a program runs.
#pragma once

#include <c10/util/Exception.h>

#include <string>

#include "memfit/core/bytes.h"

namespace memfit::engine {

/// Derives from c10::OutOfMemoryError, so handlers that users already have catch it (torch.OutOfMemoryError in Python).
class OutOfBudget : public c10::OutOfMemoryError {
 public:
  OutOfBudget(const std::string& text, Bytes least_limit) : OutOfMemoryError({__func__, __FILE__, __LINE__}, text), least_limit_(least_limit) {}
  /// The smallest tensor limit that would have got past this point.
  Bytes least_limit() const { return least_limit_; }

 private:
  Bytes least_limit_;
};

}  // namespace memfit::engine
