// A dataset: numbered rows, each of the same named fields of fixed shape, written straight into the batch they go into.
// Not here: the order of rows and batches (row_order.h, data_loader.h), files (array_dataset.h, token_dataset.h, image_folder.h).
// Threads: read() is called by several at a time. Cost: yours; nothing is copied after read().
#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memfit/core/bytes.h"

namespace memfit::data {

struct Field {
  std::string name;
  at::ScalarType type = at::kFloat;
  std::vector<std::int64_t> shape;  // of one row; rows of different length are padded by the dataset

  Bytes bytes() const;
};

/// Random numbers of one row in one epoch: the same whichever thread reads the row and in whatever order.
class RowRandom {
 public:
  RowRandom(std::uint64_t seed, std::int64_t epoch, std::int64_t row);
  std::uint64_t bits();
  /// In [0, 1), of 53 bits.
  double uniform();
  /// In [0, count). Requires: count > 0.
  std::uint64_t below(std::uint64_t count);

 private:
  std::uint64_t state_;
};

/// Where a dataset writes a row. Lives during read() only.
class Row {
 public:
  Row(std::int64_t index, RowRandom random, std::span<const Field> fields, std::span<std::byte* const> slots)
      : random(random), index_(index), fields_(fields), slots_(slots) {}

  RowRandom random;
  std::int64_t index() const { return index_; }
  std::span<std::byte> bytes(std::size_t field) const { return {slots_[field], fields_[field].bytes().count()}; }
  /// Requires: T is the field's element type.
  template <typename T>
  std::span<T> elements(std::size_t field) const {
    TORCH_INTERNAL_ASSERT(fields_[field].type == c10::CppTypeToScalarType<T>::value);
    return {reinterpret_cast<T*>(slots_[field]), fields_[field].bytes().count() / sizeof(T)};
  }

 private:
  std::int64_t index_;
  std::span<const Field> fields_;
  std::span<std::byte* const> slots_;
};

class Dataset {
 public:
  virtual ~Dataset() = default;
  virtual std::int64_t size() const = 0;
  virtual const std::vector<Field>& fields() const = 0;
  /// Write every byte of every field of row.index().
  /// Throws:   anything; the loader rethrows it with the row in the text.
  virtual void read(Row& row) const = 0;
  /// What messages call it: its file. Default "the dataset".
  virtual std::string name() const;
};

}  // namespace memfit::data
