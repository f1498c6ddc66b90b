#include <algorithm>
#include <bit>
#include <charconv>
#include <cstring>
#include <string>

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/object_builder.h"
#include "memfit/snapshot/detail/readers.h"

namespace memfit::snapshot::detail {
namespace {

/// The name of an opcode that is refused, as pickletools gives it; nullptr for a byte that is no opcode at all.
const char* refused_name(std::uint8_t op) {
  switch (op) {
    case 'c':
      return "GLOBAL";
    case 0x93:
      return "STACK_GLOBAL";
    case 'R':
      return "REDUCE";
    case 'b':
      return "BUILD";
    case 'i':
      return "INST";
    case 'o':
      return "OBJ";
    case 0x81:
      return "NEWOBJ";
    case 0x92:
      return "NEWOBJ_EX";
    case 'P':
      return "PERSID";
    case 'Q':
      return "BINPERSID";
    case 0x82:
      return "EXT1";
    case 0x83:
      return "EXT2";
    case 0x84:
      return "EXT4";
    case 0x97:
      return "NEXT_BUFFER";
    case 0x98:
      return "READONLY_BUFFER";
    default:
      return nullptr;
  }
}

class PickleReader {
 public:
  PickleReader(ByteSource& source, trace::AllocatorSnapshot& out) : source_(source), out_(out), builder_(source, out) {}

  void read() {
    while (step()) {}
    builder_.finish();
    out_.format = "pickle protocol " + std::to_string(protocol_);
  }

 private:
  [[noreturn]] void truncated(std::uint64_t needed) {
    throw BadInput(source_.name(), source_.offset(),
                   "ends in the middle of a pickle: " + std::to_string(needed) + " more bytes were announced and " +
                       std::to_string(source_.end - source_.p) + " are left");
  }
  void need(std::uint64_t count) {
    if (!source_.ensure(count)) [[unlikely]]
      truncated(count);
  }
  template <typename T>
  T fixed() {
    need(sizeof(T));
    T value;
    std::memcpy(&value, source_.p, sizeof value);
    source_.p += sizeof value;
    return value;
  }
  std::string_view bytes(std::uint64_t count) {
    need(count);
    const std::string_view text(reinterpret_cast<const char*>(source_.p), count);
    source_.p += count;
    return text;
  }
  std::string line() {
    std::string text;
    for (;;) {
      const char c = static_cast<char>(fixed<std::uint8_t>());
      if (c == '\n') return text;
      text += c;
      if (text.size() > 1000) builder_.bad("has a text number of more than a thousand digits");
    }
  }
  void long_integer(std::uint64_t count);
  void text_integer(std::string text);
  std::uint64_t text_index();
  void text_float();
  void protocol(std::uint8_t version);
  bool step();
  bool rare(std::uint8_t op);

