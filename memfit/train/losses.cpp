#include "memfit/train/losses.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "memfit/core/error.h"
#include "memfit/data/array_dataset.h"
#include "memfit/train/choice.h"

namespace memfit::train {
namespace {

using at::Tensor;

std::string shape_text(const Tensor& t) { return fmt::format("{} [{}]", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", ")); }

[[noreturn]] void mismatch(const std::string& loss, const Tensor& output, const Tensor& target, const std::string& wanted) {
  throw UsageError(fmt::format("--loss {}: the model's output is {} and the target {}; {}.", loss, shape_text(output), shape_text(target), wanted));
}

Tensor read_class_weights(const std::string& path) {
  const std::vector<data::NamedArray> arrays = data::map_arrays(path);
  if (arrays.size() != 1 || arrays[0].tensor.dim() != 1) {
    throw UsageError(fmt::format("--loss cross_entropy: class_weights={} must hold one array of one dimension, a weight for each class.", path));
  }
  return arrays[0].tensor.to(at::kFloat).clone();
}

struct CrossEntropy {
  std::optional<std::int64_t> ignore_index, class_dim;
  double smoothing = 0;
  Tensor weights;  // undefined for none

  Tensor reduce(const ClassScores& s, at::Reduction::Reduction how) const {
    // A number that no class can have: ignored targets must be asked for.
    const std::int64_t ignored = ignore_index.value_or(-100);
    return at::cross_entropy_loss(s.scores, s.classes, weights.defined() ? std::optional(weights) : std::nullopt, how, ignored, smoothing);
  }

  ClassScores scores_of(const Tensor& output, const Batch& batch) const {
    ClassScores s = class_scores(output, batch.targets.at(0), class_dim);
    if (weights.defined() && s.scores.size(1) != weights.size(0)) {
      throw UsageError(fmt::format("--loss cross_entropy: class_weights holds {} weights and the model's output {} classes.", weights.size(0), s.scores.size(1)));
    }
    return s;
  }

  double weight_of(const Tensor& classes) const {
    if (at::isFloatingType(classes.scalar_type())) return static_cast<double>(classes.numel() / classes.size(1));
    const Tensor flat = ignore_index ? classes.masked_select(classes.ne(*ignore_index)) : classes.flatten();
    if (!weights.defined()) return static_cast<double>(flat.numel());
    return weights.index_select(0, flat).sum().item<double>();
  }
};

NamedLoss make_cross_entropy(Choice& choice) {
  CrossEntropy c;
  c.ignore_index = choice.whole("ignore_index");
  c.class_dim = choice.whole("class_dim");
  c.smoothing = choice.number("label_smoothing", 0);
  if (c.smoothing < 0 || c.smoothing > 1) throw UsageError(fmt::format("--loss cross_entropy: label_smoothing={}; it is from 0 to 1.", c.smoothing));
  if (const auto path = choice.text("class_weights")) c.weights = read_class_weights(*path);
  NamedLoss out;
  out.takes_classes = true;
  out.ignore_index = c.ignore_index;
  out.class_dim = c.class_dim;
  if (!c.ignore_index && !c.weights.defined()) {  // every row counts the same: Python's mean, with its bits
    out.loss = Loss::mean_over_rows([c](const Tensor& output, const Batch& b) { return c.reduce(c.scores_of(output, b), at::Reduction::Mean); });
  } else {
    out.loss = Loss::sum_and_weight([c](const Tensor& output, const Batch& b) {
      const ClassScores s = c.scores_of(output, b);
      return WeightedSum{c.reduce(s, at::Reduction::Sum), c.weight_of(s.classes)};
    });
  }
  return out;
}

NamedLoss make_ctc(Choice& choice) {
  const std::int64_t blank = choice.whole("blank").value_or(0), padding = choice.whole("padding").value_or(-1);
  const bool zero_infinity = choice.flag("zero_infinity").value_or(false);
  NamedLoss out;
  out.most_targets = 2;
  out.loss = Loss::mean_over_rows([=](const Tensor& output, const Batch& b) {
    const Tensor& labels = b.targets.at(0);
    if (output.dim() != 3 || labels.dim() != 2 || output.size(0) != labels.size(0) || at::isFloatingType(labels.scalar_type())) {
      mismatch("ctc", output, labels, "it takes [N, T, C] and whole numbers [N, S]");
    }
    const Tensor steps = b.targets.size() > 1 ? b.targets[1].to(at::kLong).flatten() : at::full({output.size(0)}, output.size(1), at::kLong);
    const Tensor lengths = labels.ne(padding).sum(1);
    // CTC has no kernel of reduced precision.
    const Tensor likely = at::log_softmax(output.to(at::kFloat), -1).transpose(0, 1);
    return at::ctc_loss(likely, labels.to(at::kLong), steps, lengths, blank, at::Reduction::Mean, zero_infinity);
  });
  return out;
}

NamedLoss make_model_loss(Choice& choice) {
  const bool mean = choice.flag("mean").value_or(false);
  const auto loss = [](const Tensor& output, const Batch&) {
    if (output.numel() != 1 || !at::isFloatingType(output.scalar_type())) {
      throw UsageError(fmt::format("--loss model: the program returns {}, and a loss is a single number. Return the loss first, or name another --loss.", shape_text(output)));
    }
    return output.reshape({});
  };
  NamedLoss out;
  out.fewest_targets = out.most_targets = 0;
  out.loss = mean ? Loss::mean_over_rows(loss) : Loss::whole_batch(loss);
  return out;
}

template <class Function>
NamedLoss elementwise(const std::string& name, Function function) {
  NamedLoss out;
  out.loss = Loss::mean_over_rows([=](const Tensor& output, const Batch& b) { return function(output, like_output(output, b.targets.at(0), name)); });
  return out;
}

NamedLoss make(Choice& choice) {
  const std::string& name = choice.name();
  if (name == "cross_entropy") return make_cross_entropy(choice);
  if (name == "ctc") return make_ctc(choice);
  if (name == "model") return make_model_loss(choice);
  if (name == "mse") return elementwise(name, [](const Tensor& o, const Tensor& t) { return at::mse_loss(o, t); });
  if (name == "l1") return elementwise(name, [](const Tensor& o, const Tensor& t) { return at::l1_loss(o, t); });
  if (name == "huber") {
    const double delta = choice.number("delta", 1);
    if (!(delta > 0)) throw UsageError(fmt::format("--loss huber: delta={}; it must be above 0.", delta));
    return elementwise(name, [delta](const Tensor& o, const Tensor& t) { return at::huber_loss(o, t, at::Reduction::Mean, delta); });
  }
  const std::optional<double> positive = choice.number("pos_weight");
  return elementwise(name, [positive](const Tensor& o, const Tensor& t) {
    const std::optional<Tensor> weight = positive ? std::optional(at::full({1}, *positive, o.options())) : std::nullopt;
    return at::binary_cross_entropy_with_logits(o, t.to(o.scalar_type()), {}, weight);
  });
}

}  // namespace

