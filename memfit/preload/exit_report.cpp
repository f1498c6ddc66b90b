#include "memfit/preload/exit_report.h"

#include <fmt/format.h>
#include <time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <sstream>

#include "memfit/core/output_file.h"
#include "memfit/report/run_report.h"

namespace memfit::preload {
namespace {

std::vector<std::string> own_words() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  return words;
}

/// Time since this process was started: field 22 of /proc/self/stat, in clock ticks since boot.
std::optional<std::chrono::nanoseconds> age() {
  std::ifstream file("/proc/self/stat");
  std::string line;
  timespec now{};
  if (!std::getline(file, line) || line.rfind(')') == std::string::npos || clock_gettime(CLOCK_BOOTTIME, &now) != 0) {
    return std::nullopt;
  }
  std::istringstream fields(line.substr(line.rfind(')') + 2));  // from field 3 on
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  std::uint64_t ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  const std::int64_t ns_per_tick = 1'000'000'000 / sysconf(_SC_CLK_TCK);
  return std::chrono::seconds(now.tv_sec) + std::chrono::nanoseconds(now.tv_nsec) -
         std::chrono::nanoseconds(static_cast<std::int64_t>(ticks) * ns_per_tick);
}

std::string report_path(const char* path, const char* rank) {
  return report::rank_report_path(path, rank != nullptr && *rank >= '0' && *rank <= '9' ? std::atoll(rank) : -1);
}

}  // namespace
}  // namespace memfit::preload

using namespace memfit;

int memfit_check_exit_report(const char* path, bool force, char* message, std::size_t capacity) {
  try {
    check_output_file(preload::report_path(path, std::getenv("RANK")), "MEMFIT_REPORT",
                      force ? Replace::Yes : Replace::No);
    return 0;
  } catch (const std::exception& error) {
    std::snprintf(message, capacity, "%s", error.what());
    return 2;
  }
}

void memfit_write_exit_report(const trace::RunStatus* status, const char* path, bool force, bool quiet) {
  try {
    const std::string file = report::rank_report_path(path, status->rank);
    report::RunFacts facts;
    facts.program = preload::own_words();
    facts.wall = preload::age();
    const auto json =
        report::run_report_json(status, facts).dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
    write_output_file(file, json + "\n", force ? Replace::Yes : Replace::No);
    if (!quiet) fmt::print(stderr, "memfit: {}; report: {}\n", report::run_report_line(status, facts), file);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "memfit: %s\n", error.what());
  }
}