  ByteSource& source_;
  trace::AllocatorSnapshot& out_;
  ObjectBuilder builder_;
  int protocol_ = 0;
};

void PickleReader::long_integer(std::uint64_t count) {
  if (count > 1024) builder_.bad("has an integer of " + std::to_string(count) + " bytes");
  const std::string_view digits = bytes(count);
  if (count == 0) return builder_.push(Value::small(0));
  const bool negative = (static_cast<std::uint8_t>(digits.back()) & 0x80) != 0;
  std::uint64_t low = negative ? ~std::uint64_t{0} : 0;
  std::memcpy(&low, digits.data(), std::min<std::size_t>(count, 8));
  if (count <= 8) return builder_.push_integer(static_cast<std::int64_t>(low));
  const std::uint8_t fill = negative ? 0xff : 0;
  const bool huge =
      std::any_of(digits.begin() + 8, digits.end(), [&](char c) { return static_cast<std::uint8_t>(c) != fill; });
  if (!negative && !huge) return builder_.push_unsigned(low);
  builder_.push_big({negative, huge || low == 0, 0 - low});
}

void PickleReader::text_integer(std::string text) {
  if (!text.empty() && text.back() == 'L') text.pop_back();
  if (text == "01") return builder_.push(Value(Tag::True, 0));
  if (text == "00") return builder_.push(Value(Tag::False, 0));
  std::int64_t number = 0;
  const char* end = text.data() + text.size();
  if (auto [rest, error] = std::from_chars(text.data(), end, number); error == std::errc() && rest == end)
    return builder_.push_integer(number);
  std::uint64_t large = 0;
  if (auto [rest, error] = std::from_chars(text.data(), end, large); error == std::errc() && rest == end)
    return builder_.push_unsigned(large);
  builder_.bad("has \"" + text.substr(0, 40) + "\" where an integer of 64 bits should be");
}

std::uint64_t PickleReader::text_index() {
  const std::string text = line();
  std::uint64_t index = 0;
  const char* end = text.data() + text.size();
  if (auto [rest, error] = std::from_chars(text.data(), end, index); error != std::errc() || rest != end)
    builder_.bad("has \"" + text.substr(0, 40) + "\" where a memo index should be");
  return index;
}

void PickleReader::text_float() {
  const std::string text = line();
  double number = 0;
  const char* end = text.data() + text.size();
  if (auto [rest, error] = std::from_chars(text.data(), end, number); error != std::errc() || rest != end)
    builder_.bad("has \"" + text.substr(0, 40) + "\" where a number should be");
  builder_.push_float(number);
}

void PickleReader::protocol(std::uint8_t version) {
  if (version > 5) builder_.bad("is a pickle of protocol " + std::to_string(version) + "; this version reads 2 to 5");
  protocol_ = version;
}

/// One opcode. Returns: false after STOP.
bool PickleReader::step() {
  need(1);
  const std::uint8_t op = *source_.p++;
  switch (op) {
    case 'h':
      builder_.get(fixed<std::uint8_t>());
      return true;
    case 'j':
      builder_.get(fixed<std::uint32_t>());
      return true;
    case 'K':
      builder_.push(Value::small(fixed<std::uint8_t>()));
      return true;
    case 'M':
      builder_.push(Value::small(fixed<std::uint16_t>()));
      return true;
    case 'J':
      builder_.push(Value::small(fixed<std::int32_t>()));
      return true;
    case 0x8a:
      long_integer(fixed<std::uint8_t>());
      return true;
    case 0x94:
      builder_.memoize();
      return true;
    case '(':
      builder_.push_mark();
      return true;
    case '}':
      builder_.push_dict();
      return true;
    case ']':
      builder_.push_list();
      return true;
    case 'u':
      builder_.set_items();
      return true;
    case 'e':
      builder_.appends();
      return true;
    case 0x8c:
      builder_.push_text(bytes(fixed<std::uint8_t>()));
      return true;
    case 'X':
      builder_.push_text(bytes(fixed<std::uint32_t>()));
      return true;
    case 'q':
      builder_.put(fixed<std::uint8_t>());
      return true;
    case 'r':
      builder_.put(fixed<std::uint32_t>());
      return true;
    case 0x85:
      builder_.make_tuple(1);
      return true;
    case 0x86:
      builder_.make_tuple(2);
      return true;
    case 0x87:
      builder_.make_tuple(3);
      return true;
    case 'a':
      builder_.append();
      return true;
    case 's':
      builder_.set_item();
      return true;
    case 'N':
      builder_.push(Value());
      return true;
    case 0x88:
      builder_.push(Value(Tag::True, 0));
      return true;
    case 0x89:
      builder_.push(Value(Tag::False, 0));
      return true;
    case 0x95:  // FRAME: a hint for readers that buffer; it must at least fit the file
      if (const std::uint64_t length = fixed<std::uint64_t>();
          source_.size() != 0 && length > source_.size() - source_.offset())
        truncated(length);
      return true;
    case '.':
      return false;
    default:
      return rare(op);
  }
}

bool PickleReader::rare(std::uint8_t op) {
  switch (op) {
    case 0x80:
      protocol(fixed<std::uint8_t>());
      return true;
    case 'G': {
      const std::uint64_t word = __builtin_bswap64(fixed<std::uint64_t>());
      builder_.push_float(std::bit_cast<double>(word));
      return true;
    }
    case 0x8b: {
      const std::int32_t count = fixed<std::int32_t>();
      if (count < 0) builder_.bad("has an integer of negative length");
      long_integer(static_cast<std::uint64_t>(count));
      return true;
    }
    case 0x8d:
      builder_.push_text(bytes(fixed<std::uint64_t>()));
      return true;
    case 'B':
      builder_.push_bytes(bytes(fixed<std::uint32_t>()));
      return true;
    case 'C':
    case 'U':
      builder_.push_bytes(bytes(fixed<std::uint8_t>()));
      return true;
    case 0x8e:
    case 0x96:
      builder_.push_bytes(bytes(fixed<std::uint64_t>()));
      return true;
    case 'T': {
      const std::int32_t count = fixed<std::int32_t>();
      if (count < 0) builder_.bad("has a string of negative length");
      builder_.push_bytes(bytes(static_cast<std::uint64_t>(count)));
      return true;
    }
    case ')':
      builder_.push_mark();
      builder_.make_tuple();
      return true;
    case 't':
      builder_.make_tuple();
      return true;
    case 'l':
      builder_.make_list();
      return true;
    case 'd':
      builder_.make_dict();
      return true;
    case 0x8f:
      builder_.push_list();
      return true;  // a set reads as a list
    case 0x90:
      builder_.appends();
      return true;  // ADDITEMS
    case 0x91:
      builder_.make_list();
      return true;  // FROZENSET
    case '0':
      builder_.pop();
      return true;
    case '1':
      builder_.pop_mark();
      return true;
    case '2':
      builder_.dup();
      return true;
    case 'I':
    case 'L':
      text_integer(line());
      return true;
    case 'F':
      text_float();
      return true;
    case 'g':
      builder_.get(text_index());
      return true;
    case 'p':
      builder_.put(text_index());
      return true;
    default:
      break;
  }
  --source_.p;
  if (const char* name = refused_name(op))
    builder_.bad(std::string("opcode ") + name +
                 " would build an object or call code; a memory snapshot has none, so it is refused");
  if (op == 'S' || op == 'V')
    builder_.bad("a text string of protocol 0 (opcode STRING or UNICODE); this version reads protocols 2 to 5");
  static const char* const kHex = "0123456789abcdef";
  builder_.bad(std::string("byte 0x") + kHex[op >> 4] + kHex[op & 15] + " is no pickle opcode");
}

}  // namespace

void read_pickle(ByteSource& source, trace::AllocatorSnapshot& out) { PickleReader(source, out).read(); }

}  // namespace memfit::snapshot::detail
