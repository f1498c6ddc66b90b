// A small GPT in C++, trained byte by byte on a text file, without a limit and within one.
//   train_text_cpp FILE SHARE     e.g. train_text_cpp .venv/lib/python3.11/site-packages/torch/_torch_docs.py 0.4
// The second run may use that share of the first one's peak. Its batches are then split; the losses stay the same.
#include <ATen/CPUGeneratorImpl.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "memfit/optim/adam.h"
#include "memfit/train/trainer.h"

namespace nn = torch::nn;
using at::Tensor;
using memfit::Bytes;

struct BlockImpl : nn::Module {
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
  std::int64_t heads;
  BlockImpl(std::int64_t width, std::int64_t heads)
      : norm1(register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({width})))),
        norm2(register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({width})))),
        qkv(register_module("qkv", nn::Linear(width, 3 * width))), out(register_module("out", nn::Linear(width, width))),
        up(register_module("up", nn::Linear(width, 4 * width))), down(register_module("down", nn::Linear(4 * width, width))), heads(heads) {}
  Tensor forward(const Tensor& x) {
    const std::int64_t rows = x.size(0), length = x.size(1), width = x.size(2);
    const std::vector<Tensor> parts = qkv(norm1(x)).view({rows, length, 3, heads, width / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const Tensor seen = at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, true);
    const Tensor y = x + out(seen.transpose(1, 2).reshape({rows, length, width}));
    return y + down(at::gelu(up(norm2(y))));
  }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
  nn::Embedding bytes, places;
  nn::Sequential blocks;
  nn::Linear head;
  GptImpl(std::int64_t length, std::int64_t width, std::int64_t layers)
      : bytes(register_module("bytes", nn::Embedding(256, width))), places(register_module("places", nn::Embedding(length, width))),
        blocks(register_module("blocks", nn::Sequential())), head(register_module("head", nn::Linear(width, 256))) {
    for (std::int64_t i = 0; i < layers; ++i) blocks->push_back(Block(width, 4));
  }
  Tensor forward(const Tensor& x) { return head(blocks->forward(bytes(x) + places->weight)).flatten(0, 1); }
};
TORCH_MODULE(Gpt);

/// Windows of the text, at places that the epoch decides.
class Windows : public memfit::train::BatchSource {
 public:
  Windows(const std::string& text, std::int64_t length, std::int64_t rows, std::int64_t batches)
      : text_(at::empty({static_cast<std::int64_t>(text.size())}, at::kLong)), length_(length), rows_(rows), batches_(batches) {
    for (std::size_t i = 0; i < text.size(); ++i) text_.mutable_data_ptr<std::int64_t>()[i] = static_cast<unsigned char>(text[i]);
  }
  std::optional<memfit::train::Batch> next() override {
    if (at_ == batches_) return std::nullopt;
    const auto seed = static_cast<std::uint64_t>(epoch_ * batches_ + at_++);
    const Tensor starts = at::randint(text_.size(0) - length_, {rows_, 1}, at::detail::createCPUGenerator(seed), at::kLong);
    const Tensor places = starts + at::arange(length_ + 1);
    const Tensor window = text_.index({places});
    return memfit::train::Batch{{window.narrow(1, 0, length_)}, {window.narrow(1, 1, length_)}, rows_};
  }
  void reset(std::int64_t epoch) override { epoch_ = epoch, at_ = 0; }
  nlohmann::json state() const override { return {{"epoch", epoch_}, {"at", at_}}; }
  void load_state(const nlohmann::json& state) override { epoch_ = state.at("epoch"), at_ = state.at("at"); }

 private:
  Tensor text_;
  std::int64_t length_, rows_, batches_, epoch_ = 0, at_ = 0;
};

struct Result {
  std::vector<double> losses;
  double seconds = 0;
  Bytes peak;
  std::int64_t rows_at_a_time = 0;
};

Result train(Windows& source, Bytes limit) {
  at::manual_seed(0);
  Gpt model(64, 64, 4);
  memfit::train::Trainer trainer(memfit::train::model_of(model), std::make_shared<memfit::optim::AdamW>(*model, memfit::optim::AdamOptions{}),
                                 {.memory = limit, .schedule = memfit::train::linear_warmup(4, memfit::train::constant())});
  const auto loss = memfit::train::Loss::sum_and_weight([](const Tensor& out, const memfit::train::Batch& b) {
    const Tensor targets = b.targets[0].flatten();
    return memfit::train::WeightedSum{at::cross_entropy_loss(out, targets, {}, at::Reduction::Sum), static_cast<double>(targets.numel())};
  });
  Result out;
  memfit::train::FitOptions fit;
  fit.on_step = [&](const memfit::train::StepReport& r) {
    out.losses.push_back(r.loss);
    out.seconds += r.seconds;
    out.peak = std::max(out.peak, *r.peak);
  };
  source.reset(0);
  trainer.fit(source, loss, fit);
  out.rows_at_a_time = trainer.micro_batch();
  return out;
}

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: train_text_cpp FILE SHARE\n");
    return 2;
  }
  std::ifstream file(argv[1], std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const double share = std::atof(argv[2]);
  if (text.size() < 1000 || !(share > 0 && share < 1)) {
    std::fprintf(stderr, "train_text_cpp: \"%s\" is no text of 1000 bytes or more, or %s is no share between 0 and 1\n", argv[1], argv[2]);
    return 2;
  }
  try {
    Windows source(text, 64, 64, 12);
    const Result plain = train(source, Bytes(1ULL << 40));  // a limit that never binds: counted, not held back
    const Result limited = train(source, Bytes(static_cast<std::uint64_t>(share * static_cast<double>(plain.peak.count()))));
    double worst = 0;
    for (std::size_t i = 0; i < plain.losses.size(); ++i) worst = std::max(worst, std::abs(limited.losses[i] / plain.losses[i] - 1));
    std::printf("plain    loss %.6f to %.6f  peak %s  %.2f s\n", plain.losses.front(), plain.losses.back(), memfit::format_bytes(plain.peak).c_str(), plain.seconds);
    std::printf("limited  loss %.6f to %.6f  peak %s  %.2f s  %lld rows at a time\n", limited.losses.front(), limited.losses.back(),
                memfit::format_bytes(limited.peak).c_str(), limited.seconds, static_cast<long long>(limited.rows_at_a_time));
    std::printf("largest relative difference of a loss: %.2g\n", worst);
    return worst < 1e-5 && plain.losses.back() < plain.losses.front() ? 0 : 1;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
