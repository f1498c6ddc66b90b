#include "memfit/report/run_report.h"

#include <fmt/format.h>

#include <csignal>

#include "memfit/core/output_file.h"
#include "memfit/core/version.h"

namespace memfit::report {
namespace {

using nlohmann::ordered_json;

/// A program that fails because of a refusal does little more than unwind; one that handled it works on.
/// Unwinding runs an op here and there (a context manager that copies a scalar), a training step has hundreds.
constexpr std::uint64_t kOpsAfterRefusal = 64;

std::uint64_t value(const trace::RunStatus::Counter& counter) { return counter.load(std::memory_order_relaxed); }

double seconds(const trace::RunStatus::Counter& counter) { return static_cast<double>(value(counter)) / 1e9; }

template <typename T>
ordered_json or_null(const std::optional<T>& known) {
  return known ? ordered_json(*known) : ordered_json(nullptr);
}

ordered_json bytes_or_null(const std::optional<Bytes>& known) {
  return known ? ordered_json(known->count()) : ordered_json(nullptr);
}

ordered_json text_or_null(const char* text) { return *text != '\0' ? ordered_json(text) : ordered_json(nullptr); }

/// A limit of the page, where 0 is none, or else as it was asked for.
std::optional<Bytes> limit(const trace::RunStatus::Counter* counter, const std::optional<Bytes>& asked) {
  if (counter == nullptr) return asked;
  return value(*counter) != 0 ? std::optional(Bytes(value(*counter))) : std::nullopt;
}

struct Limits {
  std::optional<Bytes> memory;
  std::optional<Bytes> tensor_memory;

