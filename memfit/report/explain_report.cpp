#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "memfit/core/bytes.h"
#include "memfit/report/snapshot_report.h"

namespace memfit::report {
namespace {

using analysis::kNever;
using nlohmann::json;

std::string size_text(std::uint64_t n) { return format_bytes(Bytes(n)); }
std::string signed_text(std::int64_t n) {
  return (n < 0 ? "-" : "+") + size_text(static_cast<std::uint64_t>(std::llabs(n)));
}

/// What comes from a file goes to a terminal: no control characters.
std::string plain(std::string_view text) {
  std::string out(text);
  for (char& c : out)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return out;
}

json violation_list(const analysis::DeviceTimeline& t) {
  json list = json::array();
  for (const analysis::Violation& violation : t.violations) {
    json row{{"what", violation.what}};
    if (violation.event != kNever) row["event"] = violation.event;
    list.push_back(std::move(row));
  }
  return list;
}

json device_json(const analysis::DeviceExplanation& d) {
  const analysis::DeviceTimeline& t = d.timeline;
  json out{{"index", t.device},
           {"allocated_bytes", t.final_allocated},
           {"reserved_bytes", t.final_reserved},
           {"pending_free_bytes", t.final_pending},
           {"peak_allocated_bytes", d.peak_allocated},
           {"peak_reserved_bytes", t.peak_reserved},
           {"reserved_at_peak_bytes", d.reserved_at_peak},
           {"events", t.count},
           {"window", {d.from, d.to}},
           {"events_left_out", d.left_out},
           {"unrecorded_bytes", t.unrecorded},
           {"violations", t.violation_count},
           {"violation_list", violation_list(t)},
           {"free_in_segments_bytes", d.at_end.free_bytes},
           {"largest_free_block_bytes", d.at_end.largest_free},
           {"stuck_bytes", d.at_end.stuck},
           {"oom_events", d.oom_count},
           {"retries", d.retries},
           {"shows_segments", t.shows_segments},
           {"steps", d.steps.size()}};
  out["peak_event"] = d.peak_event == kNever ? json(nullptr) : json(d.peak_event);
  if (d.capacity) out["capacity_bytes"] = *d.capacity;
  if (t.reason != analysis::UnrecordedReason::None) out["unrecorded_reason"] = name_of(t.reason);
  json owners = json::array();
  for (const analysis::OwnerRow& row : d.owners)
    owners.push_back({{"bytes", row.bytes},
                      {"category", name_of(row.category)},
                      {"where", row.where},
                      {"rule", row.rule},
                      {"blocks", row.blocks}});
  out["owners_at_peak"] = std::move(owners);
  if (!d.notes.empty()) {
    json notes = json::array();
    for (std::size_t i = 0; i < std::min<std::size_t>(d.notes.size(), 200); ++i)
      notes.push_back({{"bytes", d.notes[i].bytes},
                       {"user_metadata", d.notes[i].user_metadata},
                       {"compile_context", d.notes[i].compile_context}});
    out["notes_at_peak"] = std::move(notes);
  }
  if (d.replay) out["replay"] = {{"events_replayed", d.replay->events}, {"events_that_differ", d.replay->differ}};
  return out;
}

void device_text(const analysis::DeviceExplanation& d, std::string& text) {
  const analysis::DeviceTimeline& t = d.timeline;
  text += fmt::format("\nDevice {}: {} allocated, {} reserved at the end", t.device, size_text(t.final_allocated),
                      size_text(t.final_reserved));
  if (d.capacity) text += fmt::format(" of {}", size_text(*d.capacity));
  text += "\n";
  if (t.count == 0) {
    text += "  no history: the peak and the order of events are not known; below is what it holds at the end\n";
  } else {
    text += fmt::format("  peak {} allocated ({} reserved then)", size_text(d.peak_allocated),
                        size_text(d.reserved_at_peak));
    text +=
        d.peak_event == kNever ? " when the recording began" : fmt::format(" at event {} of {}", d.peak_event, t.count);
    if (d.from != 0 || d.to != t.count) text += fmt::format(", within events {} to {}", d.from, d.to);
    text += fmt::format("; {} events left out\n", d.left_out);
  }
  if (!t.shows_segments)
    text += "  the file lists no segments for this device: what is reserved is known as far as the events tell it\n";
  if (t.unrecorded > 0) {
    const char* why = t.reason == analysis::UnrecordedReason::Overflow ? "the ring lost the events (raise max_entries)"
                      : t.reason == analysis::UnrecordedReason::NotRecording ? "recording was not on yet"
                                                                             : "the file does not say why";
    text += fmt::format("  {} were there before the first event: {}\n", size_text(t.unrecorded), why);
  }
  if (d.at_end.free_bytes > 0)
    text += fmt::format("  {} free inside segments at the end: largest piece {}, {} can be given back, {} pinned\n",
                        size_text(d.at_end.free_bytes), size_text(d.at_end.largest_free),
                        size_text(d.at_end.releasable), size_text(d.at_end.stuck));
  if (t.violation_count > 0) {
    text += fmt::format("  the file contradicts itself {} times:\n", t.violation_count);
    for (std::size_t i = 0; i < std::min<std::size_t>(3, t.violations.size()); ++i) {
      const analysis::Violation& violation = t.violations[i];
      text += violation.event == kNever ? fmt::format("    {}\n", violation.what)
                                        : fmt::format("    event {}: {}\n", violation.event, violation.what);
    }
  }
  text += fmt::format("  owners at the peak, {} in all:\n", size_text(d.peak_allocated));
  constexpr std::size_t kShown = 12;
  std::uint64_t rest = 0;
  std::size_t hidden = 0;
  for (std::size_t i = 0; i < d.owners.size(); ++i) {
    const analysis::OwnerRow& row = d.owners[i];
    // The rows of their own (unrecorded, --min-size) stand at the end and are always shown.
    const bool own = row.category == analysis::Category::Unrecorded || row.where.starts_with("(");
    if (i >= kShown && !own) {
      rest += row.bytes;
      ++hidden;
      continue;
    }
    text += fmt::format("    {:>11}  {:<13} {}  [{}]\n", size_text(row.bytes), name_of(row.category), plain(row.where),
                        row.rule);
  }
  if (hidden > 0) text += fmt::format("    {:>11}  {} more places\n", size_text(rest), hidden);
  if (d.notes.empty()) return;
  text += "  by user metadata and compile context:\n";
  for (std::size_t i = 0; i < std::min<std::size_t>(d.notes.size(), 6); ++i) {
    const analysis::NoteRow& row = d.notes[i];
    const std::string name = row.user_metadata +
                             (row.user_metadata.empty() || row.compile_context.empty() ? "" : ", ") +
                             row.compile_context;
    text += fmt::format("    {:>11}  {}\n", size_text(row.bytes), name.empty() ? "(none)" : plain(name));
  }
}

void verdict_text(const analysis::Verdict& verdict, bool many, std::string& text) {
  static const std::pair<analysis::VerdictKind, const char*> kWords[] = {
      {analysis::VerdictKind::Capacity, "It is simply too much: {} more than this process could have."},
      {analysis::VerdictKind::Fragmentation, "Fragmentation: {} are reserved and free, in pieces that cannot be used."},
      {analysis::VerdictKind::Leak, "A leak: {} were added step by step and never freed."},
      {analysis::VerdictKind::Spike, "A spike: one place's temporary raises the peak by {}."},
      {analysis::VerdictKind::OversizedRequest, "One request is too large for the device: by {}."},
      {analysis::VerdictKind::OtherProcesses, "Others hold the card: {} are used outside this process's allocator."},
      {analysis::VerdictKind::CapBelowDevice, "A cap stands below the device: {} of it are free and may not be used."},
      {analysis::VerdictKind::PoolsCannotShare,
       "Streams or pools cannot share: {} lie free where this request may not take them."},
      {analysis::VerdictKind::None, "Nothing wrong was found."}};
  std::string words = "?";
  for (const auto& [kind, sentence] : kWords)
    if (kind == verdict.kind)
      words = kind == analysis::VerdictKind::None ? std::string(sentence)
                                                  : fmt::format(fmt::runtime(sentence), size_text(verdict.bytes));
  text += fmt::format("{}{}\n", many ? fmt::format("Device {}: ", verdict.device) : "", words);
  for (const std::string& line : verdict.evidence) text += fmt::format("  - {}\n", plain(line));
  for (const analysis::Advice& advice : verdict.advice) {
    text += advice.is_conf ? fmt::format("  > PYTORCH_ALLOC_CONF={} would save {} (replayed)\n", advice.setting,
                                         size_text(advice.saves))
                           : fmt::format("  > {}: {} (replayed)\n", plain(advice.setting), size_text(advice.saves));
  }
}

}  // namespace

std::string json_text(const json& value) { return value.dump(1, ' ', false, json::error_handler_t::replace); }

json explain_json(const analysis::Explanation& explanation) {
  const trace::AllocatorSnapshot& snapshot = *explanation.snapshot;
  json out{{"version", 1},
           {"file", snapshot.file},
           {"file_bytes", snapshot.file_bytes},
           {"format", snapshot.format},
           {"has_history", snapshot.has_history}};
  json devices = json::array(), verdicts = json::array();
  for (const analysis::DeviceExplanation& d : explanation.devices) {
    devices.push_back(device_json(d));
    for (const analysis::Verdict& verdict : d.verdicts) {
      json advice = json::array();
      for (const analysis::Advice& row : verdict.advice)
        advice.push_back({{"setting", row.setting}, {"saves_bytes", row.saves}});
      verdicts.push_back({{"kind", name_of(verdict.kind)},
                          {"device", verdict.device},
                          {"bytes", verdict.bytes},
                          {"evidence", verdict.evidence},
                          {"advice", advice}});
    }
  }
  out["devices"] = std::move(devices);
  out["verdicts"] = std::move(verdicts);
  out["unknown_fields"] = snapshot.unknown_fields;
  out["settings"] = {{"conf", snapshot.settings.conf}, {"known", snapshot.settings.present}};
  return out;
}

std::string explain_text(const analysis::Explanation& explanation) {
  const trace::AllocatorSnapshot& snapshot = *explanation.snapshot;
  std::string text;
  const bool many = explanation.devices.size() > 1;
  for (const analysis::DeviceExplanation& d : explanation.devices)
    for (const analysis::Verdict& verdict : d.verdicts) {
      if (many && verdict.kind == analysis::VerdictKind::None) continue;
      verdict_text(verdict, many, text);
    }
  if (text.empty())
    text = explanation.devices.empty() ? "The snapshot holds no device's memory.\n"
                                       : "Nothing wrong was found on any device.\n";
  text += fmt::format("\n{}: {}, {}{}\n", plain(snapshot.file), size_text(snapshot.file_bytes), snapshot.format,
                      snapshot.list_only ? ", a list of segments without history" : "");
  if (!snapshot.settings.conf.empty()) text += fmt::format("  settings: {}\n", plain(snapshot.settings.conf));
  if (!snapshot.unknown_fields.empty()) {
    text += "  fields this version does not know:";
    std::size_t shown = 0;
    for (const auto& [name, count] : snapshot.unknown_fields) {
      if (++shown > 6) break;
      text += fmt::format(" {} ({})", plain(name), count);
    }
    text += fmt::format("{}\n", snapshot.unknown_fields.size() > 6 ? " ..." : "");
  }
  for (const analysis::DeviceExplanation& d : explanation.devices) device_text(d, text);
  return text;
}

json ranks_json(const std::vector<analysis::RankSummary>& ranks, const analysis::RankComparison& comparison) {
  json rows = json::array();
  for (const analysis::RankSummary& rank : ranks) {
    json categories = json::object();
    for (std::size_t k = 0; k < analysis::kCategories; ++k)
      if (rank.by_category[k] > 0)
        categories[std::string(name_of(static_cast<analysis::Category>(k)))] = rank.by_category[k];
    json kinds = json::array();
    for (const analysis::VerdictKind kind : rank.verdicts) kinds.push_back(name_of(kind));
    rows.push_back({{"file", rank.file},
                    {"device", rank.device},
                    {"peak_allocated_bytes", rank.peak_allocated},
                    {"peak_reserved_bytes", rank.peak_reserved},
                    {"categories", categories},
                    {"verdicts", kinds}});
  }
  json out{{"ranks", rows},
           {"lowest_bytes", comparison.lowest},
           {"median_bytes", comparison.median},
           {"highest_bytes", comparison.highest},
           {"imbalance", comparison.imbalance}};
  out["odd"] = comparison.odd < 0 ? json(nullptr) : json(ranks[static_cast<std::size_t>(comparison.odd)].file);
  if (comparison.odd >= 0) {
    json differences = json::array();
    for (const analysis::RankDifference& row : comparison.differences)
      differences.push_back({{"bytes", row.bytes}, {"category", name_of(row.category)}, {"where", row.where}});
    out["differences"] = std::move(differences);
    out["typical"] = ranks[static_cast<std::size_t>(comparison.typical)].file;
  }
  return out;
}

std::string ranks_text(const std::vector<analysis::RankSummary>& ranks, const analysis::RankComparison& comparison) {
  std::string text = fmt::format("{} ranks: peak {} to {}, median {}; the largest is {:.1f} % above the median\n",
                                 ranks.size(), size_text(comparison.lowest), size_text(comparison.highest),
                                 size_text(comparison.median), comparison.imbalance * 100);
  for (const analysis::RankSummary& rank : ranks) {
    std::string kinds;
    for (const analysis::VerdictKind kind : rank.verdicts)
      kinds += fmt::format("{}{}", kinds.empty() ? "" : ", ", name_of(kind));
    text += fmt::format("  {:<32} device {:<3} {:>11} allocated {:>11} reserved   {}\n", plain(rank.file), rank.device,
                        size_text(rank.peak_allocated), size_text(rank.peak_reserved), kinds);
  }
  if (comparison.odd < 0) return text + "No rank is unlike the others by more than 5 %.\n";
  text += fmt::format("The odd one out: {}, against {}:\n", plain(ranks[static_cast<std::size_t>(comparison.odd)].file),
                      plain(ranks[static_cast<std::size_t>(comparison.typical)].file));
  for (std::size_t i = 0; i < std::min<std::size_t>(8, comparison.differences.size()); ++i) {
    const analysis::RankDifference& row = comparison.differences[i];
    text += fmt::format("    {:>12}  {:<13} {}\n", signed_text(row.bytes), name_of(row.category), plain(row.where));
  }
  return text;
}

json diff_json(const std::vector<analysis::SnapshotDiff>& devices) {
  json list = json::array();
  std::int64_t total = 0;
  json all = json::array();
  for (const analysis::SnapshotDiff& diff : devices) {
    json rows = json::array();
    for (const analysis::DiffRow& row : diff.rows)
      rows.push_back({{"bytes", row.bytes},
                      {"where", row.where},
                      {"persistent", row.persistent},
                      {"category", name_of(row.category)},
                      {"before_bytes", row.before},
                      {"after_bytes", row.after},
                      {"device", diff.device}});
    const auto delta = static_cast<std::int64_t>(diff.peak_after) - static_cast<std::int64_t>(diff.peak_before);
    total += delta;
    for (const json& row : rows) all.push_back(row);
    list.push_back({{"index", diff.device},
                    {"peak_before_bytes", diff.peak_before},
                    {"peak_after_bytes", diff.peak_after},
                    {"delta_peak_bytes", delta},
                    {"rows", rows}});
  }
  return {{"version", 1}, {"delta_peak_bytes", total}, {"rows", all}, {"devices", list}};
}

std::string diff_text(const std::vector<analysis::SnapshotDiff>& devices) {
  std::string text;
  for (const analysis::SnapshotDiff& diff : devices) {
    const auto delta = static_cast<std::int64_t>(diff.peak_after) - static_cast<std::int64_t>(diff.peak_before);
    text += fmt::format("Device {}: peak {} -> {} ({})\n", diff.device, size_text(diff.peak_before),
                        size_text(diff.peak_after), signed_text(delta));
    std::int64_t rest = 0;
    for (std::size_t i = 0; i < diff.rows.size(); ++i) {
      const analysis::DiffRow& row = diff.rows[i];
      if (i >= 20) {
        rest += row.bytes;
        continue;
      }
      text += fmt::format("  {:>12}  {:<10} {:<13} {}\n", signed_text(row.bytes),
                          row.persistent ? "persistent" : "temporary", name_of(row.category), plain(row.where));
    }
    if (diff.rows.size() > 20)
      text += fmt::format("  {:>12}  {} more places\n", signed_text(rest), diff.rows.size() - 20);
    if (diff.rows.empty()) text += "  the same places hold the same bytes at the peak\n";
  }
  return text;
}

}  // namespace memfit::report
