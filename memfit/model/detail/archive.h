// A zip archive as PyTorch writes it; nothing is read that is larger than the file itself.
// Not here: what the records mean. Threads: one. Cost: one read a record.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace caffe2::serialize {
class PyTorchStreamReader;
}

namespace memfit::model::detail {

class Archive {
 public:
  /// Throws:   BadInput when it is no such archive.
  explicit Archive(const std::string& path);
  ~Archive();

  const std::string& path() const { return path_; }
  bool has(const std::string& record);
  /// Throws:   BadInput when it is missing, damaged, or said to be larger than the file.
  std::pair<at::DataPtr, std::size_t> read(const std::string& record);
  std::string read_text(const std::string& record);
  nlohmann::json read_json(const std::string& record);
  [[noreturn]] void fail(const std::string& reason) const;

 private:
  std::string path_;
  std::uint64_t file_size_ = 0;
  std::unique_ptr<caffe2::serialize::PyTorchStreamReader> reader_;
};

}  // namespace memfit::model::detail
