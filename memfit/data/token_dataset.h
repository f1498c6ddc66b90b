// A file of token numbers, one after another without a header, as rows for a language model: `length` tokens and the
// same shifted by one.
// Not here: text, tokenizers. Threads: any. Cost: mapped; one conversion a token that is read.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "memfit/data/array_file.h"
#include "memfit/data/dataset.h"
#include "memfit/data/mapped_file.h"

namespace memfit::data {

struct TokenOptions {
  /// Type of a token in the file: uint8, uint16, uint32, int32 or int64. Default uint16.
  ElementType type = ElementType::UInt16;
  /// Tokens a row. Default 128.
  std::int64_t length = 128;
  /// Tokens from one row's start to the next one's; 0 (default) for `length`.
  std::int64_t stride = 0;
};

class TokenDataset : public Dataset {
 public:
  /// Throws:   BadInput where the file is no whole number of tokens or too short for one row.
  TokenDataset(const std::string& path, const TokenOptions& options);

  std::int64_t size() const override { return rows_; }
  /// "tokens" and "next", both int64 of shape [length].
  const std::vector<Field>& fields() const override { return fields_; }
  void read(Row& row) const override;
  std::string name() const override { return file_->path(); }

 private:
  std::shared_ptr<const MappedFile> file_;
  TokenOptions options_;
  std::vector<Field> fields_;
  std::int64_t rows_ = 0;
};

}  // namespace memfit::data
