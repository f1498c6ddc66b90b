#include "memfit/report/plan_report.h"

#include <fmt/format.h>

#include <algorithm>

#include "memfit/core/duration.h"
#include "memfit/report/html_page.h"

namespace memfit::report {
namespace {

using plan::BatchPoint;
using plan::CurvePoint;
using plan::Fate;
using plan::FateGroup;
using plan::Study;
using trace::Seconds;

std::string time_text(Seconds s) { return format_duration(std::chrono::duration_cast<std::chrono::nanoseconds>(s)); }

std::string slowdown(Seconds step, Seconds base) {
  const double extra = base.count() > 0 ? step.count() / base.count() - 1.0 : 0.0;
  return extra < 0.0005 ? "as recorded" : fmt::format("+{:.1f} %", extra * 100);
}

double share(Seconds part, Seconds whole) { return whole.count() > 0 ? part.count() / whole.count() : 0.0; }

std::string verb_of(Fate fate) {
  switch (fate) {
    case Fate::Recompute: return "recompute";
    case Fate::Pack: return "pack";
    case Fate::Offload: return "offload";
    case Fate::Keep: break;
  }
  return "keep";
}

/// "recompute 48 gelu outputs, 96.0 MiB, 3.1 % of the step"
std::string group_words(const FateGroup& g, Seconds step) {
  const double part = share(g.seconds, step);
  const std::string cost = g.seconds.count() <= 0 ? "for nothing" : part < 0.0005 ? "under 0.1 % of the step" : fmt::format("{:.1f} % of the step", part * 100);
  const std::string what = g.seconds.count() <= 0 && g.fate == Fate::Recompute ? "drop early" : verb_of(g.fate);
  return fmt::format("{} {} {} {}, {}, {}", what, g.count, g.op, g.count == 1 ? "output" : "outputs", format_bytes(g.bytes), cost);
}

void add_plan_text(const Study& study, std::string& out) {
  if (!study.plan) return;
  const plan::Plan& p = *study.plan;
  out += fmt::format("\nPlan for {}: predicted peak {}, step {} ({})\n", format_bytes(*study.limit), format_bytes(p.predicted_peak),
                     time_text(p.predicted_step), slowdown(p.predicted_step, study.recorded_step));
  if (p.values.empty()) out += "  the step fits as it is: nothing to do\n";
  constexpr std::size_t kShown = 12;
  for (std::size_t i = 0; i < std::min(kShown, study.groups.size()); ++i) out += "  " + group_words(study.groups[i], study.recorded_step) + "\n";
  if (study.groups.size() > kShown) out += fmt::format("  and {} more kinds of values (--json lists every value)\n", study.groups.size() - kShown);
  if (p.offload_write > Bytes(0))
    out += fmt::format("  traffic: {} written, {} read, {} of it not hidden\n", format_bytes(p.offload_write), format_bytes(p.offload_read), time_text(p.exposed));
}

void add_floor_text(const Study& study, std::string& out) {
  const std::string forced = study.floor.op < study.step.ops.size() ? fmt::format("op {} ({})", study.floor.op, study.step.op_name(study.floor.op)) : "the end of the step";
  out += fmt::format("Least limit with a plan: {}; {} needs {} in any case\n", format_bytes(study.floor.reached), forced, format_bytes(study.floor.bound));
}

void add_batches_text(const Study& study, std::string& out) {
  if (study.batches.empty()) return;
  out += fmt::format("\n{:>8}  {:>14}  {:>12}  {}\n", "batch", "predicted peak", "step", study.limit ? "fits " + format_bytes(*study.limit) : "");
  for (const BatchPoint& b : study.batches)
    out += fmt::format("{:>8}  {:>14}  {:>12}  {}\n", b.batch, format_bytes(b.peak), time_text(b.step), study.limit ? (b.fits ? "yes" : "no") : "");
  if (study.limit && study.largest_batch) out += fmt::format("The largest batch that fits: {}\n", *study.largest_batch);
  if (study.limit && !study.largest_batch) out += "None of these batches fits.\n";
}

/// The limit to suggest: the one asked for, else the lowest knee, else the middle of the curve.
Bytes suggested(const Study& study) {
  if (study.limit) return *study.limit;
  for (const CurvePoint& p : study.curve)
    if (p.knee) return p.limit;
  return study.curve.empty() ? study.recorded_peak : study.curve[study.curve.size() / 2].limit;
}

std::string flag_size(Bytes size) {
  const std::uint64_t mib = (size.count() + (1u << 20) - 1) >> 20;
  return size.count() % (1u << 20) == 0 || size.count() > (16u << 20) ? fmt::format("{}MiB", mib) : fmt::format("{}B", size.count());
}

}  // namespace

std::string plan_study_text(const Study& study) {
  std::string out;
  if (!study.info.program.empty()) out += fmt::format("Program: {}\n", study.info.program);
  out += fmt::format("Recorded: {} ops, {} values, step {}, peak {}{}\n", study.step.ops.size(), study.step.values.size(),
                     time_text(study.recorded_step), format_bytes(study.recorded_peak),
                     study.steps_in_file > 1 ? fmt::format(" (the largest of {} steps)", study.steps_in_file) : "");
  if (study.floor.reached > Bytes(0)) add_floor_text(study, out);
  if (!study.curve.empty()) out += fmt::format("\n{:>12}  {:>14}  {:>12}\n", "limit", "predicted peak", "step");
  for (const CurvePoint& p : study.curve)
    out += fmt::format("{:>12}  {:>14}  {:>12}  {}{}\n", format_bytes(p.limit), format_bytes(p.peak), time_text(p.step),
                       slowdown(p.step, study.recorded_step), p.knee ? "  <- knee: less memory than this gets dear" : "");
  add_plan_text(study, out);
  add_batches_text(study, out);
  out += fmt::format("\nNext: memfit run --tensor-memory {} -- {}\n", flag_size(suggested(study)), study.info.program.empty() ? "PROGRAM" : study.info.program);
  return out;
}

nlohmann::ordered_json plan_study_json(const Study& study) {
  nlohmann::ordered_json out;
  out["version"] = 1;
  out["program"] = study.info.program;
  out["ops"] = study.step.ops.size();
  out["recorded_peak_bytes"] = study.recorded_peak.count();
  out["recorded_step_seconds"] = study.recorded_step.count();
  out["fixed_bytes"] = study.step.fixed_bytes.count();
  const bool floor = study.floor.reached > Bytes(0);  // with --points 0 and a limit nobody looked for it
  out["floor_bytes"] = floor ? nlohmann::ordered_json(study.floor.reached.count()) : nlohmann::ordered_json(nullptr);
  out["floor_bound_bytes"] = floor ? nlohmann::ordered_json(study.floor.bound.count()) : nlohmann::ordered_json(nullptr);
  out["floor_op"] = floor && study.floor.op < study.step.ops.size() ? nlohmann::ordered_json(study.step.op_name(study.floor.op)) : nlohmann::ordered_json(nullptr);
  out["curve"] = nlohmann::ordered_json::array();
  for (const CurvePoint& p : study.curve)
    out["curve"].push_back({{"limit_bytes", p.limit.count()}, {"predicted_peak_bytes", p.peak.count()}, {"predicted_step_seconds", p.step.count()}, {"knee", p.knee}});
  if (study.plan) {
    const plan::Plan& p = *study.plan;
    nlohmann::ordered_json plan = {{"limit_bytes", p.limit.count()},
                                   {"predicted_peak_bytes", p.predicted_peak.count()},
                                   {"predicted_step_seconds", p.predicted_step.count()},
                                   {"recompute_seconds", p.recompute.count()},
                                   {"packing_seconds", p.packing.count()},
                                   {"exposed_seconds", p.exposed.count()},
                                   {"offload_bytes", p.offload_write.count()},
                                   {"offload_read_bytes", p.offload_read.count()}};
    plan["values"] = nlohmann::ordered_json::array();
    for (const plan::ValueSummary& s : p.values) {
      const trace::Value& v = study.step.values[s.value];
      nlohmann::ordered_json op = v.producer == trace::kNone ? nlohmann::ordered_json(nullptr) : nlohmann::ordered_json(study.step.op_name(v.producer));
      plan["values"].push_back({{"value", s.value}, {"bytes", v.bytes.count()}, {"op", std::move(op)}, {"category", trace::category_name(v.category)},
                                {"action", plan::fate_name(s.fate)}, {"seconds", s.seconds.count()}});
    }
    out["plan"] = std::move(plan);
  }
  if (!study.batches.empty()) {
    out["batches"] = nlohmann::ordered_json::array();
    for (const BatchPoint& b : study.batches)
      out["batches"].push_back({{"batch", b.batch}, {"predicted_peak_bytes", b.peak.count()}, {"predicted_step_seconds", b.step.count()}, {"fits", b.fits}});
    out["largest_batch"] = study.largest_batch ? nlohmann::ordered_json(*study.largest_batch) : nlohmann::ordered_json(nullptr);
  }
  return out;
}

std::string plan_study_html(const Study& study) {
  HtmlPage page;
  page.title = "memfit plan: " + (study.info.program.empty() ? std::string("memory against time") : study.info.program);
  page.body = fmt::format("<h1>{}</h1>\n<div id=\"curve\"></div>\n<pre>{}</pre>\n", html_escape(page.title), html_escape(plan_study_text(study)));
  page.data = plan_study_json(study).dump();
  page.script = R"js(
const points = DATA.curve;
const x = points.map(p => p.limit_bytes);
const y = points.map(p => p.predicted_step_seconds / DATA.recorded_step_seconds);
const knees = points.map((p, i) => p.knee ? y[i] : null);
const chosen = DATA.plan ? DATA.plan.predicted_step_seconds / DATA.recorded_step_seconds : null;
const ink = getComputedStyle(document.body).color;
const axis = {stroke: ink, grid: {stroke: "rgba(128,128,128,.25)"}, ticks: {stroke: "rgba(128,128,128,.25)"}};
const hooks = chosen === null ? {} : {draw: [u => {
  const px = u.valToPos(DATA.plan.limit_bytes, "x", true), py = u.valToPos(chosen, "y", true);
  u.ctx.strokeStyle = "#d62728"; u.ctx.lineWidth = 2; u.ctx.beginPath(); u.ctx.arc(px, py, 7, 0, 2 * Math.PI); u.ctx.stroke();
}]};
const box = document.getElementById("curve");
const size = () => ({width: Math.max(320, Math.min(960, box.clientWidth || 960)), height: 380});
const chart = new uPlot({
  ...size(), hooks, scales: {x: {time: false}},
  axes: [{...axis, label: "limit", values: (u, v) => v.map(fmtBytes)}, {...axis, label: "step time / recorded", values: (u, v) => v.map(t => t.toFixed(2) + "x"), size: 60}],
  series: [{label: "limit", value: (u, v) => v === null ? "" : fmtBytes(v)},
           {label: "step", stroke: "#1f77b4", width: 2, points: {show: true, size: 6}, value: (u, v) => v === null ? "" : v.toFixed(3) + "x"},
           {label: "knee", stroke: "#ff7f0e", paths: () => null, points: {show: true, size: 14, width: 3}, value: (u, v) => v === null ? "" : v.toFixed(3) + "x"}],
}, [x, y, knees], box);
addEventListener("resize", () => chart.setSize(size()));
)js";
  return render_html_page(page);
}

nlohmann::ordered_json simulation_json(const plan::Simulation& s) {
  return {{"version", 1},
          {"possible", s.possible},
          {"fault", s.fault},
          {"peak_bytes", s.peak.count()},
          {"peak_op", s.peak_op},
          {"step_seconds", s.step.count()},
          {"recompute_seconds", s.recompute.count()},
          {"packing_seconds", s.packing.count()},
          {"exposed_seconds", s.exposed.count()},
          {"offload_write_bytes", s.offload_write.count()},
          {"offload_read_bytes", s.offload_read.count()},
          {"replays", s.replays}};
}

}  // namespace memfit::report
