// Losses by name, for those who choose on a command line; each says how it reduces, so that it can be split exactly.
// Not here: losses of one's own (batch.h). Threads: any. Cost: that of the operators, PyTorch's own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "memfit/train/batch.h"

namespace memfit::train {

struct NamedLoss {
  std::string name;
  Loss loss;
  /// Tensors of Batch::targets: 1; ctc takes 1 or 2 ("model" none).
  std::size_t fewest_targets = 1, most_targets = 1;
  /// The target holds numbers of classes: [0, C), or ignore_index.
  bool takes_classes = false;
  std::optional<std::int64_t> ignore_index;
  /// Where the classes lie in the output; found by itself where there is only one way.
  std::optional<std::int64_t> class_dim;
};

/// With settings as PyTorch names them:
///   cross_entropy  ignore_index, label_smoothing, class_weights=FILE.npy, class_dim. Output [N, C], [N, C, d...] or [N, d..., C] and classes
///                  [N, d...]; or probabilities of the output's shape. Without ignore_index every class number must be one.
///   mse, l1, huber (delta), bce_with_logits (pos_weight): output and target of one shape; nothing is broadcast.
///   ctc            blank, padding (default -1), zero_infinity. Output [N, T, C], logits or their log_softmax; labels [N, S], padded at the
///                  end; a second target is the length of each output.
///   model          the program's own loss, a single number. Never split unless mean=true says that it is a mean over rows.
/// Throws:   UsageError with the nearest name; BadInput for the weights' file. Called on a batch: UsageError with both shapes.
NamedLoss make_loss(const std::string& text);

/// Output and classes as cross_entropy_loss takes them: classes along dimension 1.
struct ClassScores {
  at::Tensor scores, classes;
};
/// `class_dim`: as in NamedLoss. Throws: UsageError with both shapes where they do not belong together or it is not clear how.
ClassScores class_scores(const at::Tensor& output, const at::Tensor& target, std::optional<std::int64_t> class_dim);

/// The target in the output's shape where only a trailing dimension of 1 differs. Throws: UsageError with both shapes.
at::Tensor like_output(const at::Tensor& output, const at::Tensor& target, const std::string& loss);

}  // namespace memfit::train
