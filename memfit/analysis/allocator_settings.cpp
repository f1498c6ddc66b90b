#include "memfit/analysis/allocator_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cctype>
#include <charconv>
#include <vector>

namespace memfit::analysis {
namespace {

template <typename T>
bool number(const std::string& text, T& out) {
  auto [rest, error] = std::from_chars(text.data(), text.data() + text.size(), out);
  return error == std::errc() && rest == text.data() + text.size();
}

/// 0 for sizes below 2 MiB, 1 below 4 MiB, ... as the table of divisions is indexed.
std::size_t division_index(std::uint64_t size) {
  const int index = (size == 0 ? 0 : 63 - std::countl_zero(size)) - 20;
  return static_cast<std::size_t>(std::clamp(index, 0, 15));
}

std::uint64_t next_division(std::uint64_t size, std::uint64_t divisions) {
  if (std::has_single_bit(size)) return size;
  const std::uint64_t floor = std::bit_floor(size);
  const std::uint64_t step = floor >> (std::bit_width(divisions) - 1);
  if (step == 0) return floor << 1;
  const std::uint64_t below = size & ~(step - 1);
  return below == size ? size : below + step;
}

std::vector<std::string> tokens_of(const std::string& conf) {
  std::vector<std::string> tokens;
  std::string word;
  for (const char c : conf) {
    if (c == ',' || c == ':' || c == '[' || c == ']') {
      if (!word.empty()) tokens.push_back(std::move(word));
      word.clear();
      tokens.emplace_back(1, c);
    } else if (std::isspace(static_cast<unsigned char>(c)) == 0) {
      word += c;
    }
  }
  if (!word.empty()) tokens.push_back(word);
  return tokens;
}

/// "[256:1,512:2,>:8]" or one number for all.
bool parse_divisions(const std::vector<std::string>& tokens, std::size_t& i, AllocatorSettings& settings) {
  std::uint32_t all = 0;
  auto& table = settings.roundup_power2_divisions;
  if (tokens[i] != "[") {
    if (!number(tokens[i], all)) return false;
    table.fill(all);
    return true;
  }
  std::size_t first_free = 0;
  std::uint32_t last = 0;
  for (++i; i < tokens.size() && tokens[i] != "]"; ++i) {
    if (tokens[i] == ",") continue;
    if (i + 2 >= tokens.size() || tokens[i + 1] != ":" || !number(tokens[i + 2], last)) return false;
    if (tokens[i] == ">") {
      for (std::size_t k = first_free; k < table.size(); ++k) table[k] = last;
      first_free = table.size();
    } else {
      std::uint64_t mib = 0;
      if (!number(tokens[i], mib) || !std::has_single_bit(mib)) return false;
      const std::size_t index =
          std::min<std::size_t>(static_cast<std::size_t>(std::countr_zero(mib)), table.size() - 1);
      // The first entry counts for everything below it too.
      for (std::size_t k = first_free; k <= index; ++k) table[k] = last;
      first_free = std::max(first_free, index + 1);
    }
    i += 2;
  }
  return i < tokens.size();
}

}  // namespace

std::uint64_t AllocatorSettings::round(std::uint64_t requested) const {
  if (requested < kMinBlock) return kMinBlock;
  const std::uint32_t divisions = roundup_power2_divisions[division_index(requested)];
  if (divisions > 1 && requested > kMinBlock * divisions) return next_division(requested, divisions);
  return (requested + kMinBlock - 1) / kMinBlock * kMinBlock;
}

std::uint64_t AllocatorSettings::segment_size(std::uint64_t rounded) const {
  if (rounded <= kSmallLimit) return kSmallSegment;
  if (rounded < kLargeLimit) return large_segment;
  return (rounded + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

bool apply_conf(const std::string& conf, AllocatorSettings& settings) {
  const std::vector<std::string> tokens = tokens_of(conf);
  bool good = true;
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    if (tokens[i] == ",") continue;
    const std::string key = tokens[i];
    if (i + 2 >= tokens.size() || tokens[i + 1] != ":") return false;
    i += 2;
    const std::string value = tokens[i];
    std::uint64_t mib = 0;
    double fraction = 0;
    if (key == "max_split_size_mb") {
      good = number(value, mib) && mib < (std::uint64_t{1} << 30) && good;
      if (good) settings.max_split_size = mib << 20;
    } else if (key == "max_non_split_rounding_mb") {
      good = number(value, mib) && mib < (std::uint64_t{1} << 30) && good;
      if (good) settings.max_non_split_rounding = mib << 20;
    } else if (key == "large_segment_size_mb") {
      good = number(value, mib) && mib >= 2 && mib < (std::uint64_t{1} << 30) && good;
      if (good) settings.large_segment = mib << 20;
    } else if (key == "garbage_collection_threshold") {
      good = number(value, fraction) && good;
      if (good) settings.garbage_collection_threshold = fraction;
    } else if (key == "per_process_memory_fraction") {
      good = number(value, fraction) && fraction > 0 && fraction <= 1 && good;
      if (good) settings.memory_fraction = fraction;
    } else if (key == "expandable_segments") {
      settings.expandable_segments = value == "True" || value == "true";
    } else if (key == "roundup_power2_divisions") {
      if (!parse_divisions(tokens, i, settings)) return false;
    } else if (value == "[") {
      while (i < tokens.size() && tokens[i] != "]") ++i;
    }
  }
  return good;
}

AllocatorSettings settings_of(const trace::RecordedSettings& recorded) {
  AllocatorSettings settings;
  apply_conf(recorded.conf, settings);  // what the fields below do not carry (large_segment_size_mb, ...)
  if (recorded.max_split_size) settings.max_split_size = *recorded.max_split_size;
  if (recorded.expandable_segments) settings.expandable_segments = *recorded.expandable_segments;
  if (recorded.garbage_collection_threshold)
    settings.garbage_collection_threshold = *recorded.garbage_collection_threshold;
  // A share, whatever a file says (also no number at all).
  if (!(settings.garbage_collection_threshold > 0)) settings.garbage_collection_threshold = 0;
  settings.garbage_collection_threshold = std::min(settings.garbage_collection_threshold, 1.0);
  std::size_t index = 0;
  for (const auto& [key, divisions] : recorded.roundup_power2_divisions) {
    std::uint64_t mib = 0;
    // Keys are 1, 2, 4, ... megabytes, in this order.
    if (number(key, mib) && std::has_single_bit(mib)) index = static_cast<std::size_t>(std::countr_zero(mib));
    if (index < settings.roundup_power2_divisions.size() && divisions <= 1u << 20)
      settings.roundup_power2_divisions[index] = static_cast<std::uint32_t>(divisions);
    ++index;
  }
  return settings;
}

std::string conf_text(const AllocatorSettings& settings) {
  const AllocatorSettings usual;
  std::vector<std::string> parts;
  if (settings.expandable_segments) parts.emplace_back("expandable_segments:True");
  if (settings.max_split_size != kNoSplitLimit)
    parts.push_back(fmt::format("max_split_size_mb:{}", settings.max_split_size >> 20));
  if (settings.max_non_split_rounding != usual.max_non_split_rounding)
    parts.push_back(fmt::format("max_non_split_rounding_mb:{}", settings.max_non_split_rounding >> 20));
  if (settings.large_segment != usual.large_segment)
    parts.push_back(fmt::format("large_segment_size_mb:{}", settings.large_segment >> 20));
  if (settings.garbage_collection_threshold > 0)
    parts.push_back(fmt::format("garbage_collection_threshold:{}", settings.garbage_collection_threshold));
  const auto& table = settings.roundup_power2_divisions;
  if (table != usual.roundup_power2_divisions) {
    if (std::all_of(table.begin(), table.end(), [&](std::uint32_t d) { return d == table[0]; })) {
      parts.push_back(fmt::format("roundup_power2_divisions:{}", table[0]));
    } else {
      std::string list;
      for (std::size_t k = 0; k + 1 < table.size(); ++k) list += fmt::format("{}:{},", 1u << k, table[k]);
      parts.push_back(fmt::format("roundup_power2_divisions:[{}>:{}]", list, table.back()));
    }
  }
  if (settings.memory_fraction)
    parts.push_back(fmt::format("per_process_memory_fraction:{}", *settings.memory_fraction));
  return fmt::format("{}", fmt::join(parts, ","));
}

}  // namespace memfit::analysis
