#include "memfit/train_cli/config_file.h"

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "memfit/core/error.h"
#include "memfit/core/nearest.h"

namespace memfit::train_cli {
namespace {

using Entry = std::pair<std::string, std::vector<std::string>>;

std::string text_of(const nlohmann::json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

std::vector<Entry> read_entries(const std::string& path) {
  std::ifstream file(path);
  std::stringstream text;
  text << file.rdbuf();
  if (!file) throw BadInput(path, 0, "cannot be read");
  std::vector<Entry> out;
  if (const auto begin = text.str().find_first_not_of(" \t\r\n"); begin != std::string::npos && text.str()[begin] == '{') {
    try {
      const auto whole = nlohmann::ordered_json::parse(text.str());
      for (const auto& [key, value] : whole.items()) {
        std::vector<std::string> words;
        if (value.is_object()) throw BadInput(path, 0, fmt::format("{} is an object; a flag takes a text, a number, true, false or a list of them", key));
        if (value.is_array()) {
          for (const auto& one : value) words.push_back(text_of(one));
        } else {
          words.push_back(text_of(value));
        }
        out.emplace_back(key, words);
      }
    } catch (const nlohmann::json::parse_error& error) {
      throw BadInput(path, error.byte, error.what());
    }
    return out;
  }
  for (const CLI::ConfigItem& item : CLI::ConfigTOML().from_config(text)) out.emplace_back(item.fullname(), item.inputs);
  return out;
}

bool says(const std::vector<std::string>& words, const std::string& flag) {
  return std::ranges::any_of(words, [&](const std::string& w) { return w == flag || w.starts_with(flag + "="); });
}

}  // namespace

std::vector<std::string> with_config(const std::vector<std::string>& words, const std::set<std::string>& flags, const std::set<std::string>& values) {
  std::string path;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--config" && i + 1 < words.size()) path = words[i + 1];
    if (words[i].starts_with("--config=")) path = words[i].substr(9);
  }
  if (path.empty()) return words;
  std::vector<std::string> known(values.begin(), values.end());
  known.insert(known.end(), flags.begin(), flags.end());
  std::vector<std::string> out = words;
  for (const auto& [key, given] : read_entries(path)) {
    if (!flags.contains(key) && !values.contains(key)) throw UsageError(fmt::format("{}: \"{}\" is no flag of this verb. {}", path, key, known_words(key, known)));
    if (says(words, "--" + key)) continue;
    for (const std::string& value : given) {
      if (values.contains(key)) out.push_back(fmt::format("--{}={}", key, value));
      else if (value == "true") out.push_back("--" + key);
      else if (value != "false") throw UsageError(fmt::format("{}: {} is {}; it is true or false.", path, key, value));
    }
  }
  return out;
}

}  // namespace memfit::train_cli
