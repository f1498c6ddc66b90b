#include "memfit/snapshot/snapshot_reader.h"

#include "memfit/core/error.h"
#include "memfit/snapshot/detail/byte_source.h"
#include "memfit/snapshot/detail/readers.h"

namespace memfit::snapshot {
namespace {

bool is_blank(std::uint8_t c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

trace::AllocatorSnapshot read(detail::ByteSource& source, const std::string& name) {
  if (!source.ensure(1)) throw BadInput(name, 0, "is empty");
  trace::AllocatorSnapshot snapshot;
  snapshot.file = name;
  source.ensure(64);
  const std::uint8_t* look = source.p;
  while (look != source.end && is_blank(*look)) ++look;
  const std::uint8_t first = *source.p;
  const std::uint8_t second = source.end - source.p > 1 ? source.p[1] : 0;
  if (first == 0x1f && second == 0x8b) throw BadInput(name, 0, "is compressed with gzip; unpack it first (gunzip)");
  if (first == 'P' && second == 'K') throw BadInput(name, 0, "is a zip archive (torch.save?), not a memory snapshot");
  try {
    // A JSON text starts with { or [ as well as an opcode of protocol 0 could; pickles of protocol 2 and later with
    // 0x80.
    if (first != 0x80 && look != source.end && (*look == '{' || *look == '[')) {
      detail::read_json(source, snapshot);
    } else if (first == 0x80 || first == ']' || first == '}' || first == '(') {
      detail::read_pickle(source, snapshot);
    } else {
      throw BadInput(name, 0, "is no memory snapshot: neither a pickle nor JSON");
    }
  } catch (const std::length_error& error) {
    throw BadInput(name, source.offset(), error.what());
  }
  snapshot.file_bytes = source.size() != 0 ? source.size() : source.bytes_read();
  return snapshot;
}

}  // namespace

trace::AllocatorSnapshot read_allocator_snapshot(const std::string& path) {
  detail::ByteSource source(path);
  return read(source, path);
}

trace::AllocatorSnapshot read_allocator_snapshot_bytes(std::string_view bytes, const std::string& name) {
  detail::ByteSource source(bytes, name);
  return read(source, name);
}

}  // namespace memfit::snapshot
