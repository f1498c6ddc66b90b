#include "memfit/data/array_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "memfit/core/error.h"

namespace memfit::data {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

std::string little(std::uint64_t value, int width) {
  std::string bytes;
  for (int i = 0; i < width; ++i) bytes += static_cast<char>(value >> 8 * i);
  return bytes;
}

std::string npy(const std::string& dictionary, const std::string& data) {
  const std::string header = dictionary + std::string((64 - (10 + dictionary.size() + 1) % 64) % 64, ' ') + "\n";
  return std::string("\x93NUMPY\x01\x00", 8) + little(header.size(), 2) + header + data;
}

const std::string kFloats = npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", std::string(24, 'x'));
const std::string kLabels = npy("{'descr': '<i8', 'fortran_order': False, 'shape': (2,), }", std::string(16, 'y'));

struct Member {
  std::string name, bytes;
  int method = 0;
};

std::string zip(const std::vector<Member>& members, bool sizes64 = false) {
  std::string file, directory;
  for (const Member& member : members) {
    const std::uint64_t local = file.size(), size = member.bytes.size();
    const std::string tail = little(0, 4) + little(size, 4) + little(size, 4) + little(member.name.size(), 2);
    file += "PK\x03\x04" + little(20, 2) + little(0, 2) + little(static_cast<std::uint64_t>(member.method), 2) + little(0, 4) + tail + little(0, 2) +
            member.name + member.bytes;
    const std::string extra = sizes64 ? little(1, 2) + little(24, 2) + little(size, 8) + little(size, 8) + little(local, 8) : "";
    const std::uint64_t none = 0xffffffff;
    directory += "PK\x01\x02" + little(20, 2) + little(20, 2) + little(0, 2) + little(static_cast<std::uint64_t>(member.method), 2) + little(0, 8) +
                 little(sizes64 ? none : size, 4) + little(sizes64 ? none : size, 4) + little(member.name.size(), 2) + little(extra.size(), 2) +
                 little(0, 10) + little(sizes64 ? none : local, 4) + member.name + extra;
  }
  const std::uint64_t begin = file.size(), count = members.size();
  file += directory;
  if (sizes64) {
    const std::uint64_t end = file.size();
    file += "PK\x06\x06" + little(44, 8) + little(45, 2) + little(45, 2) + little(0, 8) + little(count, 8) + little(count, 8) +
            little(directory.size(), 8) + little(begin, 8);
    file += "PK\x06\x07" + little(0, 4) + little(end, 8) + little(1, 4);
    return file + "PK\x05\x06" + little(0, 4) + little(0xffff, 2) + little(0xffff, 2) + little(0xffffffff, 4) + little(0xffffffff, 4) + little(0, 2);
  }
  return file + "PK\x05\x06" + little(0, 4) + little(count, 2) + little(count, 2) + little(directory.size(), 4) + little(begin, 4) + little(0, 2);
}

std::string safetensors(const std::string& header, const std::string& data) { return little(header.size(), 8) + header + data; }

std::string refusal(const std::string& bytes) {
  try {
    read_array_file(bytes, "f");
  } catch (const BadInput& error) {
    return error.what();
  }
  return "not refused";
}

TEST(ArrayFile, AnNpyArrayIsFoundWhereItLies) {
  const std::vector<ArrayInfo> arrays = read_array_file(kFloats, "f");
  ASSERT_EQ(arrays.size(), 1U);
  EXPECT_EQ(arrays[0].type, ElementType::Float32);
  EXPECT_THAT(arrays[0].shape, ElementsAre(2, 3));
  EXPECT_EQ(kFloats.substr(arrays[0].offset, arrays[0].bytes.count()), std::string(24, 'x'));
}

TEST(ArrayFile, AnNpzOfTwoArraysIsReadWithShortAndLongSizes) {
  for (const bool sizes64 : {false, true}) {
    const std::string file = zip({{"x.npy", kFloats}, {"y.npy", kLabels}}, sizes64);
    const std::vector<ArrayInfo> arrays = read_array_file(file, "f");
    ASSERT_EQ(arrays.size(), 2U);
    EXPECT_EQ(arrays[1].name, "y");
    EXPECT_EQ(arrays[1].type, ElementType::Int64);
    EXPECT_EQ(file.substr(arrays[1].offset, arrays[1].bytes.count()), std::string(16, 'y'));
  }
}

TEST(ArrayFile, SafetensorsComeInTheOrderOfTheirBytes) {
  const std::string file = safetensors(R"({"b":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[8,12]},)"
                                       R"("__metadata__":{"format":"pt"}})", "01234567abcd");
  const std::vector<ArrayInfo> arrays = read_array_file(file, "f");
  ASSERT_EQ(arrays.size(), 2U);
  EXPECT_EQ(arrays[0].name, "b");
  EXPECT_EQ(arrays[1].type, ElementType::BFloat16);
  EXPECT_EQ(file.substr(arrays[1].offset, arrays[1].bytes.count()), "abcd");
}

TEST(ArrayFile, AnIdxFileIsRead) {
  const std::string file = std::string("\0\0\x08\x02\0\0\0\x02\0\0\0\x03", 12) + "abcdef";
  const std::vector<ArrayInfo> arrays = read_array_file(file, "f");
  EXPECT_THAT(arrays.at(0).shape, ElementsAre(2, 3));
  EXPECT_EQ(file.substr(arrays[0].offset, arrays[0].bytes.count()), "abcdef");
}

TEST(ArrayFile, RefusalsSayWhatToWriteInstead) {
  EXPECT_THAT(refusal(kFloats.substr(0, kFloats.size() - 1)), HasSubstr("(float32 [2, 3]) needs 24 bytes from here and 23 are there"));
  EXPECT_THAT(refusal(npy("{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", "abcd")), HasSubstr("astype('<f4')"));
  EXPECT_THAT(refusal(npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,)}", "abcdefgh")), HasSubstr("Python objects"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}", "abcd")), HasSubstr("ascontiguousarray"));
  EXPECT_THAT(refusal(npy("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", "abcd")), HasSubstr("records"));
  EXPECT_THAT(refusal(zip({{"x.npy", kFloats, 8}})), HasSubstr("instead of savez_compressed"));
  EXPECT_THAT(refusal(zip({{"x.npy", kFloats}, {"x.npy", kFloats}})), HasSubstr("there twice"));
  EXPECT_THAT(refusal(zip({{"data.pkl", "."}})), HasSubstr("not an .npy array"));
  EXPECT_THAT(refusal(std::string("\0\0\x0d\x01\0\0\0\x01", 8) + "abcd"), HasSubstr("big-endian"));
  EXPECT_THAT(refusal("hello there"), HasSubstr("no array file"));
  EXPECT_THAT(refusal(""), HasSubstr("no array file"));
}

