#include "memfit/report/html_page.h"

// The assembler copies the files into the binary: no quoting rules, no size limit of string literals.
__asm__(
    ".section .rodata\n"
    ".global memfit_uplot_js_begin\nmemfit_uplot_js_begin:\n.incbin \"" MEMFIT_UPLOT_DIR
    "/uPlot.iife.min.js\"\n"
    ".global memfit_uplot_js_end\nmemfit_uplot_js_end:\n.byte 0\n"
    ".global memfit_uplot_css_begin\nmemfit_uplot_css_begin:\n.incbin \"" MEMFIT_UPLOT_DIR
    "/uPlot.min.css\"\n"
    ".global memfit_uplot_css_end\nmemfit_uplot_css_end:\n.byte 0\n"
    ".previous\n");

extern "C" {
extern const char memfit_uplot_js_begin[], memfit_uplot_js_end[], memfit_uplot_css_begin[], memfit_uplot_css_end[];
}

namespace memfit::report {
namespace {

constexpr std::string_view kStyle = R"css(
:root { color-scheme: light dark; --fg: #1b1f24; --bg: #fff; --mute: #59636e; --line: #d1d9e0; --accent: #0969da; --bad: #cf222e; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6edf3; --bg: #0d1117; --mute: #9198a1; --line: #3d444d; --accent: #4493f8; --bad: #f85149; } }
body { font: 14px/1.5 system-ui, sans-serif; color: var(--fg); background: var(--bg); margin: 0 auto; max-width: 1400px; padding: 1rem 1.5rem 4rem; }
h1 { font-size: 1.35rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.num, th.num { text-align: right; white-space: nowrap; }
code, pre { font: 12px/1.45 ui-monospace, monospace; } pre { white-space: pre-wrap; margin: .2rem 0; }
.mute { color: var(--mute); } .bad { color: var(--bad); } button, select, input { font: inherit; }
.u-legend { color: var(--fg); }
)css";

constexpr std::string_view kScript = R"js(
function fmtBytes(n) {
  const a = Math.abs(n);
  if (a < 1024) return n + ' B';
  if (a < 1048576) return (n / 1024).toFixed(1) + ' KiB';
  if (a < 1073741824) return (n / 1048576).toFixed(1) + ' MiB';
  return (n / 1073741824).toFixed(2) + ' GiB';
}
)js";

/// JSON inside a <script> element: "</script>" or "<!--" in a string must not end it.
std::string script_safe(const std::string& json) {
  std::string out;
  out.reserve(json.size() + 64);
  for (const char c : json) {
    if (c == '<') out += "\\u003c";
    else out += c;
  }
  return out;
}

}  // namespace

std::string html_escape(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

std::string_view uplot_script() {
  return {memfit_uplot_js_begin, static_cast<std::size_t>(memfit_uplot_js_end - memfit_uplot_js_begin)};
}

std::string_view uplot_style() {
  return {memfit_uplot_css_begin, static_cast<std::size_t>(memfit_uplot_css_end - memfit_uplot_css_begin)};
}

std::string render_html_page(const HtmlPage& page) {
  std::string out;
  out.reserve(page.body.size() + page.data.size() + page.data.size() / 16 + page.script.size() + uplot_script().size() +
              8192);
  out += "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n";
  out += "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<title>";
  out += html_escape(page.title);
  out += "</title>\n<style>";
  out += uplot_style();
  out += kStyle;
  out += page.style;
  out += "</style>\n</head>\n<body>\n";
  out += page.body;
  out += "\n<script>";
  out += uplot_script();
  out += "</script>\n<script>const DATA = ";
  out += page.data.empty() ? "null" : script_safe(page.data);
  out += ";\n";
  out += kScript;
  out += page.script;
  out += "</script>\n</body>\n</html>\n";
  return out;
}

}  // namespace memfit::report
