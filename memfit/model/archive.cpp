#include "memfit/model/detail/archive.h"

#include <caffe2/serialize/inline_container.h>
#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "memfit/core/error.h"

namespace memfit::model::detail {
namespace {

using Json = nlohmann::json;

// Deeper than any exported program; nested arguments and subgraphs take about ten levels each.
constexpr int kMaxDepth = 200;

}  // namespace

Archive::Archive(const std::string& path) : path_(path) {
  std::error_code error;
  file_size_ = std::filesystem::file_size(path, error);
  if (error) fail("cannot be opened: " + error.message());
  try {
    reader_ = std::make_unique<caffe2::serialize::PyTorchStreamReader>(path);
  } catch (const c10::Error&) {
    fail("not a model: neither TorchScript (torch.jit.save) nor an exported program (torch.export.save), which are zip archives");
  }
}

Archive::~Archive() = default;

void Archive::fail(const std::string& reason) const { throw BadInput(path_, 0, reason); }

bool Archive::has(const std::string& record) { return reader_->hasRecord(record); }

std::pair<at::DataPtr, std::size_t> Archive::read(const std::string& record) {
  try {
    // PyTorch stores records as they are, so a larger one is a trap.
    if (reader_->getRecordSize(record) > file_size_) fail(fmt::format("record {} is said to be larger than the file", record));
    auto [bytes, size] = reader_->getRecord(record);
    return {std::move(bytes), size};
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {
    fail(fmt::format("record {} is missing or damaged ({})", record, error.what_without_backtrace()));
  }
}

std::string Archive::read_text(const std::string& record) {
  const auto [bytes, size] = read(record);
  return {static_cast<const char*>(bytes.get()), size};
}

Json Archive::read_json(const std::string& record) {
  const std::string text = read_text(record);
  const auto shallow = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) fail(fmt::format("record {} is nested deeper than {} levels", record, kMaxDepth));
    return true;
  };
  try {
    return Json::parse(text, shallow);
  } catch (const Json::exception& error) {  // also a number that no double holds
    fail(fmt::format("record {} is not JSON ({})", record, error.what()));
  }
}

}  // namespace memfit::model::detail
