// A choice with settings, as words of the command line say it: "adamw,lr=3e-4,weight_decay=0.1".
// Not here: what can be chosen (optimizers.h, losses.h, metrics.h, schedule.h). Threads: one. Cost: none.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace memfit::train {

class Choice {
 public:
  /// `what` stands in messages: "--loss". `known` are the names there are.
  /// Throws:   UsageError for an unknown name, with the nearest; for a setting without a value or given twice.
  Choice(std::string what, const std::string& text, const std::vector<std::string>& known);

  const std::string& name() const { return name_; }
  /// The setting, or nothing where it is not given. Throws: UsageError naming it where it is no number.
  std::optional<double> number(const std::string& key);
  double number(const std::string& key, double otherwise) { return number(key).value_or(otherwise); }
  /// Throws: UsageError where it is no whole number.
  std::optional<std::int64_t> whole(const std::string& key);
  std::optional<bool> flag(const std::string& key);
  std::optional<std::string> text(const std::string& key);
  /// When all settings have been asked for.
  /// Throws:   UsageError naming one that nobody asked for, with the nearest there is.
  void done() const;

 private:
  const std::string* find(const std::string& key);
  [[noreturn]] void fail(const std::string& key, const std::string& wanted) const;

  std::string what_, name_;
  std::map<std::string, std::string> settings_;
  std::set<std::string> asked_;
};

}  // namespace memfit::train
