#include "memfit/report/snapshot_html.h"

#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "memfit/analysis/timeline_view.h"
#include "memfit/core/bytes.h"
#include "memfit/report/html_page.h"
#include "memfit/report/snapshot_report.h"

namespace memfit::report {
namespace {

using analysis::kNever;
using nlohmann::json;

constexpr std::string_view kScript = R"js(
const COLORS = ['#4c78a8','#f58518','#54a24b','#e45756','#72b7b2','#b279a2','#9d755d','#bab0ac','#8c8c8c','#d37295'];
const axis = () => getComputedStyle(document.body).color;
function chart(host, title, data, series, plugins, onClick, sync) {
  const u = new uPlot({
    title, width: Math.max(400, host.clientWidth), height: 300,
    cursor: { sync: { key: sync }, drag: { x: true, y: false } },
    scales: { x: { time: false }, y: { range: (u, lo, hi) => [0, hi * 1.05 || 1] } },
    axes: [{ stroke: axis, label: 'event', space: 110 }, { stroke: axis, size: 80, incrs: Array.from({ length: 50 }, (_, i) => 2 ** i), values: (_, t) => t.map(fmtBytes) }],
    series: [{ label: 'event' }, ...series], plugins: plugins || [],
  }, data, host);
  if (onClick) u.over.addEventListener('click', () => { if (u.cursor.idx != null) onClick(u.data[0][u.cursor.idx]); });
  addEventListener('resize', () => u.setSize({ width: Math.max(400, host.clientWidth), height: 300 }));
  return u;
}
function undelta(d) { const out = new Array(d.length); let v = 0; for (let i = 0; i < d.length; i++) out[i] = v += d[i]; return out; }
function marks(events, color) {
  return { hooks: { draw: u => {
    const c = u.ctx; c.save(); c.strokeStyle = color; c.lineWidth = 1;
    let last = -9;
    for (const e of events) {
      const x = u.valToPos(e, 'x', true);
      if (x < u.bbox.left || x > u.bbox.left + u.bbox.width || x - last < 3) continue;
      last = x; c.beginPath(); c.moveTo(x, u.bbox.top); c.lineTo(x, u.bbox.top + u.bbox.height); c.stroke();
    }
    c.restore(); } } };
}
function cell(row, text, cls) { const td = row.insertCell(); td.textContent = text; if (cls) td.className = cls; return td; }
DATA.devices.forEach((d, n) => {
  const root = document.getElementById('device' + n);
  if (!d.curve.x.length) return;
  const x = undelta(d.curve.x), a = undelta(d.curve.a), r = undelta(d.curve.r);
  const steps = marks(d.steps, 'rgba(128,128,128,.35)'), ooms = marks(d.ooms, '#cf222e');
  const sync = 'd' + n;
  const show = e => blocks(root, d, e);
  chart(root.querySelector('.curve'), 'Allocated and reserved', [x, r, a], [
    { label: 'reserved', stroke: '#8c8c8c', fill: 'rgba(140,140,140,.15)', paths: uPlot.paths.stepped({ align: 1 }), value: (_, v) => v == null ? '' : fmtBytes(v) },
    { label: 'allocated', stroke: '#4c78a8', fill: 'rgba(76,120,168,.3)', paths: uPlot.paths.stepped({ align: 1 }), value: (_, v) => v == null ? '' : fmtBytes(v) },
  ], [steps, ooms], show, sync);
  const used = d.categories.filter(c => c.v.some(v => v > 0));
  const at = d.at, sums = new Array(at.length).fill(0);
  const stacked = used.map(c => c.v.map((v, i) => sums[i] += v));
  chart(root.querySelector('.cats'), 'Allocated by category', [at, ...stacked.reverse()], used.map((c, i) => ({
    label: c.name, stroke: COLORS[c.k], fill: COLORS[c.k],
    value: (u, v, s, idx) => idx == null ? '' : fmtBytes(c.v[idx]) })).reverse(), [steps, ooms], show, sync);
  show(d.peak == null ? x[0] : d.peak);
});
function blocks(root, d, event) {
  const live = d.blocks.filter(b => (b[0] < 0 || b[0] <= event) && (b[1] < 0 || b[1] > event));
  let allocated = null;
  const xs = d.curve.x_abs || (d.curve.x_abs = undelta(d.curve.x)), as = d.curve.a_abs || (d.curve.a_abs = undelta(d.curve.a));
  let lo = 0, hi = xs.length - 1;
  while (lo < hi) { const m = (lo + hi + 1) >> 1; if (xs[m] <= event) lo = m; else hi = m - 1; }
  allocated = as[lo];
  const shown = live.slice(0, 60), sum = shown.reduce((s, b) => s + b[2], 0), exact = xs[lo] === event;
  const box = root.querySelector('.blocks');
  box.textContent = '';
  const head = document.createElement('h3');
  head.textContent = 'Largest blocks live after event ' + event + (exact ? ': ' + fmtBytes(allocated) + ' allocated' : '');
  box.append(head);
  const table = document.createElement('table');
  const hr = table.createTHead().insertRow();
  for (const [h, c] of [['size', 'num'], ['category', ''], ['where', ''], ['from event', 'num'], ['until', 'num']]) { const th = document.createElement('th'); th.textContent = h; th.className = c; hr.append(th); }
  const body = table.createTBody();
  for (const b of shown) {
    const p = d.places[b[3]], row = body.insertRow();
    cell(row, fmtBytes(b[2]), 'num'); cell(row, p.category);
    const td = cell(row, ''), det = document.createElement('details'), s = document.createElement('summary'), pre = document.createElement('pre');
    s.textContent = p.where; pre.textContent = p.frames.join('\n') || '(no stack)'; det.append(s, pre); td.append(det);
    cell(row, b[0] < 0 ? 'before' : b[0], 'num'); cell(row, b[1] < 0 ? 'the end' : b[1], 'num');
  }
  if (exact) { const row = body.insertRow(); cell(row, fmtBytes(Math.max(0, allocated - sum)), 'num'); cell(row, ''); cell(row, 'all other blocks together', 'mute'); cell(row, ''); cell(row, ''); }
  box.append(table);
}
)js";

/// First value, then differences: a third of the text.
template <typename T>
json delta(const std::vector<T>& values) {
  json out = json::array();
  std::int64_t last = 0;
  for (const T value : values) {
    out.push_back(static_cast<std::int64_t>(value) - last);
    last = static_cast<std::int64_t>(value);
  }
  return out;
}

json device_data(const analysis::DeviceExplanation& d, const analysis::Attribution& attribution) {
  const analysis::TimelineView view = analysis::compute_view(d, attribution);
  json out;
  out["curve"] = {
      {"x", delta(view.curve.event)}, {"a", delta(view.curve.allocated)}, {"r", delta(view.curve.reserved)}};
  out["at"] = view.at;
  json categories = json::array();
  for (std::size_t k = 0; k < analysis::kCategories; ++k)
    categories.push_back({{"name", name_of(static_cast<analysis::Category>(k))}, {"k", k}, {"v", view.by_category[k]}});
  out["categories"] = std::move(categories);
  json blocks = json::array();
  for (const analysis::ViewBlock& block : view.blocks)
    blocks.push_back({block.from == kNever ? -1 : static_cast<std::int64_t>(block.from),
                      block.to == kNever ? -1 : static_cast<std::int64_t>(block.to), block.bytes, block.place});
  out["blocks"] = std::move(blocks);
  json places = json::array();
  for (const analysis::ViewPlace& place : view.places)
    places.push_back({{"where", place.where},
                      {"category", name_of(place.category)},
                      {"rule", place.rule},
                      {"frames", place.frames}});
  out["places"] = std::move(places);
  json ooms = json::array();
  for (const analysis::OomState& oom : d.ooms) ooms.push_back(oom.event);
  out["ooms"] = std::move(ooms);
  out["steps"] = d.steps;
  out["peak"] = d.peak_event == kNever ? json(nullptr) : json(d.peak_event);
  return out;
}

std::string device_body(const analysis::DeviceExplanation& d, std::size_t index) {
  const analysis::DeviceTimeline& t = d.timeline;
  std::string html = fmt::format(
      "<section id=\"device{}\"><h2>Device {}</h2><p class=\"mute\">{} events, {} left out. Drag to zoom, double click "
      "to see all, click for the blocks at an event. "
      "Each curve keeps the lowest and highest point of every part, so peaks stay true at any zoom.</p>",
      index, t.device, t.count, d.left_out);
  html +=
      "<div class=\"curve\"></div><div class=\"cats\"></div><div class=\"blocks\"></div><h3>Owners at the "
      "peak</h3><table><thead><tr><th class=\"num\">bytes</th>"
      "<th>category</th><th>where</th><th>rule</th></tr></thead><tbody>";
  for (const analysis::OwnerRow& row : d.owners)
    html += fmt::format("<tr><td class=\"num\">{}</td><td>{}</td><td>{}</td><td class=\"mute\">{}</td></tr>",
                        format_bytes(Bytes(row.bytes)), name_of(row.category), html_escape(row.where),
                        html_escape(row.rule));
  return html + fmt::format(
                    "<tr><td class=\"num\"><b>{}</b></td><td></td><td><b>all at the "
                    "peak</b></td><td></td></tr></tbody></table></section>",
                    format_bytes(Bytes(d.peak_allocated)));
}

}  // namespace

std::string snapshot_html(const analysis::Explanation& explanation) {
  HtmlPage page;
  page.title = "memfit: " + explanation.snapshot->file;
  page.body = "<h1>" + html_escape(page.title) + "</h1><pre>" + html_escape(explain_text(explanation)) + "</pre>";
  json devices = json::array();
  for (std::size_t i = 0; i < explanation.devices.size(); ++i) {
    page.body += device_body(explanation.devices[i], i);
    devices.push_back(device_data(explanation.devices[i], *explanation.attribution));
  }
  page.data = json{{"devices", std::move(devices)}}.dump(-1, ' ', false, json::error_handler_t::replace);
  page.script = kScript;
  return render_html_page(page);
}

}  // namespace memfit::report
