#include "memfit/snapshot/snapshot_reader.h"

#include <gtest/gtest.h>

#include <string>

#include "memfit/core/error.h"

namespace memfit::snapshot {
namespace {

using namespace std::string_literals;
using trace::AllocatorAction;

/// Writes pickle opcodes: just enough of protocol 4 to build snapshots by hand.
class Pickle {
 public:
  Pickle() : bytes_("\x80\x04") {}
  Pickle& raw(const std::string& text) {
    bytes_ += text;
    return *this;
  }
  Pickle& text(const std::string& s) {
    if (s.size() < 256) return raw("\x8c"s + static_cast<char>(s.size()) + s + "\x94");
    std::string size(4, '\0');
    for (int i = 0; i < 4; ++i) size[static_cast<std::size_t>(i)] = static_cast<char>(s.size() >> (8 * i));
    return raw("X" + size + s + "\x94");
  }
  Pickle& number(std::uint64_t n) {
    std::string digits;
    for (int i = 0; i < 8; ++i) digits += static_cast<char>(n >> (8 * i));
    return raw("\x8a\x09"s + digits + '\0');
  }
  std::string done() const { return bytes_ + "."; }

 private:
  std::string bytes_;
};

std::string event(const std::string& action, std::uint64_t address, std::uint64_t size) {
  Pickle p;
  const std::string body = p.raw("}(")
                               .text("action")
                               .text(action)
                               .text("addr")
                               .number(address)
                               .text("size")
                               .number(size)
                               .text("stream")
                               .raw("K\x05")
                               .raw("u")
                               .done();
  return body.substr(2, body.size() - 3);
}

std::string snapshot_of(const std::string& events) {
  Pickle p;
  return p.raw("}\x94(")
      .text("segments")
      .raw("]\x94")
      .text("device_traces")
      .raw("]\x94]\x94(")
      .raw(events)
      .raw("eau")
      .done();
}

trace::AllocatorSnapshot read(const std::string& bytes) { return read_allocator_snapshot_bytes(bytes, "s.pickle"); }

std::string refusal(const std::string& bytes) {
  try {
    read(bytes);
  } catch (const BadInput& error) {
    EXPECT_EQ(error.status(), ExitStatus::BadInput);
    return error.what();
  }
  return "accepted";
}

TEST(SnapshotReader, ReadsEvents) {
  const auto s =
      read(snapshot_of(event("alloc", 0x7f0000000000, 1000) + event("free_requested", 0x7f0000000000, 1000)));
  ASSERT_EQ(s.devices.size(), 1u);
  ASSERT_EQ(s.devices[0].count, 2u);
  EXPECT_EQ(s.events[0].action, AllocatorAction::Alloc);
  EXPECT_EQ(s.events[0].address, 0x7f0000000000u);
  EXPECT_EQ(s.events[1].size, 1000u);
  EXPECT_EQ(s.streams[s.events[1].stream], 5u);
  EXPECT_TRUE(s.has_history);
}

TEST(SnapshotReader, KeepsAndCountsUnknownFieldsAndActions) {
  Pickle p;
  const std::string body = p.raw("}(").text("action").text("defragment").text("colour").text("red").raw("u").done();
  const auto s = read(snapshot_of(body.substr(2, body.size() - 3)));
  EXPECT_EQ(s.events[0].action, AllocatorAction::Other);
  EXPECT_EQ(s.unknown_fields.at("event.colour"), 1u);
  EXPECT_EQ(s.unknown_fields.at("action.defragment"), 1u);
}

TEST(SnapshotReader, RefusesEveryOpcodeThatBuildsOrCallsByNameAndOffset) {
  const std::pair<std::string, std::string> kRefused[] = {{"c", "GLOBAL"},
                                                          {"\x93", "STACK_GLOBAL"},
                                                          {"R", "REDUCE"},
                                                          {"b", "BUILD"},
                                                          {"i", "INST"},
                                                          {"o", "OBJ"},
                                                          {"\x81", "NEWOBJ"},
                                                          {"\x92", "NEWOBJ_EX"},
                                                          {"P", "PERSID"},
                                                          {"Q", "BINPERSID"},
                                                          {"\x82", "EXT1"},
                                                          {"\x83", "EXT2"},
                                                          {"\x84", "EXT4"},
                                                          {"\x97", "NEXT_BUFFER"},
                                                          {"\x98", "READONLY_BUFFER"}};
  for (const auto& [op, name] : kRefused) {
    const std::string why = refusal(Pickle().raw("]N").raw(op).done());
    EXPECT_NE(why.find("opcode " + name + " "), std::string::npos) << why;
    EXPECT_NE(why.find("at byte 4"), std::string::npos) << why;
  }
}

TEST(SnapshotReader, RefusesWhatIsNoSnapshot) {
  EXPECT_NE(refusal("").find("is empty"), std::string::npos);
  EXPECT_NE(refusal("hello").find("neither a pickle nor JSON"), std::string::npos);
  EXPECT_NE(refusal("PK\x03\x04").find("zip"), std::string::npos);
  EXPECT_NE(refusal("\x1f\x8b\x08").find("gzip"), std::string::npos);
  EXPECT_NE(refusal(Pickle().raw("K\x01").done()).find("no memory snapshot"), std::string::npos);
  EXPECT_NE(refusal(Pickle().raw("}").done()).find("neither \"segments\""), std::string::npos);
  EXPECT_NE(refusal("{\"a\": [1, 2}").find("JSON"), std::string::npos);
  EXPECT_NE(refusal("[[1]]").find("not segments"), std::string::npos);
}

TEST(SnapshotReader, ForgedLengthsNeitherAllocateNorPass) {
  for (const std::string& forged :
       {"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f"s, "X\xff\xff\xff\xff"s, "\x8e\xff\xff\xff\xff\xff\xff\xff\xff"s,
        "\x8b\xff\xff\xff\x7f"s, "\x95\xff\xff\xff\xff\xff\xff\xff\xff"s, "B\xff\xff\xff\xff"s, "T\xff\xff\xff\x7f"s})
    EXPECT_NE(refusal(Pickle().raw(forged).done()), "accepted");
}

TEST(SnapshotReader, ForgedMemoIndicesNeitherAllocateNorPass) {
  EXPECT_NE(refusal(Pickle().raw("j\xff\xff\xff\xff").done()).find("never stored"), std::string::npos);
  EXPECT_NE(refusal(Pickle().raw("h\x09").done()).find("memo entry 9"), std::string::npos);
  // A far put is legal and costs one entry.
  EXPECT_NE(refusal(Pickle().raw("]r\xfe\xff\xff\xffj\xfe\xff\xff\xff").done()).find("2 values"), std::string::npos);
}

TEST(SnapshotReader, RefusesSizesNoDeviceHas) {
  EXPECT_NE(
      refusal(snapshot_of(event("alloc", 4096, ~0ull))).find("18446744073709551615 bytes is larger than any device"),
      std::string::npos);
  EXPECT_NE(refusal(snapshot_of(event("alloc", ~0ull, 512))).find("outside any address space"), std::string::npos);
}

TEST(SnapshotReader, EveryTruncationIsRefused) {
  const std::string whole = snapshot_of(event("alloc", 4096, 512) + event("free_completed", 4096, 512));
  ASSERT_EQ(read(whole).events.size(), 2u);
  for (std::size_t n = 0; n < whole.size(); ++n) EXPECT_NE(refusal(whole.substr(0, n)), "accepted") << n;
}

TEST(SnapshotReader, TakesLongAndForeignNames) {
  const std::string name(70'000, 'x'), path =
                                           "/home/gr\xc3\xbc\xc3\x9f"
                                           "e/\xff.py";
  Pickle p;
  const std::string body = p.raw("}(")
                               .text("action")
                               .text("alloc")
                               .text("addr")
                               .raw("M\x10\x10")
                               .text("size")
                               .raw("K\x10")
                               .text("frames")
                               .raw("]\x94}\x94(")
                               .text("name")
                               .text(name)
                               .text("filename")
                               .text(path)
                               .text("line")
                               .raw(
                                   "K\x07u"
                                   "au")
                               .done();
  const auto s = read(snapshot_of(body.substr(2, body.size() - 3)));
  ASSERT_EQ(s.frames.size(), 1u);
  EXPECT_EQ(s.text(s.frames[0].function), name);
  EXPECT_EQ(s.text(s.frames[0].file), path);
}

TEST(SnapshotReader, AnEventMayBeFilledOneItemAtATime) {
  Pickle p;
  const std::string body =
      p.raw("}").text("addr").raw("M\x10\x10s").text("action").text("alloc").raw("s").text("size").raw("K\x10s").done();
  const auto s = read(snapshot_of(body.substr(2, body.size() - 3)));
  ASSERT_EQ(s.events.size(), 1u);
  EXPECT_EQ(s.events[0].address, 0x1010u);
  EXPECT_EQ(s.events[0].size, 0x10u);
}

TEST(SnapshotReader, AListFetchedFromTheMemoStaysTheSameList) {
  // Two events share one frames list through the memo, as events of one traceback do.
  Pickle p;
  const std::string body = p.raw("}(")
                               .text("action")
                               .text("alloc")
                               .text("frames")
                               .raw("]r\xe8\x03\x00\x00}("s)
                               .text("name")
                               .text("f")
                               .text("filename")
                               .text("a.py")
                               .text("line")
                               .raw("K\x01u")
                               .raw("a")
                               .raw("u}(")
                               .text("action")
                               .text("alloc")
                               .text("frames")
                               .raw("j\xe8\x03\x00\x00u"s)
                               .done();
  const auto s = read(snapshot_of(body.substr(2, body.size() - 3)));
  ASSERT_EQ(s.events.size(), 2u);
  EXPECT_NE(s.events[0].stack, trace::kNoStack);
  EXPECT_EQ(s.events[0].stack, s.events[1].stack);
}

TEST(SnapshotReader, JsonAndPickleGiveTheSame) {
  const auto s = read(
      R"({"segments": [], "device_traces": [[{"action": "alloc", "addr": 139637976727552, "size": 1000, "stream": 5, "pool_id": [0, 1],
      "frames": [{"name": "f", "filename": "a.py", "line": 3}]}, {"action": "oom", "device_free": 12, "size": 99, "stream": 5}]], "allocator_settings": {"expandable_segments": true, "max_split_size": -1}})");
  ASSERT_EQ(s.devices.size(), 1u);
  EXPECT_EQ(s.events[0].address, 0x7f0000000000u);
  EXPECT_EQ(s.pools[s.events[0].pool], (std::pair<std::uint64_t, std::uint64_t>(0, 1)));
  EXPECT_EQ(s.text(s.frame_of(s.events[0].stack, 0).file), "a.py");
  EXPECT_EQ(s.events[1].action, AllocatorAction::OutOfMemory);
  EXPECT_EQ(s.events[1].address, 12u);
  EXPECT_TRUE(s.settings.expandable_segments.value());
  EXPECT_FALSE(s.settings.max_split_size.has_value());
}

TEST(SnapshotReader, ReadsTheOldListOfSegments) {
  const auto s = read(R"([{"device": 1, "address": 4096, "total_size": 2048, "segment_type": "small", "blocks": [
      {"size": 512, "state": "active_allocated", "history": [{"addr": 4096, "real_size": 300, "frames": [{"name": "g", "filename": "b.py", "line": 1}]}]},
      {"size": 1536, "state": "inactive"}]}])");
  EXPECT_TRUE(s.list_only);
  ASSERT_EQ(s.segments.size(), 1u);
  ASSERT_EQ(s.blocks.size(), 2u);
  EXPECT_EQ(s.blocks[0].requested, 300u);
  EXPECT_EQ(s.blocks[1].address, 4608u);
  EXPECT_NE(s.blocks[0].stack, trace::kNoStack);
}

}  // namespace
}  // namespace memfit::snapshot
