#include "memfit/train/choice.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "memfit/core/error.h"
#include "memfit/core/nearest.h"

namespace memfit::train {
namespace {

template <class Number>
std::optional<Number> parse(const std::string& text) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace

Choice::Choice(std::string what, const std::string& text, const std::vector<std::string>& known) : what_(std::move(what)) {
  std::size_t begin = text.find(',');
  name_ = text.substr(0, begin);
  bool there = false;
  for (const std::string& one : known) there |= one == name_;
  if (!there) throw UsageError(fmt::format("{}: \"{}\" is not known. {}", what_, name_, known_words(name_, known)));
  while (begin != std::string::npos) {
    const std::size_t end = text.find(',', begin + 1);
    const std::string setting = text.substr(begin + 1, end == std::string::npos ? end : end - begin - 1);
    const std::size_t equal = setting.find('=');
    if (equal == std::string::npos || equal == 0 || equal + 1 == setting.size()) {
      throw UsageError(fmt::format("{}: \"{}\" is no setting; they are written {},KEY=VALUE.", what_, setting, name_));
    }
    if (!settings_.emplace(setting.substr(0, equal), setting.substr(equal + 1)).second) {
      throw UsageError(fmt::format("{}: {} is given twice in \"{}\".", what_, setting.substr(0, equal), text));
    }
    begin = end;
  }
}

const std::string* Choice::find(const std::string& key) {
  asked_.insert(key);
  const auto place = settings_.find(key);
  return place == settings_.end() ? nullptr : &place->second;
}

void Choice::fail(const std::string& key, const std::string& wanted) const {
  throw UsageError(fmt::format("{}: {}={} of {}; it is {}.", what_, key, settings_.at(key), name_, wanted));
}

std::optional<double> Choice::number(const std::string& key) {
  const std::string* text = find(key);
  if (text == nullptr) return std::nullopt;
  const std::optional<double> value = parse<double>(*text);
  if (!value || !std::isfinite(*value)) fail(key, "a number");
  return value;
}

std::optional<std::int64_t> Choice::whole(const std::string& key) {
  const std::string* text = find(key);
  if (text == nullptr) return std::nullopt;
  const std::optional<std::int64_t> value = parse<std::int64_t>(*text);
  if (!value) fail(key, "a whole number");
  return value;
}

std::optional<bool> Choice::flag(const std::string& key) {
  const std::string* text = find(key);
  if (text == nullptr) return std::nullopt;
  if (*text == "true" || *text == "1") return true;
  if (*text == "false" || *text == "0") return false;
  fail(key, "true or false");
}

std::optional<std::string> Choice::text(const std::string& key) {
  const std::string* text = find(key);
  return text == nullptr ? std::nullopt : std::optional(*text);
}

void Choice::done() const {
  for (const auto& [key, value] : settings_) {
    if (asked_.contains(key)) continue;
    const std::vector<std::string> known(asked_.begin(), asked_.end());
    throw UsageError(known.empty() ? fmt::format("{}: {} has no settings, and \"{}\" is one.", what_, name_, key)
                                   : fmt::format("{}: {} has no setting \"{}\". {}", what_, name_, key, known_words(key, known)));
  }
}

}  // namespace memfit::train
