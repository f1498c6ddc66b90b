// Arrays of files as a dataset, and as tensors. The files are mapped: only rows that are read take memory, and the kernel
// drops them again when it needs the room.
// Not here: what the files look like (array_file.h). Threads: any. Cost: that of the headers; one copy a row that is read.
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "memfit/data/array_file.h"
#include "memfit/data/dataset.h"
#include "memfit/data/mapped_file.h"

namespace memfit::data {

struct NamedArray {
  std::string name;  // key in the file, "" where it has none
  at::Tensor tensor;
};

at::ScalarType scalar_type(ElementType type);

/// All arrays of an .npy, .npz, safetensors or IDX file, as tensors on its mapped bytes, which keep the mapping alive.
/// An array that is not aligned in its file (numpy.savez aligns none) is copied. Writing to the others ends the program.
/// Throws:   BadInput.
std::vector<NamedArray> map_arrays(const std::string& path);

/// Rows are the first dimension, which all arrays must share.
class ArrayDataset : public Dataset {
 public:
  /// Arrays of one file, in the file's order; `keys` names some of them, none means all. Never copies an array.
  /// Throws:   BadInput; UsageError for an unknown key or rows that differ in number, naming what is there.
  explicit ArrayDataset(const std::string& path, const std::vector<std::string>& keys = {});
  /// Arrays of the program's own; `name` stands in messages. Throws: UsageError as above.
  ArrayDataset(std::vector<NamedArray> arrays, std::string name);

  std::int64_t size() const override { return rows_; }
  const std::vector<Field>& fields() const override { return fields_; }
  void read(Row& row) const override;
  std::string name() const override { return name_; }

 private:
  struct Column {
    const std::byte* start;
    std::shared_ptr<const void> owner;
  };
  void add(const std::string& key, at::ScalarType type, const std::vector<std::int64_t>& shape, Column column);

  std::string name_;
  std::vector<Field> fields_;
  std::vector<Column> columns_;
  std::int64_t rows_ = 0;
};

}  // namespace memfit::data
