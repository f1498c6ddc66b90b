#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <set>

#include "memfit/core/error.h"
#include "memfit/model/detail/archive.h"
#include "memfit/model/detail/exported_model.h"
#include "memfit/model/model.h"

namespace memfit::model {
namespace {

Format format_of(detail::Archive& archive) {
  if (archive.has("models/model.json")) return Format::Exported;
  if (archive.has("constants.pkl")) return Format::TorchScript;
  if (archive.has("serialized_exported_program.json")) {
    archive.fail("an exported program in the form of an older PyTorch; load it there and save it with torch.export.save of PyTorch " TORCH_VERSION);
  }
  if (archive.has("data.pkl")) {
    archive.fail("weights or other Python objects (torch.save) without a program; save the model with torch.export.save(torch.export.export(model, inputs), "
                 "\"net.pt2\") or torch.jit.script(model).save(\"net.pt\")");
  }
  archive.fail("a PyTorch archive without a program that can be trained; save the model with torch.export.save or torch.jit.save (compiled AOTInductor "
               "packages hold none)");
}

/// Puts buffers and the generator back when it goes.
class KeepState {
 public:
  explicit KeepState(const Model& model) : model_(model), generator_(at::globalContext().defaultGenerator(at::kCPU)) {
    for (const NamedTensor& buffer : model_.buffers()) buffers_.push_back(buffer.tensor.clone());
    random_ = generator_.get_state();
  }
  ~KeepState() {
    for (std::size_t i = 0; i < buffers_.size(); ++i) model_.buffers()[i].tensor.copy_(buffers_[i]);
    generator_.set_state(random_);
  }

 private:
  const Model& model_;
  at::Generator generator_;
  std::vector<at::Tensor> buffers_;
  at::Tensor random_;
};

}  // namespace

std::string_view format_name(Format format) { return format == Format::TorchScript ? "torchscript" : "torch.export"; }

std::unique_ptr<Model> load(const std::string& path, const LoadOptions& options) {
  detail::Archive archive(path);
  const Format format = format_of(archive);
  std::optional<detail::Archive> eval;
  if (!options.eval_path.empty()) {
    eval.emplace(options.eval_path);
    if (format_of(*eval) != format) eval->fail(fmt::format("is in another form than {}; save both in the same way", path));
  }
  detail::Archive* second = eval ? &*eval : nullptr;
  return format == Format::Exported ? detail::load_exported(archive, second) : detail::load_torchscript(archive, second);
}

std::optional<std::string> find_baked_batch(Model& model, const std::vector<at::Tensor>& sample) {
  const at::NoGradGuard no_grad;
  const KeepState keep(model);
  const std::int64_t rows = sample.at(0).size(0);
  model.forward(sample);
  std::vector<at::Tensor> fewer;
  for (const at::Tensor& input : sample) fewer.push_back(input.slice(0, 0, rows - 1));
  try {
    const std::vector<at::Tensor> outputs = model.forward(fewer);
    for (const at::Tensor& output : outputs) {
      if (output.dim() > 0 && output.size(0) == rows) return fmt::format("given {} rows the model still returns {}", rows - 1, rows);
    }
  } catch (const UsageError& error) {
    return error.what();
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string_view what = error.what();
    return fmt::format("given {} rows instead of {} the model fails: {}", rows - 1, rows, what.substr(0, what.find('\n')));
  }
  return std::nullopt;
}

Bytes total_bytes(const std::vector<NamedTensor>& tensors) {
  std::set<const void*> seen;
  Bytes sum;
  for (const NamedTensor& named : tensors) {
    if (seen.insert(named.tensor.storage().unsafeGetStorageImpl()).second) sum += Bytes(named.tensor.storage().nbytes());
  }
  return sum;
}

}  // namespace memfit::model
