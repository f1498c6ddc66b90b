#include "memfit/train/tensor_file.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "memfit/core/error.h"

namespace memfit::train {
namespace {

using nlohmann::json;

const std::map<std::string, at::ScalarType>& types() {
  static const std::map<std::string, at::ScalarType> all = {
      {"F64", at::kDouble}, {"F32", at::kFloat}, {"F16", at::kHalf}, {"BF16", at::kBFloat16}, {"I64", at::kLong},
      {"I32", at::kInt}, {"I16", at::kShort}, {"I8", at::kChar}, {"U8", at::kByte}, {"BOOL", at::kBool}};
  return all;
}

std::string word_of(const NamedTensor& t) {
  for (const auto& [word, type] : types()) {
    if (type == t.tensor.scalar_type()) return word;
  }
  throw UsageError(fmt::format("\"{}\" is {}, which safetensors cannot hold.", t.name, c10::toString(t.tensor.scalar_type())));
}

std::string describe(at::ScalarType type, at::IntArrayRef shape) {
  return fmt::format("{}[{}]", c10::toString(type), fmt::join(shape, ", "));
}

class Writer {
 public:
  explicit Writer(const std::string& path) : path_(path), file_(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)) {
    if (file_ < 0) fail();
  }
  ~Writer() {
    if (file_ >= 0) ::close(file_);
  }
  void write(const void* data, std::uint64_t bytes) {
    sum.crc = static_cast<std::uint32_t>(::crc32_z(sum.crc, static_cast<const Bytef*>(data), bytes));
    sum.bytes += bytes;
    const char* at = static_cast<const char*>(data);
    while (bytes > 0) {
      const ssize_t n = ::write(file_, at, bytes);
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) fail();
      at += n;
      bytes -= static_cast<std::uint64_t>(n);
    }
  }
  void finish() {
    if (::fsync(file_) != 0) fail();
  }
  FileSum sum;

 private:
  [[noreturn]] void fail() { throw Error(ExitStatus::Failed, fmt::format("{}: cannot be written ({})", path_, std::strerror(errno))); }
  std::string path_;
  int file_;
};

}  // namespace

FileSum write_tensor_file(const std::string& path, const std::vector<NamedTensor>& tensors) {
  json header = json::object();
  std::uint64_t offset = 0;
  for (const NamedTensor& t : tensors) {
    if (header.contains(t.name)) throw UsageError(fmt::format("{}: two tensors are called \"{}\".", path, t.name));
    header[t.name] = {{"dtype", word_of(t)}, {"shape", t.tensor.sizes().vec()}, {"data_offsets", {offset, offset + t.tensor.nbytes()}}};
    offset += t.tensor.nbytes();
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // the data starts aligned
  Writer writer(path);
  const std::uint64_t length = text.size();
  writer.write(&length, sizeof length);
  writer.write(text.data(), text.size());
  for (const NamedTensor& t : tensors) {
    const at::Tensor whole = t.tensor.detach().cpu().contiguous();
    if (whole.nbytes() > 0) writer.write(whole.const_data_ptr(), whole.nbytes());
  }
  writer.finish();
  return writer.sum;
}

FileSum save_tensors(const std::string& path, const std::vector<NamedTensor>& tensors) {
  const std::string temporary = fmt::format("{}.{}.tmp", path, ::getpid());
  try {
    const FileSum sum = write_tensor_file(temporary, tensors);
    if (::rename(temporary.c_str(), path.c_str()) == 0) return sum;
    throw Error(ExitStatus::Failed, fmt::format("{}: cannot be written ({})", path, std::strerror(errno)));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
}

TensorFile::TensorFile(const std::string& path) : path_(path), file_(::open(path.c_str(), O_RDONLY | O_CLOEXEC)) {
  struct stat info {};
  if (file_ < 0 || ::fstat(file_, &info) != 0) {
    const int error = errno;
    if (file_ >= 0) ::close(file_);
    throw BadInput(path, 0, fmt::format("cannot be read ({})", std::strerror(error)));
  }
  try {
    read_header(static_cast<std::uint64_t>(info.st_size));
  } catch (...) {
    ::close(file_);
    throw;
  }
}

TensorFile::~TensorFile() { ::close(file_); }

void TensorFile::read(void* into, std::uint64_t bytes, std::uint64_t at) const {
  char* to = static_cast<char*>(into);
  while (bytes > 0) {
    const ssize_t n = ::pread(file_, to, bytes, static_cast<off_t>(at));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) throw BadInput(path_, at, n == 0 ? "the file ends here, in the middle" : std::strerror(errno));
    to += n;
    at += static_cast<std::uint64_t>(n);
    bytes -= static_cast<std::uint64_t>(n);
  }
}

void TensorFile::read_header(std::uint64_t file_bytes) {
  std::uint64_t length = 0;
  if (file_bytes < sizeof length) throw BadInput(path_, 0, "is no safetensors file: it is shorter than a header");
  read(&length, sizeof length, 0);
  const std::uint64_t start = sizeof length + length;
  if (length > file_bytes - sizeof length) throw BadInput(path_, 0, "is no safetensors file: its header is longer than the file");
  std::string text(length, '\0');
  read(text.data(), length, sizeof length);
  const json header = json::parse(text, nullptr, false);
  auto bad = [&](const std::string& name) { return BadInput(path_, sizeof length, fmt::format("the header's entry \"{}\" is wrong", name)); };
  if (!header.is_object()) throw BadInput(path_, sizeof length, "the header is no JSON object");
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    try {
      Place p{types().at(entry.at("dtype").get<std::string>()), entry.at("shape").get<std::vector<std::int64_t>>(), 0, 0};
      const auto begin = entry.at("data_offsets").at(0).get<std::uint64_t>(), end = entry.at("data_offsets").at(1).get<std::uint64_t>();
      std::uint64_t bytes = c10::elementSize(p.type);
      for (const std::int64_t n : p.shape) {
        if (n < 0 || __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(n), &bytes)) throw bad(name);
      }
      if (begin > end || end > file_bytes - start || bytes != end - begin) throw bad(name);
      p.begin = start + begin;
      p.bytes = bytes;
      places_[name] = std::move(p);
    } catch (const std::out_of_range&) {
      throw bad(name);
    } catch (const json::exception&) {
      throw bad(name);
    }
  }
}

