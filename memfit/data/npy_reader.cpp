// The header of an .npy file is a Python dictionary literal of three keys, padded with spaces.
#include <fmt/format.h>

#include <array>
#include <charconv>
#include <utility>

#include "memfit/core/error.h"
#include "memfit/data/array_file.h"
#include "memfit/data/detail/checked_array.h"

namespace memfit::data {
namespace {

constexpr std::array<std::pair<std::string_view, ElementType>, 12> kKinds{{{"b1", ElementType::Bool}, {"u1", ElementType::UInt8},
    {"i1", ElementType::Int8}, {"u2", ElementType::UInt16}, {"i2", ElementType::Int16}, {"u4", ElementType::UInt32}, {"i4", ElementType::Int32},
    {"u8", ElementType::UInt64}, {"i8", ElementType::Int64}, {"f2", ElementType::Float16}, {"f4", ElementType::Float32},
    {"f8", ElementType::Float64}}};

/// Walks the literal. Every position is a byte of the file, for messages.
class HeaderReader {
 public:
  HeaderReader(std::string_view bytes, std::uint64_t at, std::uint64_t end, const std::string& file)
      : bytes_(bytes), at_(at), end_(end), file_(file) {}

  [[noreturn]] void fail(const std::string& reason) const { throw BadInput(file_, at_, "header of .npy: " + reason); }
  std::uint64_t at() const { return at_; }

  bool take(char wanted) {
    skip_spaces();
    if (at_ >= end_ || bytes_[at_] != wanted) return false;
    ++at_;
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(fmt::format("expected '{}'", wanted));
  }
  std::string_view quoted() {
    skip_spaces();
    if (at_ >= end_ || (bytes_[at_] != '\'' && bytes_[at_] != '"')) fail("expected a quoted word");
    const char quote = bytes_[at_];
    const std::uint64_t begin = ++at_;
    while (at_ < end_ && bytes_[at_] != quote) ++at_;
    if (at_ >= end_) fail("a quoted word does not end");
    return bytes_.substr(begin, at_++ - begin);
  }
  bool boolean() {
    skip_spaces();
    const std::string_view rest = bytes_.substr(at_, end_ - at_);
    for (const auto& [word, value] : {std::pair<std::string_view, bool>{"True", true}, {"False", false}}) {
      if (!rest.starts_with(word)) continue;
      at_ += word.size();
      return value;
    }
    fail("expected True or False");
  }
  std::vector<std::int64_t> shape() {
    std::vector<std::int64_t> sizes;
    expect('(');
    while (!take(')')) {
      skip_spaces();
      std::int64_t size = 0;
      const auto [stop, error] = std::from_chars(bytes_.data() + at_, bytes_.data() + end_, size);
      if (error != std::errc{}) fail("expected a dimension");
      at_ += static_cast<std::uint64_t>(stop - (bytes_.data() + at_));
      if (at_ < end_ && bytes_[at_] == 'L') ++at_;  // written by Python 2
      sizes.push_back(size);
      if (!take(',')) {
        expect(')');
        break;
      }
    }
    return sizes;
  }

 private:
  void skip_spaces() {
    while (at_ < end_ && (bytes_[at_] == ' ' || bytes_[at_] == '\n')) ++at_;
  }

  std::string_view bytes_;
  std::uint64_t at_, end_;
  const std::string& file_;
};

ElementType element_type(std::string_view descr, const HeaderReader& reader) {
  const std::string_view kind = descr.size() > 1 && std::string_view("<>|=").find(descr[0]) != std::string_view::npos ? descr.substr(1) : descr;
  for (const auto& [name, type] : kKinds) {
    if (kind != name) continue;
    if (descr[0] == '>' && element_size(type) > Bytes(1)) {
      reader.fail(fmt::format("elements are big-endian ({}); save array.astype('<{}') instead", descr, kind));
    }
    return type;
  }
  if (kind.starts_with('O')) reader.fail("an array of Python objects; save one of numbers (array.astype('float32'))");
  reader.fail(fmt::format("elements of type '{}' cannot be trained on; numbers of 1, 2, 4 or 8 bytes and bool can", descr));
}

}  // namespace

ArrayInfo read_npy(std::string_view bytes, std::uint64_t begin, std::uint64_t end, const std::string& file) {
  const auto fail = [&](std::uint64_t at, const std::string& reason) { throw BadInput(file, at, reason); };
  if (end > bytes.size() || begin > end || end - begin < 10 || !bytes.substr(begin).starts_with("\x93NUMPY")) fail(begin, "not an .npy array: its first bytes are not \\x93NUMPY");
  const int version = static_cast<unsigned char>(bytes[begin + 6]);
  if (version < 1 || version > 3) fail(begin + 6, fmt::format(".npy of version {}; 1 to 3 are known", version));
  const int width = version == 1 ? 2 : 4;
  const std::uint64_t start = begin + 8 + static_cast<std::uint64_t>(width);
  if (start > end) fail(begin, "an .npy array that ends in its header");
  const std::uint64_t length = detail::little_endian(bytes, begin + 8, width);
  if (length > end - start) fail(begin + 8, fmt::format("an .npy header of {} bytes where {} are left", length, end - start));

  HeaderReader reader(bytes, start, start + length, file);
  ArrayInfo array;
  bool has_type = false, has_order = false, has_shape = false;
  reader.expect('{');
  while (!reader.take('}')) {
    const std::string_view key = reader.quoted();
    reader.expect(':');
    if (key == "descr") {
      if (reader.take('[')) reader.fail("an array of records; save each field as an array of its own (numpy.savez)");
      array.type = element_type(reader.quoted(), reader);
      has_type = true;
    } else if (key == "fortran_order") {
      if (reader.boolean()) reader.fail("columns come first (fortran_order); save numpy.ascontiguousarray(array) instead");
      has_order = true;
    } else if (key == "shape") {
      array.shape = reader.shape();
      has_shape = true;
    } else {
      reader.fail("a key that is not descr, fortran_order or shape");
    }
    if (!reader.take(',')) {
      reader.expect('}');
      break;
    }
  }
  if (!has_type || !has_order || !has_shape) reader.fail("descr, fortran_order or shape is missing");
  array.offset = start + length;
  array.bytes = detail::array_bytes(array.type, array.shape, file, start);
  detail::check_extent(array, end, file);
  return array;
}

}  // namespace memfit::data
