#include "memfit/preload/machine_memory.h"

#include <algorithm>
#include <charconv>
#include <fstream>
#include <optional>
#include <string_view>

#include "memfit/core/error.h"

namespace memfit::preload {
namespace {

std::optional<std::uint64_t> number(std::string_view text) {
  const auto start = text.find_first_not_of(" \t");
  if (start == std::string_view::npos) return std::nullopt;
  std::uint64_t value = 0;
  const auto result = std::from_chars(text.data() + start, text.data() + text.size(), value);
  if (result.ec != std::errc()) return std::nullopt;
  return value;
}

/// The number in a cgroup's limit file; nothing for "max", or where there is no such file.
std::optional<std::uint64_t> limit_in(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  return number(line);
}

/// The smallest limit from `group` ("/a/b") up to the root of the hierarchy at `mount`: each level bounds those below
/// it.
std::uint64_t smallest_limit(const std::string& mount, std::string group, const char* file) {
  std::uint64_t smallest = UINT64_MAX;
  for (;;) {
    if (group == "/") group.clear();
    if (const auto limit = limit_in(mount + group + "/" + file)) smallest = std::min(smallest, *limit);
    if (group.empty()) return smallest;
    group.erase(group.rfind('/'));
  }
}

std::uint64_t cgroup_limit(const std::string& root) {
  std::uint64_t smallest = UINT64_MAX;
  std::ifstream file(root + "/proc/self/cgroup");
  // Lines are "id:controllers:/path"; version 2 has id 0 and no controllers.
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos || line.substr(second + 1, 1) != "/") continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string group = line.substr(second + 1);
    if (controllers == ",,") {
      smallest = std::min(smallest, smallest_limit(root + "/sys/fs/cgroup", group, "memory.max"));
    } else if (controllers.find(",memory,") != std::string::npos) {
      smallest = std::min(smallest, smallest_limit(root + "/sys/fs/cgroup/memory", group, "memory.limit_in_bytes"));
    }
  }
  return smallest;
}

}  // namespace

Bytes machine_memory(const std::string& root) {
  constexpr std::string_view kKey = "MemTotal:";
  std::ifstream file(root + "/proc/meminfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(kKey)) continue;
    if (const auto kib = number(std::string_view(line).substr(kKey.size()))) {
      return Bytes(std::min(*kib * 1024, cgroup_limit(root)));
    }
  }
  throw Error(ExitStatus::Failed, root + "/proc/meminfo does not say how much memory this machine has");
}

}  // namespace memfit::preload
