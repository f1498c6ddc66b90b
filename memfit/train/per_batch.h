// Notices layers whose result depends on which rows come together: batch normalization in training mode.
// Not here: losses over a whole batch, which say so themselves (batch.h). Threads: watches the thread that makes it.
// Cost: a callback for each op while it lives.
#pragma once

#include <ATen/record_function.h>

#include <memory>
#include <string>

namespace memfit::train {

class PerBatchWatch {
 public:
  PerBatchWatch();
  ~PerBatchWatch();
  PerBatchWatch(const PerBatchWatch&) = delete;
  PerBatchWatch& operator=(const PerBatchWatch&) = delete;

  /// The op that was seen, "" when none was. Instance normalization, which is batch normalization inside, is none.
  const std::string& found() const { return found_; }

 private:
  struct Context;
  static std::unique_ptr<at::ObserverContext> start(const at::RecordFunction& op);
  static void end(const at::RecordFunction& op, at::ObserverContext* context);

  at::CallbackHandle handle_;
  PerBatchWatch* outer_;
  std::string found_;
  int inside_instance_norm_ = 0;
};

}  // namespace memfit::train
