#include "memfit/data/token_dataset.h"

#include <fmt/format.h>

#include <cstring>

#include "memfit/core/error.h"

namespace memfit::data {
namespace {

template <typename T>
void widen(const char* from, std::span<std::int64_t> to) {
  for (std::size_t i = 0; i < to.size(); ++i) {
    T token;
    std::memcpy(&token, from + i * sizeof(T), sizeof(T));
    to[i] = static_cast<std::int64_t>(token);
  }
}

}  // namespace

TokenDataset::TokenDataset(const std::string& path, const TokenOptions& options) : file_(MappedFile::open(path)), options_(options) {
  switch (options_.type) {
    case ElementType::UInt8: case ElementType::UInt16: case ElementType::UInt32: case ElementType::Int32: case ElementType::Int64: break;
    default: throw UsageError(fmt::format("Tokens of type {}: uint8, uint16, uint32, int32 and int64 are read.", element_name(options_.type)));
  }
  if (options_.length < 1 || options_.stride < 0) throw UsageError("A row of tokens needs a length of at least 1 and a stride of at least 1.");
  if (options_.stride == 0) options_.stride = options_.length;
  const std::uint64_t size = element_size(options_.type).count();
  if (file_->bytes().size() % size != 0) {
    throw BadInput(path, file_->bytes().size(), fmt::format("{} bytes are no whole number of {} tokens; name the type they were written in",
                                                            file_->bytes().size(), element_name(options_.type)));
  }
  const auto tokens = static_cast<std::int64_t>(file_->bytes().size() / size);
  if (tokens <= options_.length) {
    throw BadInput(path, file_->bytes().size(), fmt::format("{} tokens are too few for a row of {} and the one that follows", tokens, options_.length));
  }
  rows_ = (tokens - 1 - options_.length) / options_.stride + 1;
  fields_ = {{"tokens", at::kLong, {options_.length}}, {"next", at::kLong, {options_.length}}};
}

void TokenDataset::read(Row& row) const {
  const std::uint64_t size = element_size(options_.type).count();
  const char* start = file_->bytes().data() + static_cast<std::uint64_t>(row.index() * options_.stride) * size;
  for (const std::size_t field : {0, 1}) {
    const char* from = start + field * size;
    const std::span<std::int64_t> to = row.elements<std::int64_t>(field);
    switch (options_.type) {
      case ElementType::UInt8: widen<std::uint8_t>(from, to); break;
      case ElementType::UInt16: widen<std::uint16_t>(from, to); break;
      case ElementType::UInt32: widen<std::uint32_t>(from, to); break;
      case ElementType::Int32: widen<std::int32_t>(from, to); break;
      default: widen<std::int64_t>(from, to); break;
    }
  }
}

}  // namespace memfit::data
