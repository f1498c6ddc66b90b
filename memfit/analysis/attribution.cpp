#include "memfit/analysis/attribution.h"

#include <fmt/format.h>

#include <array>

namespace memfit::analysis {

std::string_view name_of(Category category) {
  static constexpr std::array<std::string_view, kCategories> kNames = {
      "parameter",     "gradient",  "optimizer", "activation", "input",
      "communication", "workspace", "other",     "unknown",    "unrecorded"};
  return kNames[static_cast<std::size_t>(category)];
}

namespace {

/// What one frame says about the stack it stands in. Bits, so that a frame is looked at once.
enum Sign : std::uint32_t {
  kAccumulateGrad = 1,
  kBackward = 2,
  kOptimizerState = 4,
  kOptimizer = 8,
  kCollective = 16,
  kWorkspace = 32,
  kLoader = 64,
  kBuilds = 128,
  kForward = 256,
  kLibrary = 512,
  kNative = 1024,
};

bool has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }
bool ends(std::string_view text, std::string_view part) {
  return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}

std::uint32_t signs_of(std::string_view function, std::string_view file) {
  std::uint32_t signs = 0;
  const bool python = ends(file, ".py") || has(file, ".py") || file.substr(0, 1) == "<";
  if (!python) signs |= kNative;
  if (has(file, "site-packages") || has(file, "dist-packages") || has(file, "/torch/") || has(file, "lib/python") ||
      file.substr(0, 1) == "<" || file.empty())
    signs |= kLibrary;
  if (has(function, "AccumulateGrad") || has(function, "accumulate_grad")) signs |= kAccumulateGrad | kBackward;
  if (has(function, "_engine_run_backward") || has(function, "run_backward") || has(function, "autograd::Engine::") ||
      (function == "backward" && (has(file, "torch/_tensor.py") || has(file, "torch/autograd/"))))
    signs |= kBackward;
  if (has(file, "torch/optim/") || has(file, "/optimizers/") || has(file, "bitsandbytes/optim") ||
      has(file, "deepspeed/ops/adam")) {
    signs |= kOptimizer;
    if (has(function, "init_group") || has(function, "init_state") || has(function, "_init_")) signs |= kOptimizerState;
  }
  if (has(file, "torch/distributed/") || has(function, "ProcessGroupNCCL") || has(function, "c10d::"))
    signs |= kCollective;
  if (has(function, "Workspace") || has(function, "workspace") || has(function, "cublasCreate") ||
      has(function, "CudnnHandle"))
    signs |= kWorkspace;
  if (has(file, "torch/utils/data/") || has(function, "pin_memory")) signs |= kLoader;
  const bool module = has(file, "torch/nn/modules/");
  if (has(function, "reset_parameters") || has(function, "from_pretrained") || has(function, "load_state_dict") ||
      has(function, "_load_from_state_dict") ||
      (module && (function == "_apply" || function == "convert" || function == "cuda" || function == "to" ||
                  function == "to_empty" || function == "__init__")) ||
      has(file, "torch/nn/parameter.py"))
    signs |= kBuilds;
  if (function == "forward" || has(function, "_call_impl") || has(file, "torch/nn/functional.py")) signs |= kForward;
  return signs;
}

struct Rule {
  std::uint32_t sign;
  Category category;
  const char* text;
};

/// The first rule whose sign is anywhere in the stack decides.
constexpr Rule kRules[] = {
    {kWorkspace, Category::Workspace, "a frame names a library workspace"},
    {kOptimizerState, Category::Optimizer, "allocated while torch.optim sets up its state"},
    {kOptimizer, Category::Optimizer, "allocated inside torch.optim"},
    {kCollective, Category::Communication, "allocated inside torch.distributed"},
    {kAccumulateGrad, Category::Gradient, "allocated by AccumulateGrad"},
    {kBackward, Category::Gradient, "allocated while autograd runs backward"},
    {kLoader, Category::Input, "allocated inside torch.utils.data"},
    {kBuilds, Category::Parameter, "allocated while a module is built, moved or loaded"},
    {kForward, Category::Activation, "allocated inside a module's forward"},
};

}  // namespace

Attribution::Attribution(const trace::AllocatorSnapshot& snapshot) : snapshot_(snapshot) {
  std::vector<std::uint32_t> signs(snapshot.frames.size());
  for (std::size_t i = 0; i < signs.size(); ++i)
    signs[i] = signs_of(snapshot.text(snapshot.frames[i].function), snapshot.text(snapshot.frames[i].file));
  const std::size_t stacks = snapshot.stack_begin.empty() ? 0 : snapshot.stack_begin.size() - 1;
  owners_.resize(stacks);
  for (std::size_t s = 0; s < stacks; ++s) {
    StackOwner& owner = owners_[s];
    std::uint32_t all = 0;
    std::int64_t user = -1, python = -1;
    const std::uint32_t begin = snapshot.stack_begin[s], end = snapshot.stack_begin[s + 1];
    for (std::uint32_t f = begin; f < end; ++f) {
      const std::uint32_t sign = signs[snapshot.stack_frames[f]];
      all |= sign;
      if (user < 0 && (sign & (kLibrary | kNative)) == 0) user = f;
      if (python < 0 && (sign & kNative) == 0) python = f;
    }
    if (begin == end) {
      owner.rule = "no stack was recorded";
      continue;
    }
    // Innermost frame of the program itself; failing that of Python; failing that any.
    owner.place = snapshot.stack_frames[static_cast<std::size_t>(user >= 0 ? user : python >= 0 ? python : begin)];
    owner.has_place = true;
    owner.category = Category::Other;
    owner.rule = "no rule matched its frames";
    for (const Rule& rule : kRules) {
      if ((all & rule.sign) == 0) continue;
      owner.category = rule.category;
      owner.rule = rule.text;
      break;
    }
  }
}

std::string Attribution::where(trace::StackId stack) const {
  const StackOwner& owner = owners_[stack];
  if (!owner.has_place) return "(no stack)";
  const trace::Frame& frame = snapshot_.frames[owner.place];
  std::string_view file = snapshot_.text(frame.file);
  if (const auto slash = file.rfind('/'); slash != std::string_view::npos) file = file.substr(slash + 1);
  const auto shown = [](std::string_view text) {
    // Names come from a file: cut to a length that stays readable, at a character's start.
    if (text.size() <= 120) return std::string(text);
    std::size_t cut = 117;
    while (cut > 0 && (static_cast<unsigned char>(text[cut]) & 0xc0) == 0x80) --cut;
    return std::string(text.substr(0, cut)) + "...";
  };
  if (file.empty() || file == "??") return shown(snapshot_.text(frame.function));
  return fmt::format("{}:{} {}", shown(file), frame.line, shown(snapshot_.text(frame.function)));
}

std::uint64_t Attribution::place_key(trace::StackId stack) const {
  const StackOwner& owner = owners_[stack];
  if (!owner.has_place) return 0;
  return (std::uint64_t{owner.place} + 1) << 8 | static_cast<std::uint64_t>(owner.category);
}

}  // namespace memfit::analysis
