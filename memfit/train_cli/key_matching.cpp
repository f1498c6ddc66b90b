#include "memfit/train_cli/key_matching.h"

#include <c10/core/ScalarType.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "memfit/core/error.h"
#include "memfit/core/nearest.h"

namespace memfit::train_cli {
namespace {

using data::Field;
using model::Input;

constexpr std::array kTargetNames{"target", "targets", "label", "labels", "y", "next"};

std::string type_text(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

std::string input_text(const Input& input) {
  if (!input.shape || !input.type) return "of unknown type and shape";
  std::vector<std::string> words;
  for (const model::Dimension& d : *input.shape) words.push_back(d.size ? std::to_string(*d.size) : d.symbol);
  return fmt::format("{} [{}]", type_text(*input.type), fmt::join(words, ", "));
}

/// Sizes beside the rows; a size that is free fits any.
bool fits(const Input& input, const Field& field) {
  if (!input.shape || !input.type) return true;
  if (*input.type != field.type || input.shape->size() != field.shape.size() + 1) return false;
  for (std::size_t d = 0; d < field.shape.size(); ++d) {
    const std::optional<std::int64_t> size = (*input.shape)[d + 1].size;
    if (size && *size != field.shape[d]) return false;
  }
  return true;
}

class Matcher {
 public:
  Matcher(const std::vector<Input>& inputs, const std::vector<Field>& fields, const std::string& file, const KeyOptions& options)
      : inputs_(inputs), fields_(fields), file_(file), options_(options), chosen_(inputs.size()), taken_(fields.size(), false) {}

  KeyMatch run() {
    take_told();
    take_names();
    if (match_.targets.empty() && options_.fewest_targets > 0) take_usual_target();
    take_only_ways();
    if (match_.targets.size() < options_.fewest_targets) take_last_as_target();
    check_inputs();
    for (const auto& field : chosen_) match_.inputs.push_back(*field);
    return match_;
  }

 private:
  std::size_t field(const std::string& key, const std::string& flag) {
    std::vector<std::string> names;
    for (std::size_t i = 0; i < fields_.size(); ++i) {
      if (fields_[i].name == key) return i;
      names.push_back(fields_[i].name);
    }
    throw UsageError(fmt::format("{}: {} has no array {}. {}", flag, file_, key, known_words(key, names)));
  }

  void take_told() {
    for (const auto& [name, key] : options_.inputs) {
      const auto input = std::ranges::find(inputs_, name, &Input::name);
      if (input == inputs_.end()) {
        std::vector<std::string> names;
        for (const Input& there : inputs_) names.push_back(there.name);
        throw UsageError(fmt::format("--input {}={}: the model has no input {}. {}", name, key, name, known_words(name, names)));
      }
      const std::size_t at = field(key, fmt::format("--input {}={}", name, key));
      chosen_[static_cast<std::size_t>(input - inputs_.begin())] = at;
      taken_[at] = true;
    }
    if (options_.targets.size() > options_.most_targets) {
      throw UsageError(options_.most_targets == 0 ? "--target: the loss comes from the program, which takes its target as an input (--input NAME=KEY)."
                                                  : fmt::format("--target is given {} times, and the loss takes {}.", options_.targets.size(), options_.most_targets));
    }
    for (const std::string& key : options_.targets) {
      match_.targets.push_back(field(key, "--target " + key));
      taken_[match_.targets.back()] = true;
    }
  }

  void take_names() {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      for (std::size_t f = 0; f < fields_.size() && !chosen_[i]; ++f) {
        if (!taken_[f] && fields_[f].name == inputs_[i].name) choose(i, f);
      }
    }
  }

  void take_usual_target() {
    for (const char* name : kTargetNames) {
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        if (taken_[f] || fields_[f].name != name) continue;
        match_.targets.push_back(f);
        taken_[f] = true;
        return;
      }
    }
  }

  /// An input that one array fits, and that array no other input; until nothing changes.
  void take_only_ways() {
    for (bool again = true; again;) {
      again = false;
      for (std::size_t i = 0; i < inputs_.size(); ++i) {
        if (chosen_[i]) continue;
        const std::vector<std::size_t> ways = ways_of(i);
        if (ways.size() != 1 || rivals(i, ways.front())) continue;
        choose(i, ways.front());
        again = true;
      }
    }
  }

  void take_last_as_target() {
    std::vector<std::string> left;
    std::size_t last = 0;
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      if (taken_[f]) continue;
      left.push_back(describe(f));
      last = f;
    }
    const bool inputs_done = std::ranges::all_of(chosen_, [](const auto& c) { return c.has_value(); });
    if (left.size() == 1 && inputs_done) {
      match_.targets.push_back(last);
      taken_[last] = true;
      return;
    }
    if (!inputs_done) check_inputs();
    throw UsageError(left.empty() ? fmt::format("{} holds no array that could be the target: all of them are inputs of the model.", file_)
                                  : fmt::format("{} does not say which array is the target: {}. Say --target KEY.", file_, fmt::join(left, ", ")));
  }

  void check_inputs() const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const Input& input = inputs_[i];
      if (chosen_[i]) {
        const Field& f = fields_[*chosen_[i]];
        if (fits(input, f)) continue;
        const bool only_type = input.type && *input.type != f.type;
        throw UsageError(fmt::format("Input {} takes {} and array {} of {} is {}.{}", input.name, input_text(input), f.name, file_, field_text(f),
                                     only_type ? fmt::format(" Save it as {} (x.astype(\"{}\")).", type_text(*input.type), type_text(*input.type)) : ""));
      }
      std::vector<std::string> there;
      for (std::size_t f = 0; f < fields_.size(); ++f) {
        if (!taken_[f]) there.push_back(describe(f));
      }
      throw UsageError(fmt::format("Input {} ({}): {} {}. Say --input {}=KEY.", input.name, input_text(input), file_,
                                   there.empty() ? "has no array left for it" : fmt::format("does not say which array it is: {}", fmt::join(there, ", ")), input.name));
    }
  }

  std::vector<std::size_t> ways_of(std::size_t input) const {
    std::vector<std::size_t> out;
    for (std::size_t f = 0; f < fields_.size(); ++f) {
      if (!taken_[f] && fits(inputs_[input], fields_[f])) out.push_back(f);
    }
    return out;
  }

  bool rivals(std::size_t input, std::size_t field) const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (i != input && !chosen_[i] && fits(inputs_[i], fields_[field])) return true;
    }
    return false;
  }

  void choose(std::size_t input, std::size_t field) {
    chosen_[input] = field;
    taken_[field] = true;
  }

  std::string describe(std::size_t f) const { return fmt::format("{} ({})", fields_[f].name, field_text(fields_[f])); }

  const std::vector<Input>& inputs_;
  const std::vector<Field>& fields_;
  const std::string& file_;
  const KeyOptions& options_;
  std::vector<std::optional<std::size_t>> chosen_;
  std::vector<bool> taken_;
  KeyMatch match_;
};

}  // namespace

std::string field_text(const Field& field) {
  std::vector<std::string> words{"rows"};
  for (const std::int64_t size : field.shape) words.push_back(std::to_string(size));
  return fmt::format("{} [{}]", type_text(field.type), fmt::join(words, ", "));
}

KeyMatch match_keys(const std::vector<Input>& inputs, const std::vector<Field>& fields, const std::string& file, const KeyOptions& options) {
  return Matcher(inputs, fields, file, options).run();
}

}  // namespace memfit::train_cli
