#!/usr/bin/env python3
"""How long a page of memfit report --html takes to show and to zoom, in headless Chromium.

Usage: page_speed.py PAGE.html [--chromium PATH]. Prints the milliseconds until the charts are drawn and of each of 40
zooms and pans. The page is copied with a few lines of script added; nothing else is changed.
"""
import argparse
import json
import os
import re
import statistics
import subprocess
import tempfile

PROBE = """
<script>
(async () => {
  const shown = performance.now(), times = [];
  for (const u of window.CHARTS) {
    const x = u.data[0], lo = x[0], hi = x[x.length - 1], span = hi - lo;
    for (let k = 0; k < 20; k++) {
      const width = span / 2 ** (k % 10), at = lo + (span - width) * ((k * 7919) % 100) / 100;
      const start = performance.now();
      u.setScale('x', { min: at, max: at + width });
      await Promise.resolve();
      times.push(performance.now() - start);
    }
  }
  document.body.setAttribute('data-probe', JSON.stringify({ shown, times, charts: window.CHARTS.length }));
})();
</script>
"""


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page")
    parser.add_argument("--chromium", default="chromium")
    args = parser.parse_args()
    html = open(args.page, encoding="utf-8").read()
    html = html.replace("const u = new uPlot(", "const u = (window.CHARTS = window.CHARTS || [])[window.CHARTS.length] = new uPlot(")
    html = html.replace("</body>", PROBE + "</body>")
    with tempfile.TemporaryDirectory() as tmp:
        path = os.path.join(tmp, "probe.html")
        open(path, "w", encoding="utf-8").write(html)
        dom = subprocess.run([args.chromium, "--headless", "--no-sandbox", "--disable-gpu", "--timeout=20000", "--dump-dom", "file://" + path],
                             capture_output=True, text=True, timeout=180).stdout
    found = re.search(r'data-probe="([^"]*)"', dom)
    if not found:
        raise SystemExit("the page did not finish")
    probe = json.loads(found.group(1).replace("&quot;", '"'))
    times = probe["times"]
    print(json.dumps({"page_bytes": os.path.getsize(args.page), "charts": probe["charts"], "shown_ms": round(probe["shown"]),
                      "zoom_ms": {"median": round(statistics.median(times), 1), "max": round(max(times), 1), "count": len(times)}}))


if __name__ == "__main__":
    main()
