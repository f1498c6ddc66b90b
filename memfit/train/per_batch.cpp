#include "memfit/train/per_batch.h"

#include <ATen/core/ivalue.h>

#include <memory>
#include <string_view>

namespace memfit::train {
namespace {

thread_local PerBatchWatch* watch = nullptr;

/// Position of the argument that says whether statistics are the batch's own.
int training_argument(std::string_view op) {
  if (op == "aten::batch_norm" || op == "aten::native_batch_norm") return 5;
  return -1;
}

}  // namespace

struct PerBatchWatch::Context : at::ObserverContext {};

PerBatchWatch::PerBatchWatch() : outer_(watch) {
  watch = this;
  handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(&start, &end).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

PerBatchWatch::~PerBatchWatch() {
  at::removeCallback(handle_);
  watch = outer_;
}

std::unique_ptr<at::ObserverContext> PerBatchWatch::start(const at::RecordFunction& op) {
  if (watch == nullptr) return nullptr;
  const std::string_view name = op.name();
  if (name == "aten::instance_norm") {
    ++watch->inside_instance_norm_;
    return std::make_unique<Context>();
  }
  const int at = training_argument(name);
  if (at < 0 || watch->inside_instance_norm_ > 0) return nullptr;
  const auto inputs = op.inputs();
  const auto index = static_cast<std::size_t>(at);
  if (index < inputs.size() && inputs[index].isBool() && inputs[index].toBool()) watch->found_ = "batch normalization";
  return nullptr;
}

void PerBatchWatch::end(const at::RecordFunction&, at::ObserverContext* context) {
  if (context != nullptr && watch != nullptr) --watch->inside_instance_norm_;
}

}  // namespace memfit::train
