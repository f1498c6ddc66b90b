// A dataset whose rows are looked at before they are trained on: no nan, and class numbers that are classes.
// Not here: shapes and types, which are checked once (train_cli/). Threads: any; the loader's threads do the checking.
// Cost: a pass over each row that is checked; a copy of what is converted.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "memfit/data/dataset.h"

namespace memfit::data {

struct FieldCheck {
  std::size_t field = 0;
  /// Infinite values are refused too, as nan is in every field of floating-point numbers.
  bool finite = false;
  /// Whole numbers of the field are in [0, classes), or `ignored`; they are given out as int64.
  std::optional<std::int64_t> classes{};
  std::optional<std::int64_t> ignored{};
};

class CheckedDataset : public Dataset {
 public:
  /// Throws:   UsageError where classes are asked of a field that holds no whole numbers.
  CheckedDataset(std::shared_ptr<const Dataset> dataset, std::vector<FieldCheck> checks);

  std::int64_t size() const override { return dataset_->size(); }
  const std::vector<Field>& fields() const override { return fields_; }
  /// Throws:   BadInput-like Error (status BadInput) naming the field, what it holds and where; the loader adds row and file.
  void read(Row& row) const override;
  std::string name() const override { return dataset_->name(); }

 private:
  std::shared_ptr<const Dataset> dataset_;
  std::vector<FieldCheck> checks_;  // one a field, in their order
  std::vector<Field> fields_;
};

}  // namespace memfit::data
