#include "memfit/model/detail/schema_numbers.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <utility>

namespace memfit::model::detail {
namespace {

template <typename T, std::size_t N>
T look_up(const std::array<std::pair<int, T>, N>& table, int number, const char* what) {
  for (const auto& [key, value] : table) {
    if (key == number) return value;
  }
  throw std::invalid_argument(fmt::format("{} number {} is not supported", what, number));
}

constexpr std::array<std::pair<int, c10::ScalarType>, 16> kTypes{{{1, c10::kByte}, {2, c10::kChar}, {3, c10::kShort}, {4, c10::kInt}, {5, c10::kLong},
    {6, c10::kHalf}, {7, c10::kFloat}, {8, c10::kDouble}, {9, c10::kComplexHalf}, {10, c10::kComplexFloat}, {11, c10::kComplexDouble}, {12, c10::kBool},
    {13, c10::kBFloat16}, {28, c10::kUInt16}, {29, c10::kFloat8_e4m3fn}, {30, c10::kFloat8_e5m2}}};
constexpr std::array<std::pair<int, c10::MemoryFormat>, 4> kFormats{{{1, c10::MemoryFormat::Contiguous}, {2, c10::MemoryFormat::ChannelsLast},
    {3, c10::MemoryFormat::ChannelsLast3d}, {4, c10::MemoryFormat::Preserve}}};
constexpr std::array<std::pair<int, c10::Layout>, 1> kLayouts{{{7, c10::kStrided}}};

}  // namespace

c10::ScalarType scalar_type_of(int number) { return look_up(kTypes, number, "element type"); }
c10::MemoryFormat memory_format_of(int number) { return look_up(kFormats, number, "memory format"); }
c10::Layout layout_of(int number) { return look_up(kLayouts, number, "layout"); }

c10::Device device_of(const nlohmann::json& device) {
  const auto type = device.at("type").get<std::string>();
  if (type != "cpu") throw std::invalid_argument(fmt::format("made for device {}; export the model on the CPU", type));
  return c10::kCPU;
}

}  // namespace memfit::model::detail
