#include "memfit/trace/mft.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "memfit/core/error.h"

namespace memfit::trace {
namespace {

constexpr std::string_view kMagic{"\x89MFT\r\n\x1a\n", 8};
constexpr char kInfoTag = 'I', kStepTag = 'S', kEndTag = 'E';
constexpr std::size_t kSectionHead = 9;  // tag, length

std::uint32_t crc32(std::string_view data) {
  static const auto table = [] {
    std::array<std::uint32_t, 256> t{};
    for (std::uint32_t i = 0; i < 256; ++i) {
      std::uint32_t c = i;
      for (int k = 0; k < 8; ++k) c = c & 1 ? 0xedb88320u ^ (c >> 1) : c >> 1;
      t[i] = c;
    }
    return t;
  }();
  std::uint32_t c = 0xffffffffu;
  for (unsigned char byte : data) c = table[(c ^ byte) & 0xff] ^ (c >> 8);
  return ~c;
}

// --- writing -----------------------------------------------------------------------------------------------------

class Encoder {
 public:
  void fixed(std::uint64_t x, int bytes) {
    for (int i = 0; i < bytes; ++i) out_.push_back(static_cast<char>(x >> (8 * i)));
  }
  void number(std::uint64_t x) {
    for (; x >= 0x80; x >>= 7) out_.push_back(static_cast<char>(x | 0x80));
    out_.push_back(static_cast<char>(x));
  }
  void maybe(std::uint32_t x) { number(x == kNone ? 0 : static_cast<std::uint64_t>(x) + 1); }
  void real(double x) { fixed(std::bit_cast<std::uint64_t>(x), 8); }
  void real32(float x) { fixed(std::bit_cast<std::uint32_t>(x), 4); }
  void text(std::string_view s) {
    number(s.size());
    out_.append(s);
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

enum ValueFlag : std::uint8_t { kNeededAfter = 1, kPinned = 2, kPackable = 4, kOverwrites = 8, kHasShape = 16 };

void encode_value(Encoder& e, const Value& v) {
  const std::uint8_t flags = static_cast<std::uint8_t>((v.needed_after ? kNeededAfter : 0) | (v.pinned ? kPinned : 0) | (v.packable ? kPackable : 0) |
                                                       (v.overwrites != kNone ? kOverwrites : 0) | (v.shape != kNone ? kHasShape : 0));
  e.fixed(flags, 1);
  e.fixed(static_cast<std::uint8_t>(v.category), 1);
  e.number(v.bytes.count());
  e.maybe(v.producer);
  e.maybe(v.death);
  e.number(v.storage);
  if (flags & kOverwrites) e.number(v.overwrites);
  if (flags & kHasShape) e.number(v.shape);
  if (flags & kPackable) {
    e.number(v.packed_bytes.count());
    e.real32(v.pack_seconds);
    e.real32(v.unpack_seconds);
  }
}

void encode_op(Encoder& e, const Step& step, const Op& op) {
  e.fixed(op.hash, 8);
  e.maybe(op.name);
  e.maybe(op.source_line);
  e.fixed(static_cast<std::uint8_t>(op.replay), 1);
  e.real(op.seconds.count());
  e.number(op.workspace.count());
  for (auto list : {step.inputs(op), step.outputs(op)}) {
    e.number(list.size());
    for (ValueId v : list) e.number(v);
  }
}

std::string encode_step(const Step& step) {
  Encoder e;
  e.number(step.fixed_bytes.count());
  e.real(step.seconds.count());
  e.number(step.batch ? *step.batch + 1 : 0);
  e.number(step.names.size());
  for (const std::string& name : step.names) e.text(name);
  e.number(step.shapes.size());
  for (const auto& shape : step.shapes) {
    e.number(shape.size());
    for (std::int64_t size : shape) e.number(static_cast<std::uint64_t>(size));
  }
  e.number(step.values.size());
  for (const Value& v : step.values) encode_value(e, v);
  e.number(step.ops.size());
  for (const Op& op : step.ops) encode_op(e, step, op);
  return e.take();
}

void add_section(std::string& file, char tag, const std::string& payload) {
  Encoder head;
  head.fixed(static_cast<unsigned char>(tag), 1);
  head.fixed(payload.size(), 8);
  const std::string section = head.take() + payload;
  Encoder sum;
  sum.fixed(crc32(section), 4);
  file += section + sum.take();
}

// --- reading -----------------------------------------------------------------------------------------------------

/// Reads from data[at .. end), never beyond.
class Decoder {
 public:
  Decoder(std::string_view data, std::size_t at, std::size_t end, const std::string& file) : data_(data), at_(at), end_(end), file_(file) {}

  [[noreturn]] void bad(const std::string& why) const { throw BadInput(file_, at_, why); }
  [[noreturn]] void bad_at(std::size_t at, const std::string& why) const { throw BadInput(file_, at, why); }
  std::size_t at() const { return at_; }
  std::size_t left() const { return end_ - at_; }
  void skip(std::size_t bytes) { at_ += bytes; }

  std::uint64_t fixed(int bytes, const char* what) {
    if (left() < static_cast<std::size_t>(bytes)) bad(fmt::format("the file ends inside {}", what));
    std::uint64_t x = 0;
    for (int i = 0; i < bytes; ++i) x |= static_cast<std::uint64_t>(static_cast<unsigned char>(data_[at_ + i])) << (8 * i);
    at_ += bytes;
    return x;
  }
  std::uint64_t number(const char* what) {
    const std::size_t start = at_;
    std::uint64_t x = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const std::uint64_t byte = fixed(1, what);
      if (shift == 63 && byte > 1) break;
      x |= (byte & 0x7f) << shift;
      if (!(byte & 0x80)) return x;
    }
    bad_at(start, fmt::format("{} is no 64-bit number", what));
  }
  std::uint32_t number32(const char* what) {
    const std::size_t start = at_;
    const std::uint64_t x = number(what);
    if (x >= kNone) bad_at(start, fmt::format("{} is too large ({})", what, x));
    return static_cast<std::uint32_t>(x);
  }
  std::uint32_t maybe(const char* what) {
    const std::size_t start = at_;
    const std::uint64_t x = number(what);
    if (x > kNone) bad_at(start, fmt::format("{} is too large ({})", what, x));
    return x == 0 ? kNone : static_cast<std::uint32_t>(x - 1);
  }
  /// A count of things that take at least `least` bytes each: cannot ask for more memory than the file pays for.
  std::uint32_t count(const char* what, std::size_t least) {
    const std::size_t start = at_;
    const std::uint64_t x = number(what);
    if (x > left() / least) bad_at(start, fmt::format("{} is {}, but only {} bytes follow", what, x, left()));
    return static_cast<std::uint32_t>(x);
  }
  double real(const char* what) { return std::bit_cast<double>(fixed(8, what)); }
  float real32(const char* what) { return std::bit_cast<float>(static_cast<std::uint32_t>(fixed(4, what))); }
  std::string text(const char* what) {
    const std::uint32_t size = count(what, 1);
    std::string s(data_.substr(at_, size));
    at_ += size;
    return s;
  }
  std::uint8_t choice(const char* what, std::uint8_t count) {
    const std::uint64_t x = fixed(1, what);
    if (x >= count) bad_at(at_ - 1, fmt::format("{} is {}, known are 0 to {}", what, x, count - 1));
    return static_cast<std::uint8_t>(x);
  }

 private:
  std::string_view data_;
  std::size_t at_, end_;
  const std::string& file_;
};

Value decode_value(Decoder& d) {
  Value v;
  const auto flags = d.choice("the flags of a value", 32);
  v.needed_after = flags & kNeededAfter;
  v.pinned = flags & kPinned;
  v.packable = flags & kPackable;
  v.category = static_cast<Category>(d.choice("the category of a value", kCategoryCount));
  v.bytes = Bytes(d.number("the size of a value"));
  v.producer = d.maybe("the producer of a value");
  v.death = d.maybe("the death of a value");
  v.storage = d.number32("the storage of a value");
  if (flags & kOverwrites) v.overwrites = d.number32("the overwritten value");
  if (flags & kHasShape) v.shape = d.number32("the shape of a value");
  if (flags & kPackable) {
    v.packed_bytes = Bytes(d.number("the packed size of a value"));
    v.pack_seconds = d.real32("the packing time of a value");
    v.unpack_seconds = d.real32("the unpacking time of a value");
  }
  return v;
}

OperandRange decode_operands(Decoder& d, Step& step) {
  OperandRange range;
  range.begin = static_cast<std::uint32_t>(step.operands.size());
  range.count = d.count("the number of operands", 1);
  for (std::uint32_t i = 0; i < range.count; ++i) step.operands.push_back(d.number32("an operand"));
  return range;
}

Op decode_op(Decoder& d, Step& step) {
  Op op;
  op.hash = d.fixed(8, "the hash of an op");
  op.name = d.maybe("the name of an op");
  op.source_line = d.maybe("the source line of an op");
  op.replay = static_cast<Replay>(d.choice("the replay reason of an op", kReplayCount));
  op.seconds = Seconds(d.real("the time of an op"));
  op.workspace = Bytes(d.number("the workspace of an op"));
  op.inputs = decode_operands(d, step);
  op.outputs = decode_operands(d, step);
  return op;
}

Step decode_step(Decoder& d) {
  const std::size_t start = d.at();
  Step step;
  step.fixed_bytes = Bytes(d.number("the fixed bytes"));
  step.seconds = Seconds(d.real("the step time"));
  if (const std::uint64_t batch = d.number("the batch size")) step.batch = batch - 1;
  for (std::uint32_t i = d.count("the number of names", 1); i > 0; --i) step.names.push_back(d.text("a name"));
  for (std::uint32_t i = d.count("the number of shapes", 1); i > 0; --i) {
    auto& shape = step.shapes.emplace_back();
    for (std::uint32_t k = d.count("the rank of a shape", 1); k > 0; --k)
      shape.push_back(static_cast<std::int64_t>(d.number("a dimension")));
  }
  for (std::uint32_t i = d.count("the number of values", 6); i > 0; --i) step.values.push_back(decode_value(d));
  for (std::uint32_t i = d.count("the number of ops", 22); i > 0; --i) step.ops.push_back(decode_op(d, step));
  if (d.left() > 0) d.bad("bytes are left over in the step");
  if (auto fault = find_fault(step)) d.bad_at(start, "the step breaks a rule: " + *fault);
  return step;
}

TraceInfo decode_info(Decoder& d) {
  TraceInfo info;
  info.program = d.text("the program");
  info.torch_version = d.text("the torch version");
  info.device = d.text("the device");
  info.recorder = d.text("the recorder");
  if (d.left() > 0) d.bad("bytes are left over in the file's description");
  return info;
}

[[noreturn]] void refuse(const std::string& doing, const std::string& path) {
  throw Error(ExitStatus::Failed, fmt::format("{} {}: {}.", doing, path, std::strerror(errno)));
}

/// A file descriptor that closes itself.
struct Descriptor {
  int fd;
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
};

}  // namespace

std::string encode_mft(const Trace& trace) {
  std::string file(kMagic);
  Encoder version;
  version.fixed(kMftVersion, 4);
  file += version.take();
  Encoder info;
  for (const std::string* s : {&trace.info.program, &trace.info.torch_version, &trace.info.device, &trace.info.recorder}) info.text(*s);
  add_section(file, kInfoTag, info.take());
  for (const Step& step : trace.steps) add_section(file, kStepTag, encode_step(step));
  Encoder end;
  end.number(trace.steps.size());
  add_section(file, kEndTag, end.take());
  return file;
}

Trace decode_mft(std::string_view data, const std::string& file) {
  Decoder d(data, 0, data.size(), file);
  if (data.size() < kMagic.size() || data.substr(0, kMagic.size()) != kMagic) {
    if (!data.empty() && kMagic.starts_with(data.substr(0, kMagic.size()))) d.bad_at(data.size(), "the file ends inside its first 8 bytes");
    d.bad("this is not a memfit trace (.mft)");
  }
  d.fixed(8, "the magic");
  const auto version = static_cast<std::uint32_t>(d.fixed(4, "the version"));
  if (version != kMftVersion)
    d.bad_at(8, fmt::format("the file has format version {}, this memfit reads version {}", version, kMftVersion));
  Trace trace;
  bool informed = false;
  for (;;) {
    const std::size_t start = d.at();
    const char tag = static_cast<char>(d.fixed(1, "a section"));
    const std::uint64_t length = d.fixed(8, "a section");
    if (d.left() < 4 || length > d.left() - 4)
      d.bad_at(start, fmt::format("a section of {} bytes is cut off: {} bytes follow", length, d.left()));
    Decoder body(data, d.at(), d.at() + length, file);
    d.skip(length);
    if (static_cast<std::uint32_t>(d.fixed(4, "a checksum")) != crc32(data.substr(start, kSectionHead + length)))
      d.bad_at(start, "the checksum of a section is wrong: the file is corrupt");
    if (!informed && tag != kInfoTag) d.bad_at(start, "the first section does not describe the file");
    if (tag == kInfoTag && !informed) {
      trace.info = decode_info(body);
      informed = true;
    } else if (tag == kStepTag) {
      trace.steps.push_back(decode_step(body));
    } else if (tag == kEndTag) {
      if (body.number("the number of steps") != trace.steps.size() || body.left() > 0) d.bad_at(start, "the number of steps is wrong");
      if (d.left() > 0) d.bad("bytes follow the end of the trace");
      return trace;
    } else {
      d.bad_at(start, fmt::format("unknown section {}", static_cast<int>(tag)));
    }
  }
}

void write_mft(const Trace& trace, const std::string& path, bool force) {
  struct stat there {};
  if (!force && ::stat(path.c_str(), &there) == 0) throw Error(ExitStatus::Failed, path + " exists already. Use --force to replace it.");
  const std::string data = encode_mft(trace);
  const std::string beside = fmt::format("{}.{}.tmp", path, ::getpid());
  {
    Descriptor out{::open(beside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644)};
    if (out.fd < 0) refuse("Cannot write", beside);
    for (std::size_t at = 0; at < data.size();) {
      const ssize_t wrote = ::write(out.fd, data.data() + at, data.size() - at);
      if (wrote < 0 && errno == EINTR) continue;
      if (wrote < 0) {
        const int error = errno;
        ::unlink(beside.c_str());
        errno = error;
        refuse("Cannot write", beside);
      }
      at += static_cast<std::size_t>(wrote);
    }
    if (::fsync(out.fd) != 0) {
      const int error = errno;
      ::unlink(beside.c_str());
      errno = error;
      refuse("Cannot flush", beside);
    }
  }
  if (::rename(beside.c_str(), path.c_str()) != 0) {
    const int error = errno;
    ::unlink(beside.c_str());
    errno = error;
    refuse("Cannot rename to", path);
  }
}

Trace read_mft(const std::string& path) {
  Descriptor in{::open(path.c_str(), O_RDONLY | O_CLOEXEC)};
  if (in.fd < 0) refuse("Cannot read", path);
  struct stat about {};
  if (::fstat(in.fd, &about) != 0) refuse("Cannot read", path);
  if (!S_ISREG(about.st_mode)) throw Error(ExitStatus::BadInput, path + " is not a regular file.");
  std::string data(static_cast<std::size_t>(about.st_size), '\0');
  std::size_t have = 0;
  while (have < data.size()) {
    const ssize_t got = ::read(in.fd, data.data() + have, data.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse("Cannot read", path);
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  data.resize(have);
  return decode_mft(data, path);
}

}  // namespace memfit::trace
