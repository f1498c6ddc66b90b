// Tensors in a safetensors file, written and read one at a time.
// Not here: what a training run consists of (checkpoint_folder.h), arrays as training data (data/array_dataset.h).
// Threads: one object, one thread. Cost: at most one tensor's bytes beside it, where it is not contiguous or not on the CPU.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "memfit/train/batch.h"

namespace memfit::train {

/// Size and CRC-32 of a file's bytes.
struct FileSum {
  std::uint64_t bytes = 0;
  std::uint32_t crc = 0;
};

/// Write `path` in place and bring it to the disk: for files in a folder that gets its name later.
/// Throws:   UsageError for two tensors of one name or a type that safetensors has no word for; Error when it cannot be written.
FileSum write_tensor_file(const std::string& path, const std::vector<NamedTensor>& tensors);

/// The same under a temporary name, renamed when it is whole.
FileSum save_tensors(const std::string& path, const std::vector<NamedTensor>& tensors);

class TensorFile {
 public:
  /// Throws:   BadInput naming file and byte.
  explicit TensorFile(const std::string& path);
  ~TensorFile();
  TensorFile(const TensorFile&) = delete;
  TensorFile& operator=(const TensorFile&) = delete;

  std::vector<std::string> names() const;
  /// Undefined for a name that is not there. Throws: BadInput when the bytes cannot be read.
  at::Tensor load(const std::string& name) const;
  /// "Float[2, 3]" as the header says it, "" for a name that is not there.
  std::string description(const std::string& name) const;
  /// Reads the whole file.
  FileSum sum() const;

 private:
  struct Place {
    at::ScalarType type;
    std::vector<std::int64_t> shape;
    std::uint64_t begin, bytes;
  };
  void read(void* into, std::uint64_t bytes, std::uint64_t at) const;
  void read_header(std::uint64_t file_bytes);

  std::string path_;
  int file_ = -1;
  std::map<std::string, Place> places_;
};

/// Copy values into the model's parameters and buffers by name.
/// Throws:   UsageError listing all names that are missing, extra, or of another shape or type; nothing is changed then.
/// Names that begin with `others` are somebody else's and no extras.
void load_tensors(const TensorFile& file, const std::vector<NamedTensor>& into, const std::string& others = "");

}  // namespace memfit::train