std::vector<std::string> TensorFile::names() const {
  std::vector<std::string> out;
  for (const auto& [name, place] : places_) out.push_back(name);
  return out;
}

std::string TensorFile::description(const std::string& name) const {
  const auto found = places_.find(name);
  return found == places_.end() ? "" : describe(found->second.type, found->second.shape);
}

at::Tensor TensorFile::load(const std::string& name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) return {};
  at::Tensor out = at::empty(found->second.shape, found->second.type);
  if (found->second.bytes > 0) read(out.mutable_data_ptr(), found->second.bytes, found->second.begin);
  return out;
}

FileSum TensorFile::sum() const {
  FileSum out;
  std::vector<char> buffer(1 << 20);
  for (;;) {
    const ssize_t n = ::pread(file_, buffer.data(), buffer.size(), static_cast<off_t>(out.bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw BadInput(path_, out.bytes, std::strerror(errno));
    if (n == 0) return out;
    out.crc = static_cast<std::uint32_t>(::crc32_z(out.crc, reinterpret_cast<const Bytef*>(buffer.data()), static_cast<z_size_t>(n)));
    out.bytes += static_cast<std::uint64_t>(n);
  }
}

void load_tensors(const TensorFile& file, const std::vector<NamedTensor>& into, const std::string& others) {
  std::set<std::string> extra;
  for (const std::string& name : file.names()) {
    if (others.empty() || name.rfind(others, 0) != 0) extra.insert(name);
  }
  std::vector<std::string> missing, other;
  for (const NamedTensor& t : into) {
    extra.erase(t.name);
    const std::string saved = file.description(t.name);
    const std::string here = describe(t.tensor.scalar_type(), t.tensor.sizes());
    if (saved.empty()) missing.push_back(t.name);
    else if (saved != here) other.push_back(fmt::format("{} ({} in the file, {} here)", t.name, saved, here));
  }
  if (!missing.empty() || !other.empty() || !extra.empty()) {
    auto list = [](const auto& names) { return names.empty() ? std::string("none") : fmt::format("{}", fmt::join(names, ", ")); };
    throw UsageError(fmt::format("the saved tensors are another model's. Missing: {}. Extra: {}. Different: {}.", list(missing), list(extra), list(other)));
  }
  at::NoGradGuard no_grad;
  for (const NamedTensor& t : into) t.tensor.variable_data().copy_(file.load(t.name));
}

}  // namespace memfit::train