  // With both, the one that bounds peak_bytes exactly is named: a reader compares limit_bytes with peak_bytes.
  const char* kind() const { return tensor_memory ? "tensor_memory" : memory ? "memory" : "none"; }
  std::optional<Bytes> named() const { return tensor_memory ? tensor_memory : memory; }
};

Limits limits_of(const trace::RunStatus* status, const RunFacts& facts) {
  return {limit(status ? &status->limit_memory_bytes : nullptr, facts.memory_limit),
          limit(status ? &status->limit_tensor_bytes : nullptr, facts.tensor_memory_limit)};
}

std::optional<Bytes> peak_rss_of(const trace::RunStatus* status, const RunFacts& facts) {
  if (facts.peak_rss) return facts.peak_rss;
  if (status != nullptr && value(status->peak_rss_bytes) != 0) return Bytes(value(status->peak_rss_bytes));
  return std::nullopt;
}

ordered_json holders_of(const trace::RunStatus& status) {
  ordered_json holders = ordered_json::array();
  for (const trace::RunStatus::Holder& holder : status.largest_holders) {
    if (holder.bytes == 0) break;
    holders.push_back({{"bytes", holder.bytes}, {"op", holder.op}, {"shape", holder.shape}});
  }
  return holders;
}

/// Sets each key of the counters: from the page, or null where there is none.
void add_counters(ordered_json& json, const trace::RunStatus* status) {
  using Status = trace::RunStatus;
  auto count = [&](const char* key, Status::Counter Status::*counter) {
    json[key] = status != nullptr ? ordered_json(value(status->*counter)) : ordered_json(nullptr);
  };
  auto time = [&](const char* key, Status::Counter Status::*counter) {
    json[key] = status != nullptr ? ordered_json(seconds(status->*counter)) : ordered_json(nullptr);
  };
  count("ops", &Status::ops);
  count("evictions", &Status::evictions);
  count("recomputed_ops", &Status::recomputed_ops);
  time("recompute_seconds", &Status::recompute_ns);
  time("engine_seconds", &Status::engine_ns);
  time("search_seconds", &Status::search_ns);
  count("offload_write_bytes", &Status::offload_write_bytes);
  count("offload_read_bytes", &Status::offload_read_bytes);
  count("planned_steps", &Status::planned_steps);
  count("replanned", &Status::replanned);
  const bool planned = status != nullptr && value(status->planned_steps) != 0;
  json["predicted_peak_bytes"] = planned ? ordered_json(value(status->predicted_peak_bytes)) : ordered_json(nullptr);
  json["predicted_step_seconds"] = planned ? ordered_json(seconds(status->predicted_step_ns)) : ordered_json(nullptr);
  json["step_seconds"] = planned ? ordered_json(seconds(status->step_ns)) : ordered_json(nullptr);
  count("refusals", &Status::refusals);
  count("verified_values", &Status::verified_values);
  count("verify_failures", &Status::verify_failures);
}

std::string plural(std::uint64_t n, const char* one) { return fmt::format("{} {}{}", n, one, n == 1 ? "" : "s"); }

}  // namespace

ordered_json run_report_json(const trace::RunStatus* status, const RunFacts& facts) {
  const Limits limits = limits_of(status, facts);
  ordered_json json;
  json["version"] = std::string(version());
  json["program"] = facts.program;
  json["exit_status"] = or_null(facts.exit_status);
  json["signal"] = or_null(facts.signal);
  json["attached"] = status != nullptr && value(status->attached) != 0;
  json["finished"] = status != nullptr && value(status->finished) != 0;
  json["pid"] = status != nullptr ? ordered_json(status->pid) : ordered_json(nullptr);
  json["rank"] = status != nullptr && status->rank >= 0 ? ordered_json(status->rank) : ordered_json(nullptr);
  json["torch_version"] = text_or_null(status != nullptr ? status->torch_version : "");
  json["device"] = text_or_null(status != nullptr ? status->device : "");
  json["door"] = text_or_null(status != nullptr ? status->door : "");
  json["limit_kind"] = limits.kind();
  json["limit_bytes"] = bytes_or_null(limits.named());
  json["memory_limit_bytes"] = bytes_or_null(limits.memory);
  json["tensor_memory_limit_bytes"] = bytes_or_null(limits.tensor_memory);
  json["peak_bytes"] = status != nullptr ? ordered_json(value(status->peak_bytes)) : ordered_json(nullptr);
  json["peak_rss_bytes"] = bytes_or_null(peak_rss_of(status, facts));
  json["unlimited_peak_bytes"] =
      status != nullptr ? ordered_json(value(status->unlimited_peak_bytes)) : ordered_json(nullptr);
  json["fixed_cost_bytes"] = status != nullptr && value(status->fixed_cost_bytes) != 0
                                 ? ordered_json(value(status->fixed_cost_bytes))
                                 : ordered_json(nullptr);
  json["wall_seconds"] =
      facts.wall ? ordered_json(static_cast<double>(facts.wall->count()) / 1e9) : ordered_json(nullptr);
  add_counters(json, status);
  json["least_limit_bytes"] = status != nullptr && value(status->refusals) != 0
                                  ? ordered_json(value(status->least_limit_bytes))
                                  : ordered_json(nullptr);
  json["largest_holders"] = status != nullptr ? holders_of(*status) : ordered_json::array();
  json["message"] =
      !facts.refusal.empty() ? ordered_json(facts.refusal) : text_or_null(status != nullptr ? status->message : "");
  return json;
}

std::string run_report_line(const trace::RunStatus* status, const RunFacts& facts) {
  const Limits limits = limits_of(status, facts);
  std::string line;
  if (limits.memory) line += fmt::format("memory limit {}, ", format_bytes(*limits.memory));
  if (limits.tensor_memory) line += fmt::format("tensor memory limit {}, ", format_bytes(*limits.tensor_memory));
  if (line.empty()) line = "no limit, ";
  const auto peak_rss = peak_rss_of(status, facts);
  if (status == nullptr) {
    line += facts.refusal.empty() ? "the program used no libtorch: nothing was limited or measured"
                                  : "the program was refused";
    return line;
  }
  line += fmt::format("peak {}", format_bytes(Bytes(value(status->peak_bytes))));
  if (peak_rss) line += fmt::format(" ({} resident)", format_bytes(*peak_rss));
  line += fmt::format(", {}", plural(value(status->evictions), "eviction"));
  if (facts.wall && facts.wall->count() > 0) {
    line += fmt::format(", {:.1f} % of the time recomputing", 100.0 * static_cast<double>(value(status->recompute_ns)) /
                                                                  static_cast<double>(facts.wall->count()));
  }
  if (value(status->verified_values) + value(status->verify_failures) > 0) {
    line += fmt::format(", {} verified, {} wrong", plural(value(status->verified_values), "value"),
                        value(status->verify_failures));
  }
  return line;
}

bool ended_by_refusal(const trace::RunStatus& status, const RunFacts& facts) {
  if (value(status.refusals) == 0) return false;
  // An uncaught C++ exception ends in abort(). Any other signal is somebody else's doing.
  const bool failed = facts.signal ? *facts.signal == SIGABRT : facts.exit_status.value_or(0) != 0;
  // abort() is a thread's end as well, and the program's other threads go on until then.
  const std::uint64_t most = facts.signal ? 100 * kOpsAfterRefusal : kOpsAfterRefusal;
  return failed && value(status.ops) - value(status.ops_at_last_refusal) <= most;
}

std::string rank_report_path(const std::string& path, std::int64_t rank) {
  return rank < 0 ? path : path_with_word(path, fmt::format("rank{}", rank));
}

std::string numbered_report_path(const std::string& path, std::size_t number) {
  return path_with_word(path, std::to_string(number));
}

}  // namespace memfit::report
