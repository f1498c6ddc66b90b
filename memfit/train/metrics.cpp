#include "memfit/train/metrics.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>

#include "memfit/core/error.h"
#include "memfit/train/choice.h"

namespace memfit::train {
namespace {

using at::Tensor;

/// Scores and classes of the rows that count: [M, C] and [M].
ClassScores counted(const Tensor& output, const Batch& batch, const NamedLoss& loss) {
  ClassScores s = class_scores(output, batch.targets.at(0), loss.class_dim);
  if (at::isFloatingType(s.classes.scalar_type())) s.classes = s.classes.argmax(1);
  s.scores = s.scores.movedim(1, -1).flatten(0, -2);
  s.classes = s.classes.flatten();
  if (!loss.ignore_index) return s;
  const Tensor keep = s.classes.ne(*loss.ignore_index).nonzero().flatten();
  return {s.scores.index_select(0, keep), s.classes.index_select(0, keep)};
}

WeightedSum count_hits(const Tensor& hits, const Tensor& classes) { return {hits.sum().to(at::kDouble), static_cast<double>(classes.size(0))}; }

double same(double mean) { return mean; }

}  // namespace

Metric make_metric(const std::string& text, const NamedLoss& loss) {
  Choice choice("--metric", text, {"accuracy", "topk", "perplexity", "mae"});
  const std::int64_t k = choice.name() == "topk" ? choice.whole("k").value_or(5) : 1;
  choice.done();
  if (k < 1) throw UsageError(fmt::format("--metric topk: k={}; it is at least 1.", k));
  Metric out;
  out.name = choice.name() == "topk" ? fmt::format("top{}", k) : choice.name();
  out.finish = same;
  if (choice.name() == "mae") {
    out.add = [](const Tensor& o, const Batch& b) {
      const Tensor target = like_output(o, b.targets.at(0), "mae");
      return WeightedSum{(o.to(at::kDouble) - target.to(at::kDouble)).abs().sum(), static_cast<double>(target.numel())};
    };
    return out;
  }
  if (!loss.takes_classes) throw UsageError(fmt::format("--metric {}: the loss {} has no classes; it goes with --loss cross_entropy.", out.name, loss.name));
  if (choice.name() == "perplexity") {
    out.finish = [](double mean) { return std::exp(mean); };
    out.add = [loss](const Tensor& o, const Batch& b) {
      const ClassScores s = counted(o, b, loss);
      return WeightedSum{at::cross_entropy_loss(s.scores, s.classes, {}, at::Reduction::Sum).to(at::kDouble), static_cast<double>(s.classes.size(0))};
    };
  } else if (k == 1) {
    out.add = [loss](const Tensor& o, const Batch& b) {
      const ClassScores s = counted(o, b, loss);
      return count_hits(s.scores.argmax(1).eq(s.classes), s.classes);
    };
  } else {
    out.add = [loss, k](const Tensor& o, const Batch& b) {
      const ClassScores s = counted(o, b, loss);
      if (k > s.scores.size(1)) throw UsageError(fmt::format("--metric topk: k={} of {} classes.", k, s.scores.size(1)));
      return count_hits(std::get<1>(s.scores.topk(k, 1)).eq(s.classes.unsqueeze(1)), s.classes);
    };
  }
  return out;
}

}  // namespace memfit::train
