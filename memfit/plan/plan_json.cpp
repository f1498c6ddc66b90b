#include "memfit/plan/plan_json.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <optional>

#include "memfit/core/error.h"

namespace memfit::plan {
namespace {

constexpr std::uint64_t kMostOps = 1u << 28;

std::optional<Action> action_of(const std::string& name) {
  for (std::uint8_t i = 0; i < kActionCount; ++i)
    if (action_name(static_cast<Action>(i)) == name) return static_cast<Action>(i);
  return std::nullopt;
}

class Reader {
 public:
  Reader(const nlohmann::json& json, const std::string& file) : json_(json), file_(file) {}

  Plan read() {
    if (!json_.is_object()) bad("a schedule is a JSON object");
    const std::uint64_t version = number(json_, "version");
    if (version != kPlanJsonVersion) bad(fmt::format("the schedule has version {}, this memfit reads version {}", version, kPlanJsonVersion));
    const std::uint64_t ops = number(json_, "ops");
    if (ops > kMostOps) bad(fmt::format("\"ops\" is {}, more than {}", ops, kMostOps));
    Plan plan;
    if (json_.contains("limit_bytes")) plan.limit = Bytes(number(json_, "limit_bytes"));
    if (json_.contains("starts_offloaded")) {
      if (!json_["starts_offloaded"].is_array()) bad("\"starts_offloaded\" is a list of values");
      for (const auto& v : json_["starts_offloaded"]) plan.starts_offloaded.push_back(id(v));
    }
    instructions(plan, static_cast<std::uint32_t>(ops));
    return plan;
  }

 private:
  [[noreturn]] void bad(const std::string& why) const { throw BadInput(file_, 0, why); }

  std::uint64_t number(const nlohmann::json& object, const char* key) const {
    if (!object.contains(key) || !object[key].is_number_unsigned()) bad(fmt::format("\"{}\" is missing or no whole number", key));
    return object[key].get<std::uint64_t>();
  }

  std::uint32_t id(const nlohmann::json& json) const {
    if (!json.is_number_unsigned() || json.get<std::uint64_t>() >= trace::kNone) bad(fmt::format("{} is no op or value", json.dump()));
    return json.get<std::uint32_t>();
  }

  void instructions(Plan& plan, std::uint32_t ops) const {
    if (!json_.contains("instructions") || !json_["instructions"].is_array()) bad("\"instructions\" is missing or no list");
    plan.offsets.assign(1, 0);
    std::size_t list = 0;  // 2 * op + (after ? 1 : 0): they must not go back
    for (const auto& item : json_["instructions"]) {
      if (!item.is_array() || item.size() < 4 || !item[0].is_string() || !item[2].is_string()) bad("an instruction is [\"before\" or \"after\", op, action, target]: " + item.dump());
      const auto when = item[0].get<std::string>();
      const auto action = action_of(item[2].get<std::string>());
      const std::uint32_t op = id(item[1]);
      if ((when != "before" && when != "after") || !action || op > ops) bad("unknown instruction " + item.dump());
      const std::size_t here = 2 * static_cast<std::size_t>(op) + (when == "after");
      if (here < list) bad("instructions are out of order at " + item.dump());
      for (; list < here; ++list) plan.offsets.push_back(static_cast<std::uint32_t>(plan.instructions.size()));
      plan.instructions.push_back({*action, item.size() > 4 && item[4] == "preserve", id(item[3])});
    }
    for (; list < 2 * (static_cast<std::size_t>(ops) + 1); ++list) plan.offsets.push_back(static_cast<std::uint32_t>(plan.instructions.size()));
  }

  const nlohmann::json& json_;
  const std::string& file_;
};

}  // namespace

nlohmann::json plan_to_json(const Plan& plan) {
  auto list = nlohmann::json::array();
  const std::size_t lists = plan.offsets.empty() ? 0 : plan.offsets.size() - 1;
  for (std::size_t k = 0; k < lists; ++k)
    for (std::uint32_t i = plan.offsets[k]; i < plan.offsets[k + 1]; ++i) {
      const Instruction& in = plan.instructions[i];
      nlohmann::json item = {k % 2 ? "after" : "before", k / 2, action_name(in.action), in.target};
      if (in.preserve) item.push_back("preserve");
      list.push_back(std::move(item));
    }
  return {{"version", kPlanJsonVersion},
          {"ops", lists / 2 - (lists > 0)},
          {"limit_bytes", plan.limit.count()},
          {"starts_offloaded", plan.starts_offloaded},
          {"instructions", std::move(list)}};
}

Plan plan_from_json(const std::string& text, const std::string& file) {
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    throw BadInput(file, error.byte, "this is no JSON");
  }
  return Reader(json, file).read();
}

}  // namespace memfit::plan
