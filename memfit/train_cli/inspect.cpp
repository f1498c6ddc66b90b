// memfit inspect: what a model file holds, what training it takes before the first activation, and why it cannot be trained.
#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>

#include <array>
#include <memory>
#include <nlohmann/json.hpp>

#include "memfit/core/bytes.h"
#include "memfit/model/model.h"
#include "memfit/train_cli/verbs.h"

namespace memfit::train_cli {
namespace {

using Json = nlohmann::ordered_json;
using model::Model;

struct Options {
  std::string model, eval_model;
  bool json = false;
};

/// State tensors an optimizer keeps of a parameter's shape.
struct StateOf {
  const char* optimizer;
  std::uint64_t slots;
};
constexpr std::array<StateOf, 5> kOptimizers{{{"sgd", 0}, {"sgd,momentum", 1}, {"lion", 1}, {"adam", 2}, {"adamw", 2}}};

std::int64_t elements(const std::vector<model::NamedTensor>& tensors) {
  std::int64_t sum = 0;
  for (const auto& named : tensors) sum += named.tensor.numel();
  return sum;
}

Bytes trained_bytes(const Model& model) {
  Bytes sum;
  for (const auto& parameter : model.parameters()) {
    if (parameter.tensor.requires_grad()) sum += Bytes(parameter.tensor.nbytes());
  }
  return sum;
}

Json input_json(const model::Input& input) {
  Json shape;
  if (input.shape) {
    shape = Json::array();
    for (const model::Dimension& dimension : *input.shape) shape.push_back(dimension.size ? Json(*dimension.size) : Json(dimension.symbol));
  }
  return {{"name", input.name}, {"dtype", input.type ? Json(c10::getDtypeNames(*input.type).first) : Json()}, {"shape", shape}};
}

const char* mode_name(model::Mode mode) {
  switch (mode) {
    case model::Mode::Train: return "train";
    case model::Mode::Eval: return "eval";
    default: return "either";
  }
}

Json describe(const Model& model) {
  const auto reason = model.why_not_trainable();
  Json json{{"format", model::format_name(model.format())}, {"parameters", elements(model.parameters())},
            {"parameter_bytes", model::total_bytes(model.parameters()).count()}, {"parameter_tensors", model.parameters().size()},
            {"buffers", elements(model.buffers())}, {"buffer_bytes", model::total_bytes(model.buffers()).count()},
            {"buffer_tensors", model.buffers().size()}, {"inputs", Json::array()}, {"trainable", !reason}, {"why_not", reason ? Json(*reason) : Json()},
            {"trains_as", mode_name(model.mode_of(true))}, {"evaluates_as", mode_name(model.mode_of(false))}};
  for (const model::Input& input : model.inputs()) json["inputs"].push_back(input_json(input));
  const Bytes trained = trained_bytes(model), fixed = model::total_bytes(model.parameters()) + model::total_bytes(model.buffers());
  json["gradient_bytes"] = trained.count();
  json["training_bytes_without_activations"] = Json::object();
  for (const StateOf& one : kOptimizers) json["training_bytes_without_activations"][one.optimizer] = (fixed + trained + trained * one.slots).count();
  return json;
}

std::string size_text(const Json& count) { return format_bytes(Bytes(count.get<std::uint64_t>())); }

void print_text(const Json& json, const Options& options) {
  fmt::print("{}: {}\n", options.model, json["format"].get<std::string>());
  fmt::print("  parameters  {:>14}  in {} tensors, {}\n", json["parameters"].get<std::int64_t>(), json["parameter_tensors"].get<std::size_t>(), size_text(json["parameter_bytes"]));
  fmt::print("  buffers     {:>14}  in {} tensors, {}\n", json["buffers"].get<std::int64_t>(), json["buffer_tensors"].get<std::size_t>(), size_text(json["buffer_bytes"]));
  for (const Json& input : json["inputs"]) {
    std::vector<std::string> shape;
    for (const Json& size : input["shape"]) shape.push_back(size.is_string() ? size.get<std::string>() : size.dump());
    if (input["shape"].is_null()) {
      fmt::print("  input       {} (a TorchScript file does not say its type and shape)\n", input["name"].get<std::string>());
    } else {
      fmt::print("  input       {}  {} [{}]\n", input["name"].get<std::string>(), input["dtype"].get<std::string>(), fmt::join(shape, ", "));
    }
  }
  if (!json["trainable"].get<bool>()) {
    fmt::print("  cannot be trained: {}\n", json["why_not"].get<std::string>());
    return;
  }
  fmt::print("  evaluation  {}\n", json["evaluates_as"] == "train" ? "needs a second file, exported after model.eval()" : "with this file");
  fmt::print("Training takes, before inputs and activations (weights, buffers, gradients {}, optimizer state):\n", size_text(json["gradient_bytes"]));
  for (const auto& [name, bytes] : json["training_bytes_without_activations"].items()) fmt::print("  {:<14}{:>12}\n", name, size_text(bytes));
}

void run(const Options& options) {
  const auto model = model::load(options.model, {.eval_path = options.eval_model});
  const Json json = describe(*model);
  if (options.json) {
    fmt::print("{}\n", json.dump(2));
  } else {
    print_text(json, options);
  }
}

}  // namespace

void add_inspect(CLI::App& app) {
  const auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("inspect", "Show what a model file holds and what training it takes");
  verb->add_option("FILE", options->model, "torch.export program (.pt2) or TorchScript file")->required();
  verb->add_option("--eval-model", options->eval_model, "The same model exported in eval mode");
  verb->add_flag("--json", options->json, "Print JSON");
  verb->callback([options] { run(*options); });
}

}  // namespace memfit::train_cli
