// An .npz file is a zip archive of .npy files. Its directory is read here because arrays are mapped where they lie:
// zip libraries give out bytes, not the place of bytes.
#include <fmt/format.h>

#include <set>

#include "memfit/core/error.h"
#include "memfit/data/array_file.h"
#include "memfit/data/detail/checked_array.h"

namespace memfit::data {
namespace {

using detail::little_endian;

constexpr std::uint64_t kEndSize = 22, kEnd64Size = 56, kLocator64Size = 20, kEntrySize = 46, kLocalSize = 30;
constexpr std::uint32_t kNone32 = 0xffffffff;

struct Directory {
  std::uint64_t offset = 0, size = 0, entries = 0;
};

struct Entry {
  std::string_view name;
  std::uint64_t method = 0, stored = 0, local = 0;
};

class ZipReader {
 public:
  ZipReader(std::string_view bytes, const std::string& file) : bytes_(bytes), file_(file) {}

  [[noreturn]] void fail(std::uint64_t at, const std::string& reason) const { throw BadInput(file_, at, "zip archive: " + reason); }

  void need(std::uint64_t at, std::uint64_t size, std::string_view what) const {
    if (at > bytes_.size() || size > bytes_.size() - at) fail(std::min<std::uint64_t>(at, bytes_.size()), fmt::format("{} does not fit in the {} bytes of the file", what, bytes_.size()));
  }

  Directory directory() const {
    // The last 22 bytes, or earlier where a comment follows.
    const std::size_t end = bytes_.rfind(std::string_view("PK\x05\x06", 4));
    if (end == std::string_view::npos || bytes_.size() - end < kEndSize) {
      fail(bytes_.size(), "no directory at its end; the file is cut off or is no .npz");
    }
    Directory directory{little_endian(bytes_, end + 16, 4), little_endian(bytes_, end + 12, 4), little_endian(bytes_, end + 10, 2)};
    if (directory.offset == kNone32 || directory.size == kNone32 || directory.entries == 0xffff) directory = directory64(end);
    need(directory.offset, directory.size, "the directory");
    if (directory.entries > directory.size / kEntrySize) {
      fail(end, fmt::format("{} entries in a directory of {} bytes", directory.entries, directory.size));
    }
    return directory;
  }

  /// The entry at `at`, which is moved behind it.
  Entry entry(std::uint64_t& at, std::uint64_t end) const {
    if (end - at < kEntrySize || little_endian(bytes_, at, 4) != 0x02014b50) fail(at, "expected an entry of the directory");
    const std::uint64_t name = little_endian(bytes_, at + 28, 2), extra = little_endian(bytes_, at + 30, 2), comment = little_endian(bytes_, at + 32, 2);
    if (end - at - kEntrySize < name + extra + comment) fail(at, "an entry reaches past the directory");
    if (little_endian(bytes_, at + 8, 2) & 1) fail(at, "an encrypted entry");
    Entry entry{bytes_.substr(at + kEntrySize, name), little_endian(bytes_, at + 10, 2), little_endian(bytes_, at + 20, 4), little_endian(bytes_, at + 42, 4)};
    read_sizes64(entry, little_endian(bytes_, at + 24, 4), at + kEntrySize + name, extra);
    at += kEntrySize + name + extra + comment;
    return entry;
  }

  /// Where the bytes of a stored entry begin.
  std::uint64_t begin(const Entry& entry) const {
    need(entry.local, kLocalSize, "an entry");
    if (little_endian(bytes_, entry.local, 4) != 0x04034b50) fail(entry.local, "expected the head of an entry");
    const std::uint64_t begin = entry.local + kLocalSize + little_endian(bytes_, entry.local + 26, 2) + little_endian(bytes_, entry.local + 28, 2);
    need(begin, entry.stored, "an entry");
    return begin;
  }

 private:
  Directory directory64(std::uint64_t end) const {
    if (end < kLocator64Size || little_endian(bytes_, end - kLocator64Size, 4) != 0x07064b50) fail(end, "sizes of 64 bits are announced and not there");
    const std::uint64_t at = little_endian(bytes_, end - kLocator64Size + 8, 8);
    need(at, kEnd64Size, "the directory's end");
    if (little_endian(bytes_, at, 4) != 0x06064b50) fail(at, "expected the directory's end (64 bits)");
    return {little_endian(bytes_, at + 48, 8), little_endian(bytes_, at + 40, 8), little_endian(bytes_, at + 32, 8)};
  }

  /// Sizes that do not fit 32 bits stand in the extra field of kind 1, in a fixed order, each only where it is needed.
  void read_sizes64(Entry& entry, std::uint64_t unpacked, std::uint64_t extra, std::uint64_t size) const {
    const std::uint64_t end = extra + size;
    while (end - extra >= 4) {
      const std::uint64_t kind = little_endian(bytes_, extra, 2), length = little_endian(bytes_, extra + 2, 2);
      extra += 4;
      if (length > end - extra) fail(extra, "an extra field reaches past its entry");
      if (kind == 1) {
        std::uint64_t at = extra;
        const auto next = [&] {
          if (extra + length - at < 8) fail(at, "a size of 64 bits is missing");
          at += 8;
          return little_endian(bytes_, at - 8, 8);
        };
        if (unpacked == kNone32) next();
        if (entry.stored == kNone32) entry.stored = next();
        if (entry.local == kNone32) entry.local = next();
      }
      extra += length;
    }
  }

  std::string_view bytes_;
  const std::string& file_;
};

}  // namespace

std::vector<ArrayInfo> read_npz(std::string_view bytes, const std::string& file) {
  const ZipReader zip(bytes, file);
  const Directory directory = zip.directory();
  std::vector<ArrayInfo> arrays;
  std::set<std::string_view> names;
  std::uint64_t at = directory.offset;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    const std::uint64_t here = at;
    const Entry entry = zip.entry(at, directory.offset + directory.size);
    if (!entry.name.ends_with(".npy")) {
      zip.fail(here, fmt::format("entry \"{}\" is not an .npy array; if this is a PyTorch file, give it as the model or save arrays with numpy.savez",
                                 entry.name.substr(0, 100)));
    }
    const std::string_view key = entry.name.substr(0, entry.name.size() - 4);
    if (entry.method != 0) {
      zip.fail(here, fmt::format("array {} is compressed, so it cannot be mapped; write the file with numpy.savez instead of savez_compressed", key));
    }
    if (!names.insert(key).second) zip.fail(here, fmt::format("array {} is there twice", key));
    const std::uint64_t begin = zip.begin(entry);
    ArrayInfo array = read_npy(bytes, begin, begin + entry.stored, file);
    array.name = key;
    arrays.push_back(std::move(array));
  }
  return arrays;
}

}  // namespace memfit::data
