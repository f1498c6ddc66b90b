#include "memfit/plan/compute_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "memfit/plan/detail/emit.h"
#include "memfit/plan/detail/search.h"

namespace memfit::plan {
namespace {

using trace::kNone;
using trace::OpId;
using trace::Step;

/// What must be there while each op runs, whatever the plan: its inputs, outputs and workspace, and what cannot go
/// away.
Floor forced_floor(const Step& step, const PlanOptions& options) {
  const auto n = static_cast<OpId>(step.ops.size());
  std::vector<std::int64_t> change(static_cast<std::size_t>(n) + 2, 0);
  std::vector<std::uint8_t> stuck(step.values.size(), 0);
  std::vector<OpId> last_use(step.values.size(), 0);
  for (trace::ValueId v = 0; v < step.values.size(); ++v)
    if (!step.is_source(v)) last_use[v] = step.values[v].producer;
  for (OpId t = 0; t < n; ++t)
    for (trace::ValueId v : step.inputs(step.ops[t])) last_use[v] = t;
  for (trace::ValueId v = 0; v < step.values.size(); ++v) {
    const trace::Value& value = step.values[v];
    const bool remade =
        value.producer != kNone && step.ops[value.producer].replay == trace::Replay::Yes && options.recompute;
    const bool packs = value.packable && options.pack;
    const bool useless = value.producer != kNone && value.death == kNone && !value.needed_after;
    stuck[v] = value.pinned || !(remade || packs || useless || options.offload);
    if (!stuck[v]) continue;
    // A value that cannot come back must be there until its last use at least; a source until the program lets go of
    // it.
    OpId end = value.death == kNone && value.needed_after ? n : last_use[v];
    if (value.producer == kNone && value.death != kNone) end = value.death;
    if (value.producer == kNone && value.death == kNone) end = n;
    change[value.producer == kNone ? 0 : value.producer + 1] += static_cast<std::int64_t>(value.bytes.count());
    change[end + 1] -= static_cast<std::int64_t>(value.bytes.count());
  }
  Floor floor;
  auto live = static_cast<std::int64_t>(step.fixed_bytes.count());
  for (OpId t = 0; t <= n; ++t) {
    live += change[t];
    std::int64_t here = live;
    if (t < n) {
      here += static_cast<std::int64_t>(step.ops[t].workspace.count());
      for (trace::ValueId v : step.inputs(step.ops[t]))
        if (!stuck[v]) here += static_cast<std::int64_t>(step.values[v].bytes.count());
      for (trace::ValueId v : step.outputs(step.ops[t]))
        if (step.values[v].overwrites == kNone) here += static_cast<std::int64_t>(step.values[v].bytes.count());
    }
    if (Bytes(static_cast<std::uint64_t>(here)) > floor.bound) {
      floor.bound = Bytes(static_cast<std::uint64_t>(here));
      floor.op = t;
    }
  }
  return floor;
}

detail::SearchOptions search_options(const PlanOptions& options) {
  detail::SearchOptions out{options.effort, options.seed, options.recompute, options.pack, std::nullopt};
  if (options.most_work > 0) out.most_work = options.most_work;
  if (options.offload && options.offload->traffic.write_bytes_per_second > 0 &&
      options.offload->traffic.read_bytes_per_second > 0) {
    const Traffic& traffic = options.offload->traffic;
    out.offload = detail::OffloadChannels{
        1 / traffic.write_bytes_per_second, 1 / traffic.read_bytes_per_second, traffic.latency.count(),
        static_cast<std::int64_t>(std::min<std::uint64_t>(options.offload->limit.count(), 1ull << 62))};
  }
  return out;
}

std::optional<Plan> try_once(const Step& step, const detail::Problem& problem, const PlanOptions& options) {
  if (problem.n == 0) return keep_everything(step);
  detail::Schedule schedule(problem, static_cast<std::int64_t>(options.limit.count()));
  detail::Search search(problem, schedule, search_options(options));
  if (!search.run()) return std::nullopt;
  Plan plan = detail::emit(problem, schedule);
  const Simulation outcome = simulate(step, plan, options.offload ? options.offload->traffic : Traffic{});
  if (!outcome.possible) throw std::logic_error("the plan that was computed is impossible " + outcome.fault);
  if (outcome.peak > options.limit) return std::nullopt;
  plan.limit = options.limit;
  plan.predicted_peak = outcome.peak;
  plan.predicted_step = outcome.step;
  plan.recompute = outcome.recompute;
  plan.packing = outcome.packing;
  plan.exposed = outcome.exposed;
  plan.offload_write = outcome.offload_write;
  plan.offload_read = outcome.offload_read;
  return plan;
}

/// Traffic is first planned to hide behind the ops. When there is more of it than that, the search is told that ops
/// take longer; in truth they then wait, and simulate() says for how long.
std::optional<Plan> try_plan(const Step& step, const detail::Problem& problem, const PlanOptions& options) {
  if (auto plan = try_once(step, problem, options)) return plan;
  if (!search_options(options).offload) return std::nullopt;
  for (double stretch : {1.5, 2.5, 4.0, 8.0, 16.0, 64.0}) {
    detail::Problem slower = problem;
    for (double& start : slower.start) start *= stretch;
    if (auto plan = try_once(step, slower, options)) return plan;
  }
  return std::nullopt;
}

detail::Problem problem_of(const Step& step, const PlanOptions& options) {
  detail::Problem problem = detail::make_problem(step);
  if (options.offload) problem.offload_cost = 2 * options.offload->traffic.busy_seconds_per_byte;
  return problem;
}

}  // namespace

Floor compute_floor(const Step& step, const PlanOptions& options) {
  Floor floor = forced_floor(step, options);
  const detail::Problem problem = problem_of(step, options);
  PlanOptions trial = options;
  trial.effort = std::min(options.effort, 0.3);
  std::uint64_t low = floor.bound.count(), high = trace::peak_bytes(step).count();
  trial.limit = Bytes(low);
  if (try_plan(step, problem, trial)) high = low;
  while (high > low && high - low > high / 128) {
    trial.limit = Bytes(low + (high - low) / 2);
    if (auto plan = try_plan(step, problem, trial)) high = plan->predicted_peak.count();
    else low = trial.limit.count();
  }
  floor.reached = Bytes(high);
  return floor;
}

std::optional<Plan> find_plan(const Step& step, const PlanOptions& options) {
  if (options.limit < forced_floor(step, options).bound) return std::nullopt;
  return try_plan(step, problem_of(step, options), options);
}

Plan compute_plan(const Step& step, const PlanOptions& options) {
  if (auto plan = find_plan(step, options)) return std::move(*plan);
  const Floor forced = forced_floor(step, options);
  const Floor floor = compute_floor(step, options);
  const std::string where = forced.op < step.ops.size() ? fmt::format("op {} ({})", forced.op, step.op_name(forced.op))
                                                        : std::string("the end of the step");
  throw LimitTooLow(
      fmt::format("No plan fits {}. The lowest limit with a plan is {}; {} needs {} whatever is dropped.",
                  format_bytes(options.limit), format_bytes(floor.reached), where, format_bytes(forced.bound)),
      floor);
}

}  // namespace memfit::plan