ClassScores class_scores(const Tensor& output, const Tensor& target, std::optional<std::int64_t> class_dim) {
  const std::string name = "cross_entropy";
  if (output.dim() < 2) mismatch(name, output, target, "the output must have rows and classes");
  if (at::isFloatingType(target.scalar_type())) {
    if (output.sizes() != target.sizes()) mismatch(name, output, target, "probabilities have the output's shape; numbers of classes are int64");
    return {output, target};
  }
  const auto like = [&](std::int64_t dim) {
    std::vector<std::int64_t> rest = output.sizes().vec();
    rest.erase(rest.begin() + dim);
    return at::IntArrayRef(rest) == target.sizes();
  };
  const std::int64_t last = output.dim() - 1;
  if (class_dim && (*class_dim < -1 || *class_dim == 0 || *class_dim > last)) {
    throw UsageError(fmt::format("--loss cross_entropy: class_dim={}; the output is {}, and classes lie along dimension 1 or -1.", *class_dim, shape_text(output)));
  }
  const bool may_second = class_dim ? *class_dim == 1 : true, may_last = class_dim ? *class_dim == -1 || *class_dim == last : true;
  const bool second = may_second && like(1), at_end = may_last && last > 1 && like(last);
  if (second && at_end) mismatch(name, output, target, "classes may lie along dimension 1 or the last; say class_dim=1 or class_dim=-1");
  if (second) return {output, target};
  if (at_end) return {output.flatten(0, -2), target.flatten()};
  // Models of sequences often return [N * T, C].
  if (output.dim() == 2 && target.dim() > 1 && target.numel() == output.size(0)) return {output, target.flatten()};
  mismatch(name, output, target, "an output [N, C], [N, C, ...] or [N, ..., C] takes classes [N, ...]");
}

Tensor like_output(const Tensor& output, const Tensor& target, const std::string& loss) {
  if (output.sizes() == target.sizes()) return target;
  const auto squeezed = [](const Tensor& t) { return t.dim() > 1 && t.size(-1) == 1 ? t.sizes().slice(0, static_cast<std::size_t>(t.dim()) - 1) : t.sizes(); };
  if (squeezed(output) == squeezed(target)) return target.reshape(output.sizes());
  mismatch(loss, output, target, "they must have one shape, because nothing is broadcast");
}

NamedLoss make_loss(const std::string& text) {
  Choice choice("--loss", text, {"cross_entropy", "mse", "l1", "huber", "bce_with_logits", "ctc", "model"});
  NamedLoss out = make(choice);
  choice.done();
  out.name = choice.name();
  return out;
}

}  // namespace memfit::train