TEST(ArrayFile, HostileNumbersAreRefused) {
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296, 4294967296, 0)}", "")), HasSubstr("63 bits"));
  EXPECT_THAT(refusal(npy("{'descr': '<f8', 'fortran_order': False, 'shape': (2305843009213693952,)}", "")), HasSubstr("63 bits"));
  EXPECT_THAT(refusal(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", "abcd")), HasSubstr("negative"));
  EXPECT_THAT(refusal(std::string("\x93NUMPY\x02\x00\xff\xff\xff\x7f", 12) + "{}"), HasSubstr("where 2 are left"));
  EXPECT_THAT(refusal(little(~0ULL, 8) + "{}"), HasSubstr("a header of 18446744073709551615 bytes"));
  EXPECT_THAT(refusal(safetensors(R"({"a":)" + std::string(1'000'000, '['), "")), HasSubstr("nested deeper"));
  EXPECT_THAT(refusal(safetensors(R"({"__metadata__":{"a":77717e57757}})", "")), HasSubstr("the header cannot be read"));
  EXPECT_THAT(refusal(safetensors(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", "abcd")), HasSubstr("cut off"));
  EXPECT_THAT(refusal(safetensors(R"({"a":{"dtype":"F32","shape":[9223372036854775807,2],"data_offsets":[0,4]}})", "abcd")), HasSubstr("63 bits"));
  EXPECT_THAT(refusal(safetensors(R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}})", "abcdef")),
              HasSubstr("overlap"));
}

/// Whatever is cut off or changed: arrays inside the file or BadInput, nothing else.
TEST(ArrayFile, EveryCutAndManyFlipsEndWellOrInBadInput) {
  std::mt19937_64 random(1);
  for (const std::string& file : {kFloats, zip({{"x.npy", kFloats}, {"y.npy", kLabels}}), zip({{"x.npy", kFloats}}, true),
                                  safetensors(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", "abcdefgh"),
                                  std::string("\0\0\x08\x02\0\0\0\x02\0\0\0\x03", 12) + "abcdef"}) {
    const auto check = [&](const std::string& bytes) {
      try {
        for (const ArrayInfo& array : read_array_file(bytes, "f")) {
          ASSERT_LE(array.offset, bytes.size());
          ASSERT_LE(array.bytes.count(), bytes.size() - array.offset);
        }
      } catch (const BadInput&) {}
    };
    for (std::size_t length = 0; length < file.size(); ++length) check(file.substr(0, length));
    for (int i = 0; i < 20'000; ++i) {
      std::string changed = file;
      for (std::uint64_t flips = 1 + random() % 4; flips > 0; --flips) changed[random() % changed.size()] = static_cast<char>(random());
      check(changed);
    }
  }
}

}  // namespace
}  // namespace memfit::data
