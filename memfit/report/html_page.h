// The frame of every HTML page memfit writes: one file that opens without a network, uPlot inside, the data as JSON
// inside, readable with a keyboard and in dark mode.
// Not here: what a page says (run_report, snapshot_html, ...) and any arithmetic.
// Threads: any, no state. Cost: one copy of the parts.
#pragma once

#include <string>
#include <string_view>

namespace memfit::report {

/// `text` as HTML text or attribute value: & < > " ' replaced.
std::string html_escape(std::string_view text);

/// uPlot's JavaScript (defines the global `uPlot`) and its style sheet, as vendored in third_party/uplot.
std::string_view uplot_script();
std::string_view uplot_style();

struct HtmlPage {
  std::string title;
  std::string body;    // HTML, already escaped where it must be
  std::string data;    // JSON, given to the script as the global `DATA`; may hold any text
  std::string script;  // JavaScript of this page; runs after the body exists, uPlot and `fmtBytes(n)` are there
  std::string style;   // CSS of this page, after the common one
};

/// The whole file. `fmtBytes` prints as memfit::format_bytes does.
std::string render_html_page(const HtmlPage& page);

}  // namespace memfit::report
