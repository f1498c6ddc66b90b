#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "memfit/model/detail/program.h"
#include "memfit/model/detail/schema_numbers.h"

namespace memfit::model::detail {
namespace {

using Json = nlohmann::json;

// The form of the serialized program that this reader knows: torch/_export/serde/schema.py.
constexpr int kSchemaMajor = 8;

/// "Symbol('s77', positive=True, integer=True)" is s77; other expressions stay as they are.
std::string symbol_name(const std::string& expression) {
  constexpr std::string_view kStart = "Symbol('";
  const std::size_t end = expression.find('\'', kStart.size());
  const bool alone = expression.starts_with(kStart) && end != std::string::npos && expression.find('(', kStart.size()) == std::string::npos;
  return alone ? expression.substr(kStart.size(), end - kStart.size()) : expression;
}

Input read_input(const Json& graph, const std::string& name) {
  const Json& meta = graph.at("tensor_values").at(name);
  Input input{name, scalar_type_of(meta.at("dtype").get<int>()), std::vector<Dimension>{}};
  for (const Json& size : meta.at("sizes")) {
    if (size.contains("as_int")) {
      input.shape->push_back({size.at("as_int").get<std::int64_t>(), ""});
    } else {
      input.shape->push_back({std::nullopt, symbol_name(size.at("as_expr").at("expr_str").get<std::string>())});
    }
  }
  return input;
}

class ProgramReader {
 public:
  ProgramReader(Archive& archive, Weights& weights, const Weights* shared) : archive_(archive), weights_(weights), shared_(shared) {}

  Program read() {
    const Json json = archive_.read_json("models/model.json");
    check_version(json);
    if (shared_ == nullptr) read_tensors(archive_, "data/weights/", "model_weights_config.json", weights_.by_name);
    read_tensors(archive_, "data/constants/", "model_constants_config.json", constants_);
    const Json& graph = json.at("graph_module").at("graph");
    const Json& signature = json.at("graph_module").at("signature");
    program_.file = archive_.path();
    program_.graph = read_graph(graph, archive_.path());
    for (const Json& spec : signature.at("input_specs")) read_source(spec, graph);
    for (const Json& spec : signature.at("output_specs")) program_.mutated.push_back(mutated_tensor(spec));
    if (program_.sources.size() != program_.graph->inputs.size() || program_.mutated.size() != program_.graph->outputs.size()) {
      archive_.fail("the program's signature and its graph have different numbers of inputs or outputs");
    }
    for (const auto& [symbol, range] : json.at("range_constraints").items()) {
      const auto bound = [&](const char* key, std::int64_t open) { return range.at(key).is_number() ? range.at(key).get<std::int64_t>() : open; };
      program_.ranges[symbol] = {bound("min_val", 0), bound("max_val", std::numeric_limits<std::int64_t>::max())};
    }
    return std::move(program_);
  }

 private:
  void check_version(const Json& json) const {
    const int major = json.at("schema_version").at("major").get<int>();
    if (major == kSchemaMajor) return;
    archive_.fail(fmt::format("an exported program of form {}, written by PyTorch {}; form {} is read. Export it with the PyTorch that memfit is built with ({})", major,
                              json.value("torch_version", "?"), kSchemaMajor, TORCH_VERSION));
  }

  const at::Tensor& find(const std::map<std::string, at::Tensor>& tensors, const std::string& name) const {
    const auto place = tensors.find(name);
    if (place == tensors.end()) {
      archive_.fail(fmt::format("the program uses {}, which is not among its weights{}", name, shared_ == nullptr ? "" : " (those of the training export)"));
    }
    return place->second;
  }

  const std::map<std::string, at::Tensor>& stored() const { return shared_ != nullptr ? shared_->by_name : weights_.by_name; }

  /// Buffers that are not persistent are stored with the constants.
  const at::Tensor& buffer(const std::string& name, bool persistent) {
    if (persistent) return find(stored(), name);
    const auto [place, is_new] = weights_.by_name.try_emplace(name);
    if (is_new) place->second = shared_ != nullptr && shared_->by_name.contains(name) ? shared_->by_name.at(name) : find(constants_, name);
    return place->second;
  }

  void note(std::vector<NamedTensor>& once, const std::string& name, const at::Tensor& tensor, bool persistent) {
    if (persistent) weights_.state.push_back({name, tensor});
    if (seen_.insert(tensor.unsafeGetTensorImpl()).second) once.push_back({name, tensor});
  }

  void read_source(const Json& spec, const Json& graph) {
    Source source;
    if (spec.contains("parameter")) {
      const auto name = spec["parameter"].at("parameter_name").get<std::string>();
      const at::Tensor& tensor = find(stored(), name);
      note(weights_.parameters, name, tensor, true);
      source.value = tensor;
    } else if (spec.contains("buffer")) {
      const auto name = spec["buffer"].at("buffer_name").get<std::string>();
      const bool persistent = spec["buffer"].at("persistent").get<bool>();
      const at::Tensor& tensor = buffer(name, persistent);
      note(weights_.buffers, name, tensor, persistent);
      source.value = tensor;
    } else if (spec.contains("tensor_constant")) {
      source.value = find(constants_, spec["tensor_constant"].at("tensor_constant_name").get<std::string>());
    } else if (spec.contains("user_input")) {
      const Json& argument = spec["user_input"].at("arg");
      if (argument.contains("as_tensor")) {
        source.input = static_cast<int>(program_.inputs.size());
        program_.inputs.push_back(read_input(graph, argument["as_tensor"].at("name").get<std::string>()));
      } else if (!argument.contains("as_none") && !argument.contains("as_int") && !argument.contains("as_float") && !argument.contains("as_bool") &&
                 !argument.contains("as_string")) {
        archive_.fail(fmt::format("an input that is no tensor ({}); export a forward() of tensors and constants", argument.dump()));
      }
    } else if (!spec.contains("constant_input")) {
      archive_.fail(fmt::format("an input of an unknown kind ({}); objects of extensions are not read", spec.dump()));
    }
    program_.sources.push_back(std::move(source));
  }

  at::Tensor mutated_tensor(const Json& spec) {
    if (spec.contains("user_output") || spec.contains("loss_output")) return {};
    if (spec.contains("buffer_mutation")) {
      const auto name = spec["buffer_mutation"].at("buffer_name").get<std::string>();
      return weights_.by_name.contains(name) ? weights_.by_name.at(name) : find(stored(), name);
    }
    archive_.fail(fmt::format("an output of a kind that is not supported ({}); export a forward() that does not write to its inputs", spec.dump()));
  }

  Archive& archive_;
  Weights& weights_;
  const Weights* shared_;
  std::map<std::string, at::Tensor> constants_;
  std::set<const c10::TensorImpl*> seen_;
  Program program_;
};

}  // namespace

Program read_program(Archive& archive, Weights& weights, const Weights* shared) {
  try {
    return ProgramReader(archive, weights, shared).read();
  } catch (const Json::exception& error) {
    archive.fail(fmt::format("the exported program is malformed ({})", error.what()));
  } catch (const std::invalid_argument& error) {
    archive.fail(fmt::format("the exported program is malformed: {}", error.what()));
  }
}

}  // namespace memfit::model::detail
